-- name: find_ghost
select 1 from pg_stat_activity where pid = $1 and backend_start = $2;
