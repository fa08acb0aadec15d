"""The keeper reconnects before the pools do: after a restart of the server they could take the last connections, and
a runner without a lease loses all its shards."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from perdure.storage.clock import Clock
from perdure.storage.errors import DatabaseUnavailable

STALE = 60.0
"""Seconds without any try to connect after which nobody waits for a keeper any more: there is none."""


class Precedence:
    """Between the threads of one process: whether its keeper is without a connection just now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._away_since: float | None = None
        self._current: object = None  # the keeper's connection
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def away(self) -> None:
        """The keeper tries to get a connection."""
        with self._lock:
            self._away_since = self._clock.monotonic()

    def lost(self, connection: object) -> None:
        """A keeper's connection is gone. An old one may be gone only after there is a new one."""
        with self._lock:
            if connection is self._current:
                self._away_since = self._clock.monotonic()

    def ended(self, connection: object) -> None:
        """A keeper closes its connection, and wants no other."""
        if connection is self._current:
            self.back(None)

    def forgone(self) -> None:
        """There is no keeper that wants a connection, whether one is without it just now or not."""
        self.back(None)

    def back(self, connection: object) -> None:
        """The keeper has this connection now."""
        with self._lock:
            self._away_since, self._current = None, connection
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # a loop that has been closed meanwhile
                loop.call_soon_threadsafe(event.set)

    async def wait(self, seconds: float) -> None:
        """Return when the keeper is not away. Raises `DatabaseUnavailable` after so many seconds."""
        event = asyncio.Event()
        with self._lock:
            since = self._away_since
            if since is None or self._clock.monotonic() - since > STALE:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            raise DatabaseUnavailable(
                f"no connection is opened before the runner's lease has one again; waited {seconds:g} s, "
                "nothing was sent"
            ) from None
