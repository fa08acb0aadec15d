-- name: examine_sessions
-- Transactions open for longer than $1 seconds, prepared ones too, and those open and idle for longer than $2. Of a session
-- of another role the state may be hidden: null.
select pid, coalesce(application_name, '') as application, coalesce(usename, '') as "user", state,
       extract(epoch from clock_timestamp() - xact_start)::float8 as seconds
  from pg_stat_activity
 where pid <> pg_backend_pid() and coalesce(backend_type, 'client backend') = 'client backend' and usename is not null
   and (state is null
        or clock_timestamp() - xact_start > $1::float8 * interval '1 second'
        or state like 'idle in transaction%' and clock_timestamp() - state_change > $2::float8 * interval '1 second')
union all
select 0, gid, owner, 'prepared', extract(epoch from clock_timestamp() - prepared)::float8
  from pg_prepared_xacts
 where database = current_database() and clock_timestamp() - prepared > $1::float8 * interval '1 second';
