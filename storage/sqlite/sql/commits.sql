-- name: commit.fence
-- The fence (R1): only what is returned may write anything else in this transaction.
update perdure_fences as f
   set revision = f.revision + 1, next_seq = f.next_seq + b.entries, last_batch = :batch_id,
       reclaim_count = case when b.entries > 0 then 0 else f.reclaim_count end
  from (select value->>0 as run_id, value->>1 as claim_id, value->>2 as revision, value->>3 as entries, value->>4 as first_seq
          from json_each(:batch)) b
 where f.run_id = b.run_id and f.claim_id = b.claim_id and f.revision = b.revision
   and f.next_seq = coalesce(b.first_seq, f.next_seq)
returning run_id, revision, entered_at

-- name: commit.wakes
-- The wake rows of those that park and of the parents of those that finish.
select w.run_id, w.wake_seq
  from json_each(:run_ids) i
  join perdure_wakes w on w.run_id = i.value

-- name: commit.entry
insert into perdure_steps (run_id, seq, step_key, kind, attempt, status, input_hash, input, output, error, format,
                           claim_id, at, started_at, finished_at)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: commit.consume
-- The row stays until the run ends, so that its id is known; its body is in the journal.
update perdure_messages set consumed_seq = ?, body = null where run_id = ? and message_id = ?

-- name: commit.event
insert into perdure_run_events (run_id, type, at, detail) values (?, ?, ?, ?)

-- name: note_event
insert into perdure_run_events (run_id, type, at, detail)
select :run_id, :type, :at, :detail where exists (select 1 from perdure_fences where run_id = :run_id)

-- name: commit.park_fence
update perdure_fences
   set status = 'suspended', reason = :reason, claim_id = null, runner_id = null
 where run_id = :run_id

-- name: commit.park_wake
-- In the past is now: low-water marks of scans rely on due times being no older than their statement.
update perdure_wakes set wake_at = max(:wake_at, :now), hold = :hold where run_id = :run_id

-- name: commit.finish
update perdure_runs
   set status = :status, result = :result, result_format = :result_format, error = :error, error_type = :error_type,
       error_message = :error_message, reason = :reason, started_at = :entered_at, finished_at = :now,
       last_claim = :claim_id, last_batch = :batch_id, last_revision = :revision
 where run_id = :run_id

-- name: commit.tell_parent
insert into perdure_messages (run_id, message_id, wake_seq, kind, name, body, sent_at)
values (:run_id, :message_id, :wake_seq, 'child', :status, :body, :now)
on conflict (run_id, message_id) do nothing

-- name: commit.wake_parent
update perdure_wakes
   set wake_seq = :wake_seq, wake_at = case when hold is null then min(coalesce(wake_at, :now), :now) end
 where run_id = :run_id

-- name: settle
-- Members that were not applied: the fence as it is, and who ended the run.
select r.run_id, r.last_batch, f.run_id is not null as live, f.claim_id, f.revision, f.last_batch, f.next_seq
  from json_each(:run_ids) i
  join perdure_runs r on r.run_id = i.value
  left join perdure_fences f on f.run_id = r.run_id
