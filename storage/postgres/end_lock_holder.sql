-- name: end_lock_holder
-- $1 the runner's key, which nobody but that runner ever takes.
select pg_terminate_backend(l.pid)
  from pg_locks l
 where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
   and l.objsubid = 1 and l.granted and (l.classid::bigint << 32) | l.objid::bigint = $1::bigint
   and l.pid <> pg_backend_pid();
