"""What a runner is to do about its shards, judged from one snapshot. Pure.

A runner knows its own shards exactly and everybody else's from its last look. Where that look is older than
its own last statement, its own knowledge counts; where the look is newer, so does what it says of its own rows:
a take whose answer was lost shows up as a row that names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from perdure.sharding.placement import place
from perdure.storage.model import RunnerRow, ShardHold, Topology


@dataclass(frozen=True, slots=True)
class Judgement:
    """take: shards to try to take. adopt: mine by their row, unknown to me, and to be kept.
    vacate: shards I hold and am to give up. release: mine by their row, unknown to me, and not to be kept."""

    take: tuple[int, ...] = ()
    adopt: tuple[ShardHold, ...] = ()
    vacate: tuple[int, ...] = ()
    release: tuple[ShardHold, ...] = ()


def judge(
    me: int,
    topology: Topology,
    dead: Collection[int],
    *,
    holds: Mapping[int, ShardHold],
    leaving: Mapping[int, ShardHold],
    fresh: bool,
    draining: bool,
) -> Judgement:
    """holds: the shards I have. leaving: those I have and am giving up already.

    fresh: the look was sent after my last statement was answered. draining: I keep nothing.
    """
    live = [row for row in topology.runners if not row.dead and row.runner_id not in dead]
    known = {row.runner_id for row in live}
    if me not in known:
        return Judgement()
    holders: dict[int, int] = {}
    free: list[int] = []
    unknown: dict[int, ShardHold] = {}
    lost: set[int] = set()
    for row in topology.shards:
        shard, hold = row.shard_id, holds.get(row.shard_id) or leaving.get(row.shard_id)
        if hold is not None:
            holders[shard] = me
            if fresh and (row.runner_id, row.epoch) != (me, hold.epoch):
                lost.add(shard)
        elif row.runner_id == me:
            if fresh:
                holders[shard] = me
                unknown[shard] = ShardHold(shard, row.epoch)
        elif row.runner_id is None or row.runner_id not in known:
            free.append(shard)
        else:
            holders[shard] = row.runner_id
    candidates = [row for row in live if not (draining if row.runner_id == me else row.draining)]
    wanted = _mine(me, topology, candidates, holders)
    return Judgement(
        take=tuple(shard for shard in free if shard in wanted),
        adopt=tuple(hold for shard, hold in unknown.items() if shard in wanted),
        vacate=tuple(shard for shard in holds if shard not in wanted or shard in lost),
        release=tuple(hold for shard, hold in unknown.items() if shard not in wanted),
    )


def _mine(
    me: int, topology: Topology, candidates: list[RunnerRow], holders: Mapping[int, int]
) -> set[int]:
    if all(row.runner_id != me for row in candidates):
        return set()
    placed = place(
        (row.shard_id for row in topology.shards),
        (row.runner_id for row in candidates),
        holders,
        min(row.placement_version for row in candidates),
    )
    return {shard for shard, runner in placed.items() if runner == me}
