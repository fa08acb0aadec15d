-- name: take_shards
-- $1 me  $2 shards  $3 runners known to be dead: ids and not a join, since a runner that registered after this
-- statement's snapshot must not look dead. Dead is for ever.
with s as materialized (
  select shard_id from perdure_shards
   where shard_id = any($2::int[]) and (runner_id is null or runner_id = any($3::bigint[]))
     and exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)
   order by shard_id for no key update skip locked
)
update perdure_shards x set runner_id = $1, epoch = x.epoch + 1 from s where x.shard_id = s.shard_id
returning x.shard_id, x.epoch;
