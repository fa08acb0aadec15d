-- name: note_events
-- Lines for people, of runs that have not ended: unfenced, so they prove nothing.  $1 runs  $2 types  $3 instants  $4 details
insert into perdure_run_events (run_id, type, at, detail)
select u.run_id, u.type, u.at, u.detail
  from unnest($1::text[], $2::text[], $3::timestamptz[], $4::text[]) as u(run_id, type, at, detail)
 cross join lateral (select 1 from perdure_fences where run_id = u.run_id offset 0) live;
