-- name: find_runs
-- What already has these ids: whether by the same start, and where it stands.
select i.run_id, r.workflow, coalesce(f.status, r.status) as status, r.start_token
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select workflow, status, start_token from perdure_runs where run_id = i.run_id offset 0) r
  left join lateral (select status from perdure_fences where run_id = i.run_id offset 0) f on true;
