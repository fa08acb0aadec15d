-- name: reshard.clear
delete from perdure_shards

-- name: reshard.shard
insert into perdure_shards (shard_id, slot_lo, slot_hi, epoch) values (?, ?, ?, ?)

-- name: void.runners
update perdure_runners set dead = 1 where not dead returning runner_id

-- name: void.claimed
select run_id, workflow from perdure_fences where claim_id is not null order by run_id

-- name: void.wakes
-- Before the claims go: whoever had a run has it no more, and it is due.
update perdure_wakes
   set wake_at = case when hold is null then :now end
 where run_id in (select f.run_id from perdure_fences f where f.claim_id is not null)

-- name: void.fences
update perdure_fences
   set status = 'suspended', reason = null, claim_id = null, runner_id = null, pinned = 0, revision = revision + 1
 where claim_id is not null

-- name: void.shards
update perdure_shards set runner_id = null, epoch = epoch + :raise returning shard_id

-- name: examine.synchronous
pragma synchronous

-- name: examine.journal_mode
pragma journal_mode

-- name: examine.workflows
select workflow, count(*) from perdure_fences group by workflow order by workflow

-- name: examine.held
select w.run_id, f.workflow, w.hold, count(*) over () from perdure_wakes w join perdure_fences f on f.run_id = w.run_id
 where w.hold is not null order by w.run_id limit :limit

-- name: examine.stuck
-- Runs nothing happened to since :before though it should have, the longest first.
select f.run_id, f.workflow, 'due' as why, :now - w.wake_at as idle
  from perdure_wakes w join perdure_fences f on f.run_id = w.run_id
 where w.hold is null and f.status in ('pending', 'suspended') and w.wake_at < :before
union all
select run_id, workflow, 'running', :now - since
  from (select f.run_id, f.workflow, f.status,
               max(f.claimed_at, coalesce((select max(s.finished_at) from perdure_steps s where s.run_id = f.run_id), 0)) as since
          from perdure_fences f where f.status = 'running')
 where since < :before
union all
select f.run_id, f.workflow, 'timer', :now - f.claimed_at
  from perdure_fences f join perdure_wakes w on w.run_id = f.run_id
 where f.status = 'suspended' and f.reason in ('timer', 'retry') and w.wake_at is null and w.hold is null
   and f.claimed_at < :before
 order by idle desc limit :limit
