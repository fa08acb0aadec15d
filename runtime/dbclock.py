"""The database's time between two reads of it.

A body's instants and a runner's timers follow the database's clock, never this machine's wall clock (R2): each answer
that carries the database's time corrects the offset to the monotonic clock.
"""

from __future__ import annotations

from perdure.storage.clock import Clock, to_instant

JUMP = 0.5
"""Seconds of difference that are taken for a jump of the database's clock, not for latency."""
DRIFT = 1e-4
"""Seconds per second by which this machine's clock may run fast against the database's."""


class DatabaseClock:
    """Estimates the database's now; late by at most the latency of the best answer so far, never early."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._observed_at = 0.0

    def observe(self, db_now: float) -> None:
        """The database said ``db_now`` in an answer that has just arrived."""
        monotonic = self._clock.monotonic()
        offset = db_now - monotonic
        if self._offset is not None and abs(offset - self._offset) < JUMP:
            aged = self._offset - DRIFT * (monotonic - self._observed_at)
            offset = max(offset, aged)
        self._offset = offset
        self._observed_at = monotonic

    def now(self) -> float:
        """Unix seconds, whole microseconds; wall time until the database was first heard."""
        if self._offset is None:
            return self._clock.now()
        return to_instant(self._clock.monotonic() + self._offset)
