-- name: read_meta
select key, value from perdure_meta

-- name: agree
insert into perdure_meta (key, value) values (:key, :value)
on conflict (key) do update set value = excluded.value

-- name: read_hint_key
select value from perdure_meta where key = 'hint_key'

-- name: create_shards
insert into perdure_shards (shard_id, slot_lo, slot_hi) values (?, ?, ?)

-- name: register
-- The same runner again (an outcome was unknown): its own row, unless it is dead.
insert into perdure_runners (runner_id, replica_id, address, started_at, expires_at, workflows, info)
values (:runner_id, :replica_id, :address, :now, :expires_at, :workflows, :info)
on conflict (runner_id) do update
   set expires_at = max(expires_at, excluded.expires_at)
 where not dead and replica_id = excluded.replica_id
returning runner_id

-- name: renew
-- A runner that was declared dead stays dead, and a lease never gets shorter, unless the clock was set back.
update perdure_runners
   set expires_at = min(max(expires_at, :expires_at), :latest), renew_count = renew_count + 1
 where runner_id = :runner_id and not dead
returning renew_count

-- name: live_runners
select replica_id, address from perdure_runners where not dead and expires_at > :now order by replica_id

-- name: bury_runners
update perdure_runners set dead = 1 where not dead and expires_at <= :now

-- name: set_draining
update perdure_runners set draining = 1 where runner_id = :runner_id

-- name: topology.runners
select runner_id, replica_id, address, started_at, expires_at, renew_count, dead, draining, workflows,
       placement_version, info
  from perdure_runners
 order by runner_id

-- name: topology.shards
select shard_id, slot_lo, slot_hi, runner_id, epoch from perdure_shards order by shard_id

-- name: declare_dead
update perdure_runners
   set dead = 1
 where runner_id = :runner_id and renew_count = :renew_count and not dead and expires_at < :now

-- name: declare_others_dead
update perdure_runners
   set dead = 1
 where runner_id <> :runner_id and not dead
returning runner_id

-- name: take_shards
-- Free, or of a runner that is dead for ever; never of one that is alive, whatever the caller believes.
update perdure_shards as s
   set runner_id = :runner_id, epoch = s.epoch + 1
 where s.shard_id in (select value from json_each(:shard_ids))
   and (s.runner_id is null
        or s.runner_id in (select value from json_each(:dead))
           and not exists (select 1 from perdure_runners r where r.runner_id = s.runner_id and not r.dead))
   and exists (select 1 from perdure_runners me where me.runner_id = :runner_id and not me.dead)
returning shard_id, epoch

-- name: release_shards
update perdure_shards as s
   set runner_id = null
  from (select value->>0 as shard_id, value->>1 as epoch from json_each(:holds)) h
 where s.shard_id = h.shard_id and s.epoch = h.epoch and s.runner_id = :runner_id

-- name: leave.shards
update perdure_shards set runner_id = null where runner_id = :runner_id

-- name: leave.runner
update perdure_runners set dead = 1 where runner_id = :runner_id

-- name: delete_dead_runners
delete from perdure_runners
 where dead and expires_at < :before
   and runner_id not in (select s.runner_id from perdure_shards s where s.runner_id is not null)
   and runner_id not in (select f.runner_id from perdure_fences f where f.status = 'running' and f.runner_id is not null)
returning runner_id
