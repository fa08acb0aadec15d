"""Patience: how long an observer has seen a runner not renew, on the observer's own monotonic clock (R2).

Whether a lease has expired is the database's judgement; clocks of databases jump. So a runner counts as silent only
when its renew_count was seen unchanged for 1.5 renewal periods by reads that lie close together: time in which the
observer could not look (the database was away, the machine slept) proves nothing, for the others could not renew
in it either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.storage.model import RunnerRow, Topology

PERIODS = 1.5
"""Renewal periods a runner must be silent for."""


@dataclass(slots=True)
class _Seen:
    """renew_count: when last looked at. silent: seconds it was seen unchanged.

    first: when the runner was first seen; changed: when it was last seen to have renewed (monotonic)."""

    renew_count: int
    silent: float
    first: float
    changed: float


class Patience:
    """What one observer has seen of the others. renewal, look: seconds, as in `LeaseConfig`."""

    def __init__(self, *, renewal: float, look: float) -> None:
        self.needed = PERIODS * renewal
        self._longest_gap = renewal + look
        self._seen: dict[int, _Seen] = {}
        self._last_answer: float | None = None

    def observe(self, runners: Sequence[RunnerRow], *, sent: float, answered: float) -> None:
        """Take note of a read of the runner rows. sent, answered: monotonic seconds, before and after it."""
        watched = 0.0 if self._last_answer is None else max(0.0, sent - self._last_answer)
        if watched > self._longest_gap:
            self.restart()
            watched = 0.0
        self._last_answer = answered
        before, self._seen = self._seen, {}
        for row in runners:
            seen = before.get(row.runner_id)
            if seen is None:
                seen = _Seen(row.renew_count, 0.0, answered, answered)
            elif seen.renew_count != row.renew_count:
                seen.renew_count, seen.silent, seen.changed = row.renew_count, 0.0, answered
            else:
                seen.silent += watched
            self._seen[row.runner_id] = seen

    def restart(self) -> None:
        """The observer lost sight of the others: everybody's silence begins anew."""
        self._last_answer = None
        for seen in self._seen.values():
            seen.silent = 0.0

    def expired(self, topology: Topology) -> list[RunnerRow]:
        """The runners to declare dead: expired by the database's clock, and silent for long enough."""
        return [
            row
            for row in topology.runners
            if not row.dead and row.expires_at < topology.db_now and self.remaining(row) <= 0
        ]

    def remaining(self, row: RunnerRow) -> float:
        """Seconds of silence still needed before this runner may be declared dead."""
        seen = self._seen.get(row.runner_id)
        if seen is None or seen.renew_count != row.renew_count:
            return self.needed
        return self.needed - seen.silent

    def next_judgement(self, topology: Topology, me: int) -> float | None:
        """Seconds until somebody may be declared dead if they stay silent; None: nobody to wait for."""
        waits = [
            max(row.expires_at - topology.db_now, self.remaining(row))
            for row in topology.runners
            if not row.dead and row.runner_id != me
        ]
        return min((wait for wait in waits if wait > 0), default=None)

    def renewing_after(self, row: RunnerRow, lease: float) -> bool:
        """Whether a runner was seen to renew a whole lease after it was first seen: a live process."""
        seen = self._seen.get(row.runner_id)
        return seen is not None and seen.changed - seen.first >= lease
