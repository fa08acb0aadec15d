"""Where the functions of this engine run: a thread per connection for a file, inline for `:memory:`.

`ThreadWorker` has one connection, one daemon thread and a queue; calls come from any event loop. Writes that are
queued when one begins share its transaction, each behind a savepoint of its own: one wait for the file's lock and
one wait for the disk for all of them, and what one of them raises undoes that one alone.

A call that reaches its deadline is in one of three states, told apart under a lock:
queued or waiting for the file's lock: withdrawn, certainly nothing was written (`DatabaseUnavailable`);
inside its transaction: the statement is interrupted, which rolls back; if the thread does not answer within
`GRACE` seconds (a disk that hangs), the outcome is unknown. Whatever asks next waits behind it in the same queue,
so a settlement reads after the end of what it settles.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from perdure.storage.clock import Clock
from perdure.storage.errors import ConflictError, DatabaseUnavailable, UnknownOutcome
from perdure.storage.sqlite.call import Call, Work
from perdure.storage.sqlite.failures import translate
from perdure.storage.sqlite.transaction import Transaction, begin_write, database_now

__all__ = ["InlineWorker", "ThreadWorker", "Work", "Worker"]

T = TypeVar("T")

GRACE = 0.25
URGENT, ORDINARY, LAST = 0, 1, 2
TOGETHER = 100
"""Writes that share a transaction, at most."""
PATIENCE = 0.01
"""Seconds after which a transaction takes no further writes in."""


class Worker(ABC):
    """Runs functions in transactions of one connection, one at a time."""

    @abstractmethod
    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        """Run ``work`` in a write transaction. ``urgent``: before what is queued (leases). ``lock``: wait for the
        file's lock so many seconds at most, then `ConflictError`."""

    @abstractmethod
    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        """Run ``work`` in a read transaction: one snapshot."""

    @abstractmethod
    async def close(self) -> None: ...


def in_read(connection: sqlite3.Connection, work: Work[T], clock: Clock, place: str) -> T:
    try:
        connection.execute("begin")
        return work(Transaction(connection, database_now(clock)))
    except Exception as error:
        raise translate(error, place) from error
    finally:
        roll_back(connection)


def in_savepoint(connection: sqlite3.Connection, work: Work[T], clock: Clock) -> T:
    """``work`` inside the write transaction under way, undone alone if it raises.

    Some errors (an interrupt, a full disk) make SQLite roll the whole transaction back: see ``in_transaction``.
    """
    connection.execute("savepoint one_call")
    try:
        result = work(Transaction(connection, database_now(clock)))
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback to one_call")
            connection.execute("release one_call")
        raise
    connection.execute("release one_call")
    return result


def commit(connection: sqlite3.Connection, place: str) -> None:
    """A COMMIT that fails is the one error after which it is not known what is kept."""
    try:
        connection.execute("commit")
    except sqlite3.Error as error:
        roll_back(connection)
        raise UnknownOutcome(
            f"{place}: the commit failed ({error}); it may or may not be kept"
        ) from error


def roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction if SQLite has not ended it by itself."""
    if connection.in_transaction:
        connection.execute("rollback")


class InlineWorker(Worker):
    """One connection used on the caller's own thread: `:memory:`, where nothing ever waits for a disk.

    The lock is for a keeper that calls from its own thread.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Clock, place: str) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._clock = clock
        self._place = place

    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        with self._lock:
            self._connection.execute("begin immediate")
            try:
                result = work(Transaction(self._connection, database_now(self._clock)))
            except BaseException as error:
                roll_back(self._connection)
                if isinstance(error, Exception):
                    raise translate(error, self._place) from error
                raise
            commit(self._connection, self._place)
            return result

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        with self._lock:
            return in_read(self._connection, work, self._clock, self._place)

    async def close(self) -> None:
        """The data live as long as the `Database` that holds this worker."""


