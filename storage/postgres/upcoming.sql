-- name: upcoming
-- Parked runs of my shards that are due soon, for the heap of timers. Those due for more than ten seconds are left to
-- claims, so that a backlog is not read over and over; so are strays.
--   $1 me  $2 shards  $3 their epochs  $4 until  $5 limit
with mine as materialized (
  select greatest(s.slot_lo, b.n << 8) as slot_lo, least(s.slot_hi, (b.n << 8) + 255) as slot_hi
    from unnest($2::int[], $3::bigint[]) as m(shard_id, epoch)
    join perdure_shards s on s.shard_id = m.shard_id and s.epoch = m.epoch and s.runner_id = $1
   cross join lateral generate_series(s.slot_lo >> 8, s.slot_hi >> 8) as b(n)
)
select d.run_id, d.slot, d.wake_at
  from mine m
 cross join lateral (
   select w.run_id, w.slot, w.wake_at
     from perdure_wakes w
    cross join lateral (select status, revision from perdure_fences where run_id = w.run_id offset 0) f
    where w.slot >> 8 = m.slot_lo >> 8 and w.slot between m.slot_lo and m.slot_hi
      and w.wake_at is not null and w.wake_at >= now() - interval '10 seconds' and w.wake_at < $4::timestamptz
      and w.hold is null and f.status = 'suspended' and w.stray_revision is distinct from f.revision
    order by w.wake_at limit $5) d
 order by d.wake_at limit $5;
