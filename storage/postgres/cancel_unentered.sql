-- name: cancel_unentered
-- End a run that nobody ever entered, or one on hold that nobody has. Waits for its rows; no runner ever waits for these.
--   $1 run  $2 batch  $3 reason
with f as materialized (
  select run_id, status, entered_at from perdure_fences
   where run_id = $1 and claim_id is null and status in ('pending', 'suspended') for no key update
), w as materialized (
  select w.run_id, f.entered_at from f join perdure_wakes w on w.run_id between f.run_id and f.run_id
   where f.status = 'pending' or w.hold is not null for no key update of w
), df as (
  delete from perdure_fences x using w where x.run_id between w.run_id and w.run_id
), dw as (
  delete from perdure_wakes x using w where x.run_id between w.run_id and w.run_id
), dm as (
  delete from perdure_messages x using w where x.run_id between w.run_id and w.run_id
)
update perdure_runs r
   set status = 'cancelled', reason = $3, started_at = w.entered_at, finished_at = now(), last_batch = $2
  from w where r.run_id between w.run_id and w.run_id
returning r.run_id;
