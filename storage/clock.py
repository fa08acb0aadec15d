"""Time and randomness, injected everywhere so that a simulation can own them.

Two clocks, never mixed: ``now`` is wall time and is only a label or a first guess; ``monotonic`` measures
how long something has been observed. Whether a lease has expired is always the database's judgement (R2);
a local clock may only make a runner wait longer or stop earlier.
"""

from __future__ import annotations

import os
import random
import struct
import time
import weakref
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    """What the rest of the system knows about time."""

    def now(self) -> float:
        """Wall time, Unix seconds, exact to a microsecond."""
        ...

    def monotonic(self) -> float:
        """Seconds that keep counting while the machine sleeps and never go back."""
        ...


class SystemClock:
    """The machine's clocks: CLOCK_BOOTTIME where it exists, since a suspended machine holds no lease."""

    _boottime = getattr(time, "CLOCK_BOOTTIME", None)

    def now(self) -> float:
        return to_instant(time.time())

    def monotonic(self) -> float:
        if self._boottime is None:
            return time.monotonic()
        return time.clock_gettime(self._boottime)


class Randomness(Protocol):
    """Where ids come from."""

    def bits63(self) -> int:
        """A random integer in 1 … 2**63 − 1 (claims, batches, runners, start tokens)."""
        ...

    def fraction(self) -> float:
        """A random float in [0, 1) (jitter)."""
        ...


class SystemRandomness:
    """The operating system's randomness, fetched a few kilobytes at a time: a call of the system takes longer than all
    the rest of making an id. A forked process begins with nothing of its parent's."""

    def __init__(self) -> None:
        self._forget()
        _drawers.add(self)

    def _forget(self) -> None:
        self._numbers: Iterator[tuple[int]] = iter(())

    def bits63(self) -> int:
        for (number,) in self._numbers:
            if number >> 1:
                return number >> 1
        self._numbers = struct.iter_unpack("=Q", os.urandom(4096))
        return self.bits63()

    def fraction(self) -> float:
        return random.random()


class SeededRandomness:
    """The same ids and jitter for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bits63(self) -> int:
        return self._random.getrandbits(63) or 1

    def fraction(self) -> float:
        return self._random.random()


_drawers: weakref.WeakSet[SystemRandomness] = weakref.WeakSet()


def _forget_all() -> None:
    for drawer in _drawers:
        drawer._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def to_instant(seconds: float) -> float:
    """Round to a whole microsecond, the resolution every engine stores: a stored instant reads back equal."""
    return round(seconds * 1_000_000) / 1_000_000


def to_micros(instant: float) -> int:
    """An instant as whole microseconds since 1970."""
    return round(instant * 1_000_000)


def from_micros(micros: int) -> float:
    """The inverse of `to_micros`."""
    return micros / 1_000_000
