"""Slots: how many runs of a runner may be at work at once. A wait holds none."""

from __future__ import annotations

from collections.abc import Callable


class Slots:
    """A counter with a limit. Woken bodies may exceed it for a moment; only claims respect it.

    freed: called whenever a slot comes free.
    """

    def __init__(self, limit: int, freed: Callable[[], None]) -> None:
        self.limit = limit
        self.taken = 0
        self._freed = freed

    @property
    def free(self) -> int:
        return max(0, self.limit - self.taken)

    def take(self) -> None:
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._freed()
