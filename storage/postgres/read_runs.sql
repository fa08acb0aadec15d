-- name: read_runs
-- Whole runs as people and clients see them.
select r.*, f.status as live_status, f.reason as live_reason, f.runner_id, f.claim_id, f.epoch, f.reclaim_count, f.next_seq,
       f.entered_at, w.wake_at, w.hold, w.stray_revision = f.revision as stray, m.unread
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select * from perdure_runs where run_id = i.run_id offset 0) r
  left join lateral (select * from perdure_fences where run_id = i.run_id offset 0) f on true
  left join lateral (select wake_at, hold, stray_revision from perdure_wakes where run_id = i.run_id offset 0) w on true
 cross join lateral (
   select count(*) as unread from perdure_messages where run_id = i.run_id and consumed_seq is null and kind <> 'suspend') m;
