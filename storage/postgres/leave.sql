-- name: leave
with s as materialized (
  select shard_id from perdure_shards where runner_id = $1 order by shard_id for no key update
), x as (
  update perdure_shards x set runner_id = null from s where x.shard_id = s.shard_id
)
update perdure_runners set dead = true where runner_id = $1;
