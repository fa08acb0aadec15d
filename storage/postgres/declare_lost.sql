-- name: declare_lost
-- $1 runner  $2 the renew_count seen at both tests  $3 its key. Whoever comes back renews before it takes its lock
-- again: the count has moved by then, or this row is dead when it renews.
update perdure_runners set dead = true
 where runner_id = $1 and renew_count = $2 and not dead
   and not exists (
     select 1 from pg_locks l
      where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
        and l.objsubid = 1 and l.granted and l.mode = 'ExclusiveLock'
        and (l.classid::bigint << 32) | l.objid::bigint = $3::bigint
   )
returning runner_id;
