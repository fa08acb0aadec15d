-- name: find_ghost
select 1 from pg_stat_activity
 where case when $3::text is null then pid = $1 and backend_start = $2 else application_name = $3 end;
