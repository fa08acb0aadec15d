"""Placement: which runner is to hold which shard. Pure: the same inputs, in any order, give the same answer.

Every runner judges by itself from its own snapshot of runners and shards; there is no leader. The rules:

1. Sizes differ by one at most. The odd ones out stay with those who hold most already.
2. Who holds a shard keeps it, as far as rule 1 allows. So a runner that comes or goes moves only its own share.
3. A runner above its size gives up the shards it has the lowest scores for; shards to be placed go to the
   runner with the highest score (rendezvous) that is still below its size.

Runners with different snapshots may disagree for a moment. Nothing comes of it: a shard is taken by one
conditional statement, and what each judges from the next snapshot is nearer to the balance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from perdure.storage.errors import ConfigurationError

PLACEMENT_VERSION = 1
"""Runners place by the lowest version among the live ones, so that a rolling deploy agrees throughout."""

NOBODY = 0
"""No runner has this id."""

Score: TypeAlias = int


def place(
    shard_ids: Iterable[int],
    runners: Iterable[int],
    holders: Mapping[int, int] | None = None,
    version: int = PLACEMENT_VERSION,
) -> dict[int, int]:
    """Shard id → runner id for every shard; empty without runners.

    runners: those that may hold shards: live and not draining. holders: who holds a shard now, default
    nobody; a holder that is not among the runners counts as nobody.
    Raises `ConfigurationError` for a version this code does not know.
    """
    if version != PLACEMENT_VERSION:
        raise ConfigurationError(
            f"placement version {version} is not known here (known: {PLACEMENT_VERSION}): "
            "run the same release of perdure on all pods"
        )
    shards = sorted(set(shard_ids))
    held: dict[int, list[int]] = {runner: [] for runner in sorted(set(runners))}
    if not held:
        return {}
    homeless: list[int] = []
    for shard in shards:
        held.get((holders or {}).get(shard, NOBODY), homeless).append(shard)
    sizes = _sizes(len(shards), held)
    for runner, mine in held.items():
        if len(mine) > sizes[runner]:
            mine.sort(key=lambda shard: (_score(shard, runner), shard), reverse=True)
            homeless += mine[sizes[runner] :]
            del mine[sizes[runner] :]
    placed = {shard: runner for runner, mine in held.items() for shard in mine}
    room = {runner: sizes[runner] - len(mine) for runner, mine in held.items()}
    placed.update(_house(homeless, {runner: free for runner, free in room.items() if free}))
    return placed


def _sizes(shards: int, held: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """How many shards each runner is to have.

    The odd ones out go first to those who have exactly that many: they stay as they are even when the snapshot
    still shows others with too many.
    """
    least, odd = divmod(shards, len(held))

    def preference(runner: int) -> tuple[bool, int, Score, int]:
        size = len(held[runner])
        return (size != least + 1, -size, _score(shards, runner), runner)

    ranked = sorted(held, key=preference)
    return {runner: least + (rank < odd) for rank, runner in enumerate(ranked)}


def _house(homeless: Sequence[int], room: dict[int, int]) -> dict[int, int]:
    """Give each homeless shard to a runner with room, best scores first over all pairs."""
    pairs = [(_score(shard, runner), shard, runner) for runner in room for shard in homeless]
    pairs.sort(reverse=True)
    housed: dict[int, int] = {}
    for _, shard, runner in pairs:
        if shard not in housed and room[runner]:
            housed[shard] = runner
            room[runner] -= 1
    return housed


def _score(shard: int, runner: int) -> Score:
    return xxh3_64_intdigest(shard.to_bytes(4, "little"), runner)
