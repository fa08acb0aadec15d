-- name: void_claims
-- Whoever had a run has it no more: its fence matches no write of anybody, and it is due. Waits for its rows.
with f as materialized (
  select run_id from perdure_fences where claim_id is not null order by run_id for no key update
), w as materialized (
  select w.run_id, w.hold from perdure_wakes w join f on f.run_id = w.run_id order by w.run_id for no key update of w
), uf as (
  update perdure_fences x
     set status = 'suspended', reason = null, claim_id = null, runner_id = null, pinned = false, revision = x.revision + 1
    from f where x.run_id = f.run_id
  returning x.run_id, x.workflow
), uw as (
  update perdure_wakes x set wake_at = case when w.hold is null then clock_timestamp() end from w where x.run_id = w.run_id
)
select run_id, workflow from uf order by run_id;
