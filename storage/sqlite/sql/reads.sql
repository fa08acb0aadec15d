-- name: journal
-- What follows in one journal. Read row by row, until a page is full: a row that is not read costs nothing.
select seq, kind, step_key, at, status, attempt, input_hash, input, output, error, started_at, format
  from perdure_steps
 where run_id = :run_id and seq > :seq and superseded_by is null
 order by seq limit :entries

-- name: open_events
-- What a run has announced and no entry has ended since, newest first. A failed attempt of a step does not end it.
select type, at, detail
  from perdure_run_events
 where run_id = :run_id and type in ('step-started', 'signal-awaited', 'signal-abandoned', 'timer-set')
   and detail->>'key' not in (select step_key from perdure_steps where run_id = :run_id and kind <> 'attempt')
 order by event_id desc limit 100

-- name: open_attempts
-- The last failed attempt of each step that has not ended. (With max() SQLite takes the other columns from its row.)
select max(seq), kind, step_key, at, status, attempt, input_hash, input, output, error, started_at, format
  from perdure_steps
 where run_id = :run_id and kind = 'attempt'
   and step_key not in (select step_key from perdure_steps where run_id = :run_id and kind <> 'attempt')
 group by step_key

-- name: read_runs
-- The lists and look-ups of people add their conditions to this one.
select r.run_id, r.workflow, r.version, coalesce(f.status, r.status) as status, r.slot, r.source, r.created_at,
       r.payload, r.payload_format, coalesce(f.entered_at, r.started_at) as started_at, r.finished_at, r.result, r.error,
       coalesce(f.reason, r.reason) as reason, w.wake_at, w.hold, f.runner_id, f.claim_id, f.epoch,
       coalesce(f.reclaim_count, 0) as reclaim_count,
       coalesce(f.next_seq, 1) as next_seq,
       (select count(*) from perdure_messages m
         where m.run_id = r.run_id and m.consumed_seq is null and m.kind <> 'suspend') as unread,
       r.parent_id, r.tenant, r.trace, r.subject, r.tags, coalesce(w.stray_revision = f.revision, 0) as stray
  from perdure_runs r
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id

-- name: count_runs
select status, count(*) from perdure_fences group by status
union all
select * from (
  select 'running elsewhere', count(*) as n
    from perdure_fences f
    join perdure_shards s on s.shard_id = ((f.slot + 1) * (select max(x.shard_id) + 1 from perdure_shards x) - 1) / 65536
   where f.status = 'running' and f.runner_id is not s.runner_id)
 where n > 0

-- name: read_events
select type, at, detail
  from perdure_run_timeline
 where run_id = :run_id
 order by at, seq is null, seq, event_id is null, event_id

-- name: delete_finished.pick
select run_id from perdure_runs
 where finished_at is not null and finished_at < :before
 order by finished_at
 limit :limit

-- name: delete_finished.steps
delete from perdure_steps where run_id in (select value from json_each(:run_ids))

-- name: delete_finished.events
delete from perdure_run_events where run_id in (select value from json_each(:run_ids))

-- name: delete_finished.messages
delete from perdure_messages where run_id in (select value from json_each(:run_ids))

-- name: delete_finished.runs
delete from perdure_runs where run_id in (select value from json_each(:run_ids))
