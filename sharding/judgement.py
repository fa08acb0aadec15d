"""What a runner is to do about its shards, judged from one snapshot. Pure.

A runner knows its own shards exactly and everybody else's from its last look. Where that look is older than
its own last statement, its own knowledge counts; where the look is newer, so does what it says of its own rows:
a take whose answer was lost shows up as a row that names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perdure.sharding.placement import place
from perdure.storage.model import RunnerRow, ShardHold, Topology

SETTLING = 0.75
"""Seconds after a runner has joined in which nobody gives up shards to make room: runners that are started together
come up one after the other, and a shard that moves for the first of them would move again for the next."""

MOST_SETTLING = 3.0
"""Seconds after which a runner without a shard gets its share even while others keep joining."""


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
    While runners are joining (`SETTLING`) free shards are taken as ever, but nobody gives one up for balance alone.
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
    patient = not draining and _joining(candidates, holders, topology.db_now)
    return Judgement(
        take=tuple(shard for shard in free if shard in wanted),
        adopt=tuple(hold for shard, hold in unknown.items() if shard in wanted),
        vacate=tuple(shard for shard in holds if shard in lost or not (patient or shard in wanted)),
        release=tuple(hold for shard, hold in unknown.items() if shard not in wanted),
    )


def _joining(candidates: Sequence[RunnerRow], holders: Mapping[int, int], db_now: float) -> bool:
    """Whether more runners may be about to join, by the database's clock alone; a clock set back ends the wait."""
    ages = [db_now - row.started_at for row in candidates]
    owners = set(holders.values())
    waiting = [
        age for age, row in zip(ages, candidates, strict=True) if row.runner_id not in owners
    ]
    return any(0 <= age < SETTLING for age in ages) and not any(
        age >= MOST_SETTLING for age in waiting
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
