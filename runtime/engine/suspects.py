"""The suspect lane: a run that fell with two runners in a row and wrote nothing in between is executed alone.

Alone among suspects, that is: beside runs nobody suspects, but with no other suspect in the same process. So a run
that kills its process reaches the limit by itself, and its neighbours, who had the bad luck to be there each time, do
not: each has written something before the next suspect gets its turn (R8).
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.storage.model import ClaimedRun

PLACES = 1


def is_suspect(run: ClaimedRun) -> bool:
    """Whether it had fallen with a runner already when it was claimed, and had written nothing since.

    The first fall does not count: all runs of a killed pod would have to wait for each other, steps and all."""
    return run.reclaim_count - run.taken_over > 0


class SuspectLane:
    """Who has the place. freed: called when it comes free."""

    def __init__(self, freed: Callable[[], None]) -> None:
        self._inside: set[str] = set()
        self._freed = freed

    @property
    def free(self) -> int:
        return max(0, PLACES - len(self._inside))

    def enter(self, run_id: str) -> None:
        self._inside.add(run_id)

    def leave(self, run_id: str) -> None:
        """It has written something, or has left memory."""
        if run_id in self._inside:
            self._inside.remove(run_id)
            self._freed()
