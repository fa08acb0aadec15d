-- name: find_runs
select r.run_id, r.workflow, coalesce(f.status, r.status) as status, r.start_token
  from json_each(:run_ids) i
  join perdure_runs r on r.run_id = i.value
  left join perdure_fences f on f.run_id = r.run_id

-- name: start.run
insert into perdure_runs (run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, created_at,
                          payload, payload_format, start_token)
values (:run_id, :slot, :workflow, :version, :source, :tenant, :subject, :tags, :trace, :parent_id, :seed, :now,
        :payload, :format, :start_token)

-- name: start.fence
insert into perdure_fences (run_id, slot, workflow, version) values (:run_id, :slot, :workflow, :version)

-- name: start.wake
insert into perdure_wakes (run_id, slot, wake_at) values (:run_id, :slot, :now)
