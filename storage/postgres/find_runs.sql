-- name: find_runs
-- What already has these ids: whether by the same start, where it stands, and under which claim.
select i.run_id, r.workflow, coalesce(f.status, r.status) as status, r.start_token, r.created_at, f.claim_id, f.revision,
       f.entered_at, w.wake_seq
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select workflow, status, start_token, created_at from perdure_runs where run_id = i.run_id offset 0) r
  left join lateral (
    select status, claim_id, revision, entered_at from perdure_fences where run_id = i.run_id offset 0) f on true
  left join lateral (select wake_seq from perdure_wakes where run_id = i.run_id offset 0) w on true;
