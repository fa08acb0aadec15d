-- name: end_ghost
-- End our own session whose connection we cut, known by pid and start, or by the name of its transaction: nobody else
-- can be hit.
select pg_terminate_backend(pid) from pg_stat_activity
 where case when $3::text is null then pid = $1 and backend_start = $2 else application_name = $3 end;
