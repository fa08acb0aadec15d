"""Suspicion: whose liveness lock was found free, and for how long without a newer heartbeat. Pure.

A free lock alone proves nothing: its runner may be about to connect again. It is lost when the lock is free at two
tests that lie far enough apart, and the runner has not renewed in between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perdure.storage.model import RunnerRow

APART = 0.4
"""Seconds between the two tests. A keeper whose session was cut comes back, and renews, in less."""


@dataclass(frozen=True, slots=True)
class _Free:
    renew_count: int
    since: float


class Suspicion:
    """What one observer has found."""

    def __init__(self) -> None:
        self._free: dict[int, _Free] = {}

    def observe(
        self, runners: Sequence[RunnerRow], free: Collection[int], *, sent: float, answered: float
    ) -> list[RunnerRow]:
        """Take note of a test of these runners' locks; those that are lost.

        free: ids of those whose lock nobody held. sent, answered: monotonic seconds, before and after the test."""
        before, self._free = self._free, {}
        lost = []
        for row in runners:
            if row.runner_id not in free:
                continue
            known = before.get(row.runner_id)
            if known is None or known.renew_count != row.renew_count:
                known = _Free(row.renew_count, answered)
            elif sent - known.since >= APART:
                lost.append(row)
            self._free[row.runner_id] = known
        return lost

    def next_test(self) -> float | None:
        """When somebody may turn out to be lost, on the monotonic clock; None: nobody is under suspicion."""
        return min((each.since + APART for each in self._free.values()), default=None)

    def restart(self) -> None:
        """The observer lost its own session: what it found before counts no more."""
        self._free = {}
