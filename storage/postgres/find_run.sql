-- name: find_run
select status, slot, last_batch from perdure_runs where run_id = $1;
