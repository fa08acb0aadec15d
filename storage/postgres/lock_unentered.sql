-- name: lock_unentered
-- Before `cancel_unentered`, in its transaction: takes the rows of a run nobody has, so that the next statement sees, and
-- deletes, also the mail that came while these were waited for.
with f as materialized (
  select run_id from perdure_fences where run_id = $1 and claim_id is null for no key update
)
select w.run_id from f join perdure_wakes w on w.run_id between f.run_id and f.run_id for no key update of w;
