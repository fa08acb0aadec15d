-- name: signal.wake
-- The mailbox of a live run. No row: the run has ended, or there is none.
select w.slot, w.wake_seq,
       exists (select 1 from perdure_messages m where m.run_id = w.run_id and m.message_id = :message_id) as known,
       (select count(*) from perdure_messages m where m.run_id = w.run_id and m.consumed_seq is null) as unread,
       (select coalesce(sum(length(cast(m.body as blob))), 0) from perdure_messages m
         where m.run_id = w.run_id and m.consumed_seq is null) as bytes
  from perdure_wakes w
 where w.run_id = :run_id

-- name: signal.ended
select slot from perdure_runs where run_id = :run_id

-- name: signal.store
insert into perdure_messages (run_id, message_id, wake_seq, kind, name, body, format, sent_at)
values (:run_id, :message_id, :wake_seq, :kind, :name, :body, :format, :now)

-- name: signal.wake_up
-- A held run collects its mail without becoming due.
update perdure_wakes
   set wake_seq = :wake_seq, wake_at = case when hold is null then min(coalesce(wake_at, :now), :now) end
 where run_id = :run_id

-- name: mailbox
-- wake_seq and the unread messages in one snapshot, the only source of `seen` (R6).
select w.run_id, w.wake_seq, m.message_id, m.kind, m.name, m.body, m.wake_seq, m.sent_at, m.format
  from json_each(:run_ids) i
  join perdure_wakes w on w.run_id = i.value
  left join perdure_messages m on m.run_id = w.run_id and m.consumed_seq is null
 order by w.run_id, m.wake_seq

-- name: cancel_unentered.find
-- Nobody ever entered it, or an operator has to act before anybody may.
select f.last_batch, f.entered_at
  from perdure_fences f
  join perdure_wakes w on w.run_id = f.run_id
 where f.run_id = :run_id and f.claim_id is null and (f.entered_at is null or w.hold is not null)

-- name: cancel_unentered.end
update perdure_runs
   set status = 'cancelled', reason = :reason, started_at = :entered_at, finished_at = :now, last_batch = :batch_id
 where run_id = :run_id

-- name: cancel_unentered.settle
-- No fence row any more: was it this call, sent before?
select 1 from perdure_runs
 where run_id = :run_id and status = 'cancelled' and last_batch = :batch_id

-- name: hold.find
select w.hold, f.claim_id, f.last_batch
  from perdure_fences f
  join perdure_wakes w on w.run_id = f.run_id
 where f.run_id = :run_id

-- name: hold_run.fence
update perdure_fences
   set status = 'suspended', reason = 'operator', revision = revision + 1, last_batch = :batch_id
 where run_id = :run_id

-- name: hold_run.wake
update perdure_wakes set hold = 'operator', wake_at = null where run_id = :run_id

-- name: hold_run.event
insert into perdure_run_events (run_id, type, at, detail) values (:run_id, 'run-suspended', :now, :reason)

-- name: suspend.take
-- What asked for a hold counts as read; no entry took it.
update perdure_messages set consumed_seq = 0
 where run_id = :run_id and kind = 'suspend' and consumed_seq is null
returning message_id

-- name: suspend.wake
update perdure_wakes
   set wake_seq = wake_seq + 1, wake_at = min(coalesce(wake_at, :now), :now)
 where run_id = :run_id

-- name: release_hold.fence
-- One that was never entered is pending again.
update perdure_fences
   set status = case when entered_at is null then 'pending' else status end, reason = null, reclaim_count = 0,
       revision = revision + 1, last_batch = :batch_id
 where run_id = :run_id

-- name: release_hold.wake
update perdure_wakes set hold = null, wake_at = :now where run_id = :run_id

-- name: release_hold.event
insert into perdure_run_events (run_id, type, at) values (:run_id, 'run-resumed', :now)

-- name: end_run.fence
delete from perdure_fences where run_id = :run_id

-- name: end_run.wake
delete from perdure_wakes where run_id = :run_id

-- name: end_run.messages
delete from perdure_messages where run_id = :run_id
