-- name: release_shards
with s as materialized (
  select x.shard_id from unnest($2::int[], $3::bigint[]) as h(shard_id, epoch)
    join perdure_shards x on x.shard_id = h.shard_id and x.epoch = h.epoch and x.runner_id = $1
   order by x.shard_id for no key update of x
)
update perdure_shards x set runner_id = null from s where x.shard_id = s.shard_id;
