"""Slots and shards: which slot a run has, and which slots make up a shard.

A slot is a pure function of the run id and is stored with the run, so it never changes; shards are
ranges of slots, so their number can.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from perdure.storage.errors import ConfigurationError
from perdure.storage.model import SLOTS

HASH_NAME = "xxh3_64"
"""Of the UTF-8 bytes of the run id. Agreed on by all processes of a cluster, kept in its meta row."""


def slot_of(run_id: str) -> int:
    """The slot of a run: 0 … 65,535."""
    return xxh3_64_intdigest(run_id.encode()) % SLOTS


def shard_ranges(count: int) -> list[tuple[int, int]]:
    """The slots (lowest, highest; both included) of shards 0 … count − 1, sizes differing by one at most.

    Raises `ConfigurationError` for a count outside 1 … 65,536.
    """
    _check(count)
    edges = [shard * SLOTS // count for shard in range(count + 1)]
    return [(edges[shard], edges[shard + 1] - 1) for shard in range(count)]


def shard_of(slot: int, count: int) -> int:
    """The shard whose range holds the slot, when there are ``count`` shards."""
    return ((slot + 1) * count - 1) // SLOTS


def _check(count: int) -> None:
    if not 1 <= count <= SLOTS:
        raise ConfigurationError(
            f"a cluster has 1 to {SLOTS} shards, not {count}: set PERDURE_SHARDS within that range"
        )
