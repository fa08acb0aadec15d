-- name: is_dead
select dead from perdure_runners where runner_id = :runner_id

-- name: claim.shards
-- The shards that are really mine under the epoch I know, in the order given.
select s.shard_id, s.epoch, s.slot_lo, s.slot_hi
  from (select key as place, value->>0 as shard_id, value->>1 as epoch from json_each(:holds)) h
  join perdure_shards s on s.shard_id = h.shard_id and s.epoch = h.epoch and s.runner_id = :runner_id
 order by h.place

-- name: claim.due
-- The correlated subquery looks into one bucket after the other, in due order, and never reads past its limit. Where no
-- run is wanted, a backlog of known ones hides none that is not known.
select w.run_id, b.slot_lo, b.epoch, f.status, f.runner_id, f.workflow in (select value from json_each(:workflows)) as known,
       f.reclaim_count > 0 as suspect
  from (select key as place, value->>0 as shard_id, value->>1 as epoch, value->>2 as slot_lo, value->>3 as slot_hi
          from json_each(:buckets)) b
 cross join perdure_wakes w on w.run_id in (
       select d.run_id
         from perdure_wakes d
         join perdure_fences f on f.run_id = d.run_id
        where d.slot >> 8 = b.slot_lo >> 8 and d.slot between b.slot_lo and b.slot_hi
          and d.wake_at is not null and d.wake_at <= :horizon and d.wake_at >= :floor and d.hold is null
          and f.status in ('pending', 'suspended') and f.epoch <= b.epoch
          and (:wanted > 0 and (f.reclaim_count = 0 or :suspects > 0)
               or f.workflow not in (select value from json_each(:workflows)))
        order by d.wake_at
        limit :per_shard)
  join perdure_fences f on f.run_id = w.run_id
 limit :limit

-- name: claim.orphans
-- Running, but not in anybody's memory: their runner is dead, or it is me and I do not have them.
select f.run_id, b.slot_lo, b.epoch, f.status, f.runner_id, f.workflow in (select value from json_each(:workflows)) as known,
       f.reclaim_count > 0 as suspect
  from (select value->>0 as shard_id, value->>1 as epoch, value->>2 as slot_lo, value->>3 as slot_hi
          from json_each(:buckets)) b
 cross join perdure_fences f on f.slot between b.slot_lo and b.slot_hi
  join perdure_wakes w on w.run_id = f.run_id
 where f.status = 'running' and f.epoch <= b.epoch and w.hold is null
   and f.claim_id not in (select value from json_each(:in_memory))
   and (f.runner_id = :runner_id or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead))
   and case when f.workflow in (select value from json_each(:workflows))
            then :wanted > 0 and (f.reclaim_count = 0 or :suspects > 0)
            else w.stray_revision is not f.revision end
 limit :limit

-- name: claim.strays
-- Of workflows I know, in any shard, under that shard's epoch; those from :from_slot on first.
select w.run_id, 0, s.epoch, f.status, f.runner_id, 1, f.reclaim_count > 0 as suspect
  from json_each(:workflows) k
 cross join perdure_wakes w on w.stray = k.value
  join perdure_fences f on f.run_id = w.run_id and f.revision = w.stray_revision and f.workflow = k.value
  join perdure_shards s on s.shard_id = coalesce(
         (select x.shard_id from perdure_shards x
           where x.shard_id = ((w.slot + 1) * (select max(y.shard_id) + 1 from perdure_shards y) - 1) / 65536
             and w.slot between x.slot_lo and x.slot_hi),
         (select x.shard_id from perdure_shards x where w.slot between x.slot_lo and x.slot_hi limit 1))
       and f.epoch <= s.epoch
 where w.hold is null and (f.reclaim_count = 0 or :suspects > 0)
   and (f.status in ('pending', 'suspended')
        or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead))
 order by w.slot < :from_slot, w.slot, w.run_id
 limit :limit

