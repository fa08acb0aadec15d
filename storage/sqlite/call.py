"""One function on its way from an event loop through a worker's thread and back."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from perdure.storage.sqlite.transaction import Transaction

T = TypeVar("T")
Work = Callable[[Transaction], T]


class State(Enum):
    """Where a call is; it moves forward only, under the call's lock."""

    WAITING = "queued, or waiting for the file's lock"
    WITHDRAWN = "given up before it began"
    INSIDE = "in its transaction"
    LEFT = "ended"


class Call(Generic[T]):
    """``writes``: in a write transaction. ``lock``: seconds to wait for the file's lock, None: until the deadline."""

    def __init__(
        self, work: Work[T], *, writes: bool, lock: float | None, lock_until: float
    ) -> None:
        self.work = work
        self.writes = writes
        self.lock = lock
        self.lock_until = lock_until
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = self.loop.create_future()
        self._lock = threading.Lock()
        self._state = State.WAITING

    # -- on the thread

    def wanted(self) -> bool:
        return self._state is State.WAITING

    def enter(self) -> bool:
        """From now on something may be written. False: the caller was told that nothing will be."""
        with self._lock:
            if self._state is State.WAITING:
                self._state = State.INSIDE
            return self._state is State.INSIDE

    def succeed(self, result: T) -> None:
        self._leave(lambda: self.answer.set_result(result))

    def fail(self, error: BaseException) -> None:
        self._leave(lambda: self.answer.set_exception(error))

    def _leave(self, tell: Callable[[], None]) -> None:
        """The outcome is known and on its way to the caller, whatever the deadline says."""
        with self._lock:
            self._state = State.LEFT
        try:
            self.loop.call_soon_threadsafe(self._tell, tell)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    # -- on the caller's loop

    def withdraw(self, error: Exception) -> bool:
        """Give the call up with this error if it has not entered its transaction."""
        with self._lock:
            if self._state is State.WAITING:
                self._state = State.WITHDRAWN
            withdrawn = self._state is State.WITHDRAWN
        if withdrawn:
            self.give_up(error)
        return withdrawn

    def interrupt(self, connection: sqlite3.Connection) -> None:
        """Stop the statement under way; harmless between two statements."""
        with self._lock:
            if self._state is State.INSIDE:
                connection.interrupt()

    def give_up(self, error: Exception) -> None:
        """Answer without waiting for the thread any longer."""
        self._tell(lambda: self.answer.set_exception(error))

    def _tell(self, tell: Callable[[], None]) -> None:
        if not self.answer.done():
            tell()
