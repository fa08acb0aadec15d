-- name: free_locks
-- $1 runners  $2 their keys. Read from the list of locks: a test that takes the lock could be in its owner's way.
with held as materialized (
  select (l.classid::bigint << 32) | l.objid::bigint as key
    from pg_locks l
   where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
     and l.objsubid = 1 and l.granted and l.mode = 'ExclusiveLock'
)
select k.runner_id from unnest($1::bigint[], $2::bigint[]) as k(runner_id, key)
 where not exists (select 1 from held h where h.key = k.key);
