-- name: replace_shards
-- $1 shards  $2 first slots  $3 last slots  $4 epochs. All others go.
with gone as (
  delete from perdure_shards where shard_id <> all($1::int[])
)
insert into perdure_shards (shard_id, slot_lo, slot_hi, epoch)
select * from unnest($1::int[], $2::int[], $3::int[], $4::bigint[])
on conflict (shard_id) do update
   set slot_lo = excluded.slot_lo, slot_hi = excluded.slot_hi, runner_id = null, epoch = excluded.epoch;
