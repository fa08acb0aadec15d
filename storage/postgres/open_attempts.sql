-- name: open_attempts
-- The last failed attempt of each step that has not ended.
select distinct on (step_key) run_id, seq, kind, step_key, at, status, attempt, input_hash, input, output, error, started_at, format
  from perdure_steps
 where run_id = $1 and kind = 'attempt'
   and step_key not in (select step_key from perdure_steps where run_id = $1 and kind <> 'attempt')
 order by step_key, seq desc;