-- name: claim.lost
-- Running under me, in whatever shard, and not in my memory.
select f.run_id, 0, s.epoch, f.status, f.runner_id, 1, 0
  from perdure_fences f
  join perdure_wakes w on w.run_id = f.run_id
  join perdure_shards s on s.shard_id = coalesce(
         (select x.shard_id from perdure_shards x
           where x.shard_id = ((f.slot + 1) * (select max(y.shard_id) + 1 from perdure_shards y) - 1) / 65536
             and f.slot between x.slot_lo and x.slot_hi),
         (select x.shard_id from perdure_shards x where f.slot between x.slot_lo and x.slot_hi limit 1))
       and f.epoch <= s.epoch
 where f.status = 'running' and f.runner_id = :runner_id and w.hold is null
   and f.claim_id not in (select value from json_each(:in_memory))
   and f.workflow in (select value from json_each(:workflows))
 limit :limit

-- name: claim.mark
-- Out of the way of claims, the longer the longer nobody has taken it; spread, since many may have come at once.
update perdure_wakes as w
   set stray = f.workflow, stray_revision = f.revision,
       stray_since = case when w.stray_revision = f.revision then w.stray_since else :now end,
       wake_at = case when f.status = 'running' then w.wake_at
                      else :now + min(max(4 * (:now - case when w.stray_revision = f.revision then w.stray_since else :now end),
                                          60000000), 3600000000) * (128 + w.slot % 256) / 256 end
  from perdure_fences f
 where f.run_id = w.run_id and w.run_id in (select value from json_each(:run_ids))
returning stray

-- name: claim.fence
-- A claim: a fresh random id, the shard's epoch, revision + 1. Entered is entered once.
update perdure_fences as f
   set status = 'running', reason = null, claim_id = c.claim_id, epoch = c.epoch, revision = f.revision + 1,
       runner_id = :runner_id, claimed_at = :now, entered_at = coalesce(f.entered_at, :now),
       reclaim_count = f.reclaim_count + c.involuntary
  from (select value->>0 as run_id, value->>1 as claim_id, value->>2 as epoch, value->>3 as involuntary
          from json_each(:claims)) c
 where f.run_id = c.run_id and f.epoch <= c.epoch

-- name: claim.wake
update perdure_wakes
   set wake_at = null, stray = null, stray_revision = null, stray_since = null
 where run_id in (select value->>0 from json_each(:claims)) and (wake_at <= :horizon or stray is not null)

-- name: claim.read
select f.run_id, f.slot, f.claim_id, f.epoch, f.revision, f.next_seq, f.entered_at, f.reclaim_count, w.wake_seq,
       r.workflow, r.version, r.payload, r.payload_format, r.seed, r.created_at, r.source, r.parent_id, r.trace,
       r.tenant, f.last_batch
  from json_each(:claims) c
  join perdure_fences f on f.run_id = c.value->>0 and f.claim_id = c.value->>1
  join perdure_wakes w on w.run_id = f.run_id
  join perdure_runs r on r.run_id = f.run_id
 order by f.run_id

-- name: due_in_memory.look
-- Of the runs in my memory: news = more mail than I have seen; stale = due, but there is nothing new.
select w.run_id, w.wake_seq > i.seen as news
  from (select value->>0 as run_id, value->>1 as seen from json_each(:seen)) i
  join perdure_wakes w on w.run_id = i.run_id
  join perdure_fences f on f.run_id = w.run_id
 where w.wake_seq > i.seen or (w.wake_seq = i.seen and w.wake_at <= :now and f.status = 'running')

-- name: due_in_memory.clear
-- Only of a running run: the wake_at of a parked one is its timer.
update perdure_wakes as w
   set wake_at = null
  from (select value->>0 as run_id, value->>1 as seen from json_each(:seen)) i
  join perdure_fences f on f.run_id = i.run_id and f.status = 'running'
 where w.run_id = i.run_id and w.wake_seq = i.seen and w.wake_at <= :now

-- name: upcoming
-- Those due for more than ten seconds are left to claims, so that a backlog is not read over and over; so are strays.
select w.run_id, w.slot, w.wake_at
  from (select value->>0 as slot_lo, value->>1 as slot_hi from json_each(:buckets)) b
 cross join perdure_wakes w on w.slot >> 8 = b.slot_lo >> 8 and w.slot between b.slot_lo and b.slot_hi
  join perdure_fences f on f.run_id = w.run_id
 where w.wake_at is not null and w.wake_at >= :now - 10000000 and w.wake_at < :until and w.hold is null and f.status = 'suspended'
   and w.stray_revision is not f.revision
 order by w.wake_at
 limit :limit
