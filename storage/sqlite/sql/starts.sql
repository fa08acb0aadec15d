-- name: find_runs
select r.run_id, r.workflow, coalesce(f.status, r.status) as status, r.start_token, f.claim_id, f.revision, r.created_at,
       f.entered_at, w.wake_seq
  from json_each(:run_ids) i
  join perdure_runs r on r.run_id = i.value
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id

-- name: start.births
-- Which of these wishes are granted: the shard is still that runner's under that epoch, and the runner is not dead.
select b.value->>0
  from json_each(:births) b
  join perdure_shards s on s.shard_id = b.value->>2 and s.runner_id = b.value->>1 and s.epoch = b.value->>3
   and b.value->>4 between s.slot_lo and s.slot_hi
  join perdure_runners r on r.runner_id = s.runner_id and not r.dead

-- name: start.run
insert into perdure_runs (run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, created_at,
                          payload, payload_format, start_token)
values (:run_id, :slot, :workflow, :version, :source, :tenant, :subject, :tags, :trace, :parent_id, :seed, :now,
        :payload, :format, :start_token)

-- name: start.fence
insert into perdure_fences (run_id, slot, workflow, version, status, claim_id, epoch, revision, runner_id, entered_at, claimed_at)
values (:run_id, :slot, :workflow, :version, case when :claim_id is null then 'pending' else 'running' end, :claim_id, :epoch,
        :revision, :runner_id, :born_at, :born_at)

-- name: start.wake
insert into perdure_wakes (run_id, slot, wake_at) values (:run_id, :slot, :wake_at)
