"""What an operator does to a whole cluster, and what is looked at for one: the third part of the seam.

Used by commands, never by a running pod. Every change is one transaction, refused while a runner lives.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.storage.errors import ConfigurationError, InUseError
from perdure.storage.examination import RunFacts, ServerFacts
from perdure.storage.model import SLOTS, Meta, RunnerRow, ShardRow, Topology

EPOCHS_LOST = 1_000_000
"""By so much `void_claims` raises epochs: more than a cluster can have raised them after the backup was made."""


@dataclass(frozen=True, slots=True)
class Resharding:
    """before: the shards as they were. after: as they are, or would be, none of them held."""

    before: Sequence[ShardRow]
    after: Sequence[ShardRow]


@dataclass(frozen=True, slots=True)
class Voided:
    """What `void_claims` did. runners: declared dead. runs: (run_id, workflow) of those that somebody had, due again
    now. shards: freed, with their epochs raised. cluster_id: the new one; None: there was nothing to do."""

    runners: Sequence[RunnerRow]
    runs: Sequence[tuple[str, str]]
    shards: int
    cluster_id: str | None


class UpkeepStore(ABC):
    """For one event loop. Errors as in `interface.py`."""

    @abstractmethod
    async def open(self) -> Meta: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def read_topology(self) -> Topology: ...

    @abstractmethod
    async def reshard(self, shard_count: int, *, apply: bool) -> Resharding:
        """Divide the slots into so many shards. Writes `meta` and `shards` alone; the epoch of a new shard is the
        highest of those it overlaps, so that claims stay in order. apply False: nothing is written, whoever lives.

        Raises `InUseError` naming the runners whose leases are good, `ConfigurationError` for an impossible count."""

    @abstractmethod
    async def void_claims(self, *, force: bool) -> Voided:
        """After a restore: every runner row is dead, every shard free with its epoch raised, every run that somebody
        had is due without a claim (no crash is counted), and the cluster has a new id. Nothing to void: no write.

        Raises `InUseError` naming a runner whose lease is good, unless ``force``."""

    @abstractmethod
    async def server_facts(self, *, open_for: float, idle_for: float) -> ServerFacts:
        """open_for, idle_for: seconds from which on an open transaction, and one that does nothing, is told."""

    @abstractmethod
    async def run_facts(self, *, idle: float, limit: int) -> RunFacts:
        """idle: seconds without anything happening from which on a run counts as stuck. limit: how many are named."""


def keeps_lease(runner: RunnerRow, now: float) -> bool:
    """It may be at work, as far as its row says. One alone on its file keeps no lease: the file's lock tells."""
    return not runner.dead and runner.info.get("lease") != "none" and runner.expires_at >= now


def refuse_the_living(topology: Topology) -> None:
    """Raises `InUseError` naming the runners whose leases are good."""
    living = [row for row in topology.runners if keeps_lease(row, topology.db_now)]
    if living:
        names = ", ".join(f"{row.replica_id} at {row.address}" for row in living)
        longest = max(row.expires_at for row in living) - topology.db_now
        raise InUseError(
            f"this needs all pods stopped, and there is still: {names}; stop it, or if it is gone for good, wait "
            f"{longest:.0f} s until its lease has run out"
        )


def check_count(count: int) -> None:
    """Raises `ConfigurationError` for a number of shards that cannot be."""
    if not 1 <= count <= SLOTS:
        raise ConfigurationError(f"a cluster has 1 to {SLOTS:,} shards, not {count:,}")


def divided(shards: Sequence[ShardRow], count: int) -> list[ShardRow]:
    """The slots in ``count`` ranges of equal size, with epochs no lower than those of the shards they overlap.

    Raises `ConfigurationError` for a count that cannot be, and before the first boot of a cluster."""
    check_count(count)
    if not shards:
        raise ConfigurationError(
            "no pod has booted on this database yet: the first one divides the work, by its setting shards"
        )
    edges = [shard * SLOTS // count for shard in range(count + 1)]
    known = sorted(shards, key=lambda shard: shard.slot_lo)
    return [
        ShardRow(shard, lo, end - 1, None, _highest_epoch(known, lo, end - 1))
        for shard, (lo, end) in enumerate(itertools.pairwise(edges))
    ]


def _highest_epoch(shards: Sequence[ShardRow], lo: int, hi: int) -> int:
    """Of those that overlap these slots; shards: by their first slot."""
    first = bisect.bisect_right(shards, lo, key=lambda shard: shard.slot_lo) - 1
    overlapping = itertools.takewhile(lambda s: s.slot_lo <= hi, shards[first:])
    return max(shard.epoch for shard in overlapping)
