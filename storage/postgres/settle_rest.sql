-- name: settle_rest
-- Members that were not applied or not locked, by a plain read: the fence as it is, and what the cold row says of the end.
select r.run_id, r.status as run_status, r.last_claim as run_claim, r.last_batch as run_batch,
       f.run_id is not null as fenced, f.claim_id, f.revision, f.last_batch, f.next_seq
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select * from perdure_runs where run_id = i.run_id offset 0) r
  left join lateral (select * from perdure_fences where run_id = i.run_id offset 0) f on true;
