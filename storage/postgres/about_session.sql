-- name: about_session
-- The server's process behind this session, and where the server stands. The time line is that of the log's current
-- file; a standby, which writes none, does not say.
select a.pid, a.backend_start, c.system_identifier::text as system,
       case when not pg_is_in_recovery() then ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int end as timeline,
       case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end as flushed
  from pg_control_system() c left join pg_stat_activity a on a.pid = pg_backend_pid();
