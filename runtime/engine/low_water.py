"""Low-water marks: since when a shard is known to hold nothing due that could have been claimed.

A scan that begins there does not step over the dead rows of runs long finished, however long a foreign snapshot keeps
the database from removing them (R12).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from perdure.storage.model import FLOOR_MARGIN


class LowWaterMarks:
    """By shard. A claim that left nothing behind raises them; what a mark hides in error, a full scan finds.

    deadline: of a statement, in seconds. A row shows no later than that after its due time was set, and a lock wait.
    """

    def __init__(self, deadline: float) -> None:
        self._margin = max(FLOOR_MARGIN, 2 * deadline)
        self._marks: dict[int, float] = {}

    def floor(self, shards: Iterable[int]) -> float | None:
        """The lowest mark of these; None when one of them has none: look at everything."""
        marks = [self._marks.get(shard) for shard in shards]
        known = [mark for mark in marks if mark is not None]
        return min(known) if known and len(known) == len(marks) else None

    def raise_to(self, db_now: float, shards: Iterable[int]) -> None:
        """A claim in these shards, from their marks on, was complete at that instant of the database's clock."""
        mark = db_now - self._margin
        for shard in shards:
            self._marks[shard] = mark

    def unmarked_first(self, shards: Iterable[int]) -> list[int]:
        """Then those whose mark is the lowest."""
        return sorted(shards, key=lambda shard: self._marks.get(shard, -math.inf))

    def forget(self, shards: Iterable[int]) -> None:
        """Somebody else may have held them meanwhile."""
        for shard in shards:
            self._marks.pop(shard, None)
