-- name: settle
-- The fences of a batch whose outcome is unknown. A row that can be locked has no transaction at work on it.
select run_id, claim_id, revision, last_batch, next_seq
  from perdure_fences where run_id = any($1::text[]) order by run_id for no key update skip locked;
