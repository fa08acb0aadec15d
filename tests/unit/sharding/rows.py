"""Runner and shard rows for tests of the pure parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perdure.storage.model import RunnerRow, ShardRow, Topology


def runner(
    runner_id: int,
    *,
    replica: str | None = None,
    expires_at: float = 10.0,
    renew_count: int = 0,
    started_at: float = -100.0,
    dead: bool = False,
    draining: bool = False,
    placement_version: int = 1,
) -> RunnerRow:
    return RunnerRow(
        runner_id=runner_id,
        replica_id=replica or f"pod-{runner_id}",
        address=f"10.0.0.{runner_id % 250}:34000",
        started_at=started_at,
        expires_at=expires_at,
        renew_count=renew_count,
        dead=dead,
        draining=draining,
        placement_version=placement_version,
    )


def topology(
    runners: Sequence[RunnerRow],
    owners: Mapping[int, tuple[int | None, int]] | None = None,
    *,
    db_now: float = 0.0,
) -> Topology:
    """owners: shard id → (runner id or None, epoch)."""
    shards = [
        ShardRow(shard, shard, shard, owner, epoch)
        for shard, (owner, epoch) in (owners or {}).items()
    ]
    return Topology(runners, shards, db_now)
