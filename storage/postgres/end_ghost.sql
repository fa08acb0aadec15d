-- name: end_ghost
-- End our own session whose connection we cut, known by pid and start: nobody else can be hit.
select pg_terminate_backend(pid) from pg_stat_activity where pid = $1 and backend_start = $2;
