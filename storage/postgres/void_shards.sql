-- name: void_shards
-- $1: by how much epochs are raised.
update perdure_shards set runner_id = null, epoch = epoch + $1 returning shard_id;