class ThreadWorker(Worker):
    """One connection on a daemon thread of its own. Start it before use, close it when done."""

    def __init__(
        self,
        open_connection: Callable[[], sqlite3.Connection],
        *,
        name: str,
        clock: Clock,
        place: str,
        deadline: float,
    ) -> None:
        self._open_connection = open_connection
        self._clock = clock
        self._place = place
        self._deadline = deadline
        self._queue: queue.PriorityQueue[tuple[int, int, Call[Any] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; it opens the connection. `ready` tells how that went."""
        self._thread.start()

    async def ready(self, timeout: float) -> None:
        """Wait until the connection stands, ``timeout`` seconds at most. Raises what opening raised."""
        await self._ask(lambda _: None, URGENT, writes=False, lock=None, deadline=timeout)

    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        priority = URGENT if urgent else ORDINARY
        return await self._ask(work, priority, writes=True, lock=lock, deadline=self._deadline)

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        priority = URGENT if urgent else ORDINARY
        return await self._ask(work, priority, writes=False, lock=None, deadline=self._deadline)

    async def close(self) -> None:
        """Let the queue drain, close the connection, end the thread (a hanging one is left behind)."""
        self._queue.put((LAST, next(self._order), None))
        await asyncio.to_thread(self._thread.join, self._deadline)

    # -- on the caller's loop

    async def _ask(
        self, work: Work[T], priority: int, *, writes: bool, lock: float | None, deadline: float
    ) -> T:
        wait = deadline if lock is None else min(lock, deadline)
        call = Call(work, writes=writes, lock=lock, lock_until=self._clock.monotonic() + wait)
        self._queue.put((priority, next(self._order), call))
        timer = call.loop.call_later(deadline, self._at_deadline, call)
        try:
            # A caller that is cancelled stops waiting; the transaction goes on to its end (R10).
            return await call.answer
        finally:
            timer.cancel()

    def _at_deadline(self, call: Call[Any]) -> None:
        if not call.withdraw(self._not_begun()) and self._connection is not None:
            call.interrupt(self._connection)
            call.loop.call_later(GRACE, self._after_grace, call)

    def _after_grace(self, call: Call[Any]) -> None:
        if call.writes:
            error: Exception = UnknownOutcome(
                f"{self._place}: a transaction is still under way {self._deadline:g} s after it was asked for; "
                "it may or may not be committed: check the disk"
            )
        else:
            error = DatabaseUnavailable(
                f"{self._place}: no answer within {self._deadline:g} s: check the disk"
            )
        call.give_up(error)

    def _not_begun(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"{self._place}: no transaction could begin within {self._deadline:g} s, nothing was written: "
            "look for a long transaction of another program, or a slow disk"
        )

    # -- on the thread

    def _serve(self) -> None:
        try:
            connection = self._connection = self._open_connection()
        except Exception as error:
            while (call := self._queue.get()[2]) is not None:
                call.fail(translate(error, self._place))
            return
        try:
            while (call := self._queue.get()[2]) is not None:
                if call.writes:
                    self._serve_writes(connection, call)
                else:
                    self._serve_read(connection, call)
        finally:
            connection.close()

    def _serve_read(self, connection: sqlite3.Connection, call: Call[Any]) -> None:
        if not call.enter():
            return
        try:
            result = in_read(connection, call.work, self._clock, self._place)
        except BaseException as error:  # the thread lives on, the caller is told
            call.fail(error)
        else:
            call.succeed(result)

    def _serve_writes(self, connection: sqlite3.Connection, first: Call[Any]) -> None:
        """One transaction for a write and those queued behind it; all of them hear of its end."""
        if not self._begin(connection, first):
            return
        done: list[tuple[Call[Any], Any]] = []
        try:
            for call in self._together(first):
                if call.enter():
                    self._serve_write(connection, call, done)
            commit(connection, self._place)
        except Exception as error:
            for call, _ in done:
                call.fail(error)
        else:
            for call, result in done:
                call.succeed(result)

    def _begin(self, connection: sqlite3.Connection, call: Call[Any]) -> bool:
        """Get the file's lock for the call that waits longest; False: it was told that it cannot be had."""
        try:
            if begin_write(
                connection, until=call.lock_until, clock=self._clock, wanted=call.wanted
            ):
                return True
        except sqlite3.Error as error:
            call.fail(translate(error, self._place))
            return False
        if call.lock is None:
            call.fail(self._not_begun())
        else:
            call.fail(
                ConflictError(
                    f"{self._place}: the write lock was not free within {call.lock:g} s; try again"
                )
            )
        return False

    def _together(self, first: Call[Any]) -> Iterator[Call[Any]]:
        """The first, then writes that are queued already, urgent ones first."""
        yield first
        closing_time = self._clock.monotonic() + PATIENCE
        for _ in range(TOGETHER - 1):
            if self._clock.monotonic() >= closing_time:
                return
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            call = item[2]
            if call is None or not call.writes:
                self._queue.put(item)  # keeps its place: the order is in the item
                return
            yield call

    def _serve_write(
        self, connection: sqlite3.Connection, call: Call[Any], done: list[tuple[Call[Any], Any]]
    ) -> None:
        """Raises only when the whole transaction is gone, and with it what others had done in it."""
        try:
            result = in_savepoint(connection, call.work, self._clock)
        except BaseException as error:
            told = translate(error, self._place) if isinstance(error, Exception) else error
            call.fail(told)
            if not connection.in_transaction:
                raise DatabaseUnavailable(
                    f"{self._place}: a transaction was rolled back with all in it, nothing was written; "
                    f"try again ({told})"
                ) from error
        else:
            done.append((call, result))
