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
