-- name: open_events
-- What a run has announced and no entry has ended since, newest first. A failed attempt of a step does not end it.
select type, at, detail
  from perdure_run_events
 where run_id = $1 and type in ('step-started', 'signal-awaited', 'signal-abandoned', 'timer-set')
   and detail::json->>'key' not in (select step_key from perdure_steps where run_id = $1 and kind <> 'attempt')
 order by event_id desc limit 100;
