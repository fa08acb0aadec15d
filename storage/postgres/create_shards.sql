-- name: create_shards
-- $1 shards of equal slot ranges (65,536 slots), once.
insert into perdure_shards (shard_id, slot_lo, slot_hi)
select n, n * 65536::bigint / $1::int, (n + 1) * 65536::bigint / $1::int - 1 from generate_series(0, $1::int - 1) as n
on conflict (shard_id) do nothing;
