-- name: read_events
select type, at, detail from perdure_run_timeline where run_id = $1 order by at, seq nulls last, event_id nulls last;
