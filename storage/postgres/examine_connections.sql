-- name: examine_connections
select count(*) as n from pg_stat_activity where coalesce(backend_type, 'client backend') = 'client backend' and usename is not null;
