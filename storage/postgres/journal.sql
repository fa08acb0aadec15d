-- name: journal
select s.run_id, s.seq, s.kind, s.step_key, s.at, s.status, s.attempt, s.input_hash, s.input, s.output, s.error, s.started_at, s.format
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select * from perdure_steps where run_id = i.run_id and superseded_by is null offset 0) s
 order by s.run_id, s.seq;
