"""The database's time between two reads of it.

A body's instants and a runner's timers follow the database's clock, never this machine's wall clock (R2). Each answer
that carries the database's time was made between its question and its arrival, so it bounds the offset to the
monotonic clock from both sides; the bounds of many answers together are narrow.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.storage.clock import Clock

DRIFT = 1e-4
"""Seconds per second by which the two clocks may run apart: bounds widen by that as they age."""


class DatabaseClock:
    """Estimates the database's now: never early, late by at most the latency of the quickest answer lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._monotonic = clock.monotonic
        self._least: float | None = None
        self._most = 0.0
        self._observed_at = 0.0
        self._moved: Callable[[float], None] | None = None

    def on_jump(self, call: Callable[[float], None]) -> None:
        """Call this when the database's clock was set, with the seconds by which: what waits for an instant of it has
        to reckon anew how long that is."""
        self._moved = call

    def mark(self) -> float:
        """Now, on the monotonic clock: take it before asking the database, give it to `observe`."""
        return self._clock.monotonic()

    def observe(self, db_now: float, asked: float) -> None:
        """An answer to a question asked at `mark` time ``asked`` has arrived and says ``db_now``."""
        arrived = self._clock.monotonic()
        least, most = db_now - arrived, db_now - asked
        jump = 0.0
        if self._least is not None:
            widened = DRIFT * (arrived - self._observed_at)
            known_least, known_most = self._least - widened, self._most + widened
            if least <= known_most and most >= known_least:
                least, most = max(least, known_least), min(most, known_most)
            else:  # the bounds exclude each other: the database's clock has jumped, the new answer counts alone
                jump = least - self._least
        self._least, self._most = least, most
        self._observed_at = arrived
        if jump and self._moved is not None:
            self._moved(jump)

    def now(self) -> float:
        """Unix seconds, whole microseconds; wall time until the database was first heard."""
        if self._least is None:
            return self._clock.now()
        # As `to_instant` does it; each step asks several times.
        return round((self._monotonic() + self._least) * 1_000_000) / 1_000_000
