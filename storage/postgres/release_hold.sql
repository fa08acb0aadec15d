-- name: release_hold
-- An operator's resume: the hold is gone, the crash count starts anew, the run is due now; what asked for the hold counts
-- as read. One that was never entered is pending again. Waits for its rows.
--   $1 run  $2 batch
with f as materialized (
  select run_id from perdure_fences
   where run_id = $1 and claim_id is null and status = 'suspended' for no key update
), w as materialized (
  select w.run_id from f join perdure_wakes w on w.run_id between f.run_id and f.run_id where w.hold is not null for no key update of w
), uf as (
  update perdure_fences x
     set status = case when x.entered_at is null then 'pending' else x.status end, reason = null, reclaim_count = 0,
         revision = x.revision + 1, last_batch = $2
    from w where x.run_id between w.run_id and w.run_id
), uw as (
  update perdure_wakes x set hold = null, wake_at = clock_timestamp() from w where x.run_id between w.run_id and w.run_id
), asked as (
  update perdure_messages m set consumed_seq = 0
   where m.run_id = $1 and m.kind = 'suspend' and m.consumed_seq is null and exists (select 1 from w)
), event as (
  insert into perdure_run_events (run_id, type, at) select run_id, 'run-resumed', clock_timestamp() from w
)
select run_id from w;
