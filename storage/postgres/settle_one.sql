-- name: settle_one
-- The same for one run, waiting for its row as long as lock_timeout allows.
select run_id, claim_id, revision, last_batch, next_seq
  from perdure_fences where run_id = $1 for no key update;
