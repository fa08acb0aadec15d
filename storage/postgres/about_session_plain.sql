-- name: about_session_plain
-- The same for a role that may not ask which server this is.
select a.pid, a.backend_start, 'unknown' as system,
       case when not pg_is_in_recovery() then ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int end as timeline,
       case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end as flushed
  from (select 1) as one left join pg_stat_activity a on a.pid = pg_backend_pid();
