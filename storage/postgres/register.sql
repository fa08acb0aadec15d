-- name: register
-- $1 runner  $2 replica  $3 address  $4 workflows  $5 info  $6 lease in seconds. The same runner again (an outcome was
-- unknown): its own row, unless it is dead.
insert into perdure_runners (runner_id, replica_id, address, workflows, info, expires_at)
values ($1, $2, $3, $4, $5, clock_timestamp() + $6::float8 * interval '1 second')
on conflict (runner_id) do update
   set expires_at = greatest(perdure_runners.expires_at, excluded.expires_at)
 where not perdure_runners.dead and perdure_runners.replica_id = excluded.replica_id
returning runner_id;
