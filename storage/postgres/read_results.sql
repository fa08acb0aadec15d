-- name: read_results
-- Only those that have ended: the cold row says it all.
select r.*
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select * from perdure_runs where run_id = i.run_id and status <> 'open' offset 0) r;
