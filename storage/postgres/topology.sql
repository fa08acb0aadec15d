-- name: topology
-- Runners and shards in one snapshot, told apart by runner_row.
select now() as db_now, true as runner_row, runner_id, replica_id, address, started_at, expires_at, renew_count, dead, draining,
       workflows, placement_version, info, null::int as shard_id, null::int as slot_lo, null::int as slot_hi, null::bigint as epoch
  from perdure_runners
union all
select now(), false, runner_id, null, null, null, null, null, null, null, null, null, null, shard_id, slot_lo, slot_hi, epoch
  from perdure_shards
union all  -- so that the clock comes back from an empty database
select now(), null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null;
