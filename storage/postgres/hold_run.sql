-- name: hold_run
-- An operator's suspend of a run nobody has, entered or not; one that is on hold already stays as it is. Waits for its rows.
--   $1 run  $2 batch  $3 reason
with f as materialized (
  select run_id from perdure_fences
   where run_id = $1 and claim_id is null and status in ('pending', 'suspended') for no key update
), w as materialized (
  select w.run_id, w.hold from f join perdure_wakes w on w.run_id between f.run_id and f.run_id for no key update of w
), fresh as materialized (
  select run_id from w where hold is null
), uf as (
  update perdure_fences x
     set status = 'suspended', reason = 'operator', revision = x.revision + 1, last_batch = $2
    from fresh where x.run_id between fresh.run_id and fresh.run_id
), uw as (
  update perdure_wakes x set hold = 'operator', wake_at = null from fresh where x.run_id between fresh.run_id and fresh.run_id
), event as (
  insert into perdure_run_events (run_id, type, at, detail) select run_id, 'run-suspended', clock_timestamp(), $3::text from fresh
)
select run_id from w;
