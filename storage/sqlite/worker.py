"""Where the functions of this engine run: a thread per connection for a file, inline for `:memory:`.

`ThreadWorker` has one connection, one daemon thread and a queue. Its calls come from any event loop. A call that
reaches its deadline is in one of three states, told apart under a lock:
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
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

from perdure.storage.clock import Clock
from perdure.storage.errors import ConflictError, DatabaseUnavailable, UnknownOutcome
from perdure.storage.sqlite.failures import translate
from perdure.storage.sqlite.transaction import Transaction, begin_write, database_now

T = TypeVar("T")
Work = Callable[[Transaction], T]

GRACE = 0.25
URGENT, ORDINARY = 0, 1


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


def in_write(connection: sqlite3.Connection, work: Work[T], clock: Clock, place: str) -> T:
    """The rest of a write transaction that has begun. A failing COMMIT is the only unknown outcome."""
    try:
        result = work(Transaction(connection, database_now(clock)))
    except Exception as error:
        roll_back(connection)
        raise translate(error, place) from error
    except BaseException:
        roll_back(connection)
        raise
    try:
        connection.execute("commit")
    except sqlite3.Error as error:
        roll_back(connection)
        raise UnknownOutcome(
            f"{place}: the commit failed ({error}); it may or may not be kept"
        ) from error
    return result


def in_read(connection: sqlite3.Connection, work: Work[T], clock: Clock, place: str) -> T:
    try:
        connection.execute("begin")
        result = work(Transaction(connection, database_now(clock)))
    except Exception as error:
        raise translate(error, place) from error
    finally:
        roll_back(connection)
    return result


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
            return in_write(self._connection, work, self._clock, self._place)

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        with self._lock:
            return in_read(self._connection, work, self._clock, self._place)

    async def close(self) -> None:
        """The data live as long as the `Database` that holds this worker."""


class _State(Enum):
    WAITING = "queued, or waiting for the file's lock"
    WITHDRAWN = "given up before it began"
    INSIDE = "in its transaction"
    LEFT = "ended"


class _Call(Generic[T]):
    """One function on its way through the thread."""

    def __init__(
        self, run: Callable[[_Call[T]], T], writes: bool, until: float, lock_until: float
    ) -> None:
        self.run = run
        self.writes = writes
        self.until = until
        self.lock_until = lock_until
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = self.loop.create_future()
        self._lock = threading.Lock()
        self._state = _State.WAITING

    def wanted(self) -> bool:
        return self._state is _State.WAITING

    def enter(self) -> bool:
        """Thread: from now on something may be written. False: the caller was told that nothing will be."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state = _State.INSIDE
            return self._state is _State.INSIDE

    def withdraw(self) -> bool:
        """Loop: give the call up if it has not entered its transaction."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state = _State.WITHDRAWN
            return self._state is _State.WITHDRAWN

    def interrupt(self, connection: sqlite3.Connection) -> None:
        """Loop: stop the statement under way; harmless between two statements."""
        with self._lock:
            if self._state is _State.INSIDE:
                connection.interrupt()

    def leave(self) -> None:
        """Thread: the outcome is known and on its way to the caller, whatever the deadline says."""
        with self._lock:
            self._state = _State.LEFT

    def deliver(self, result: T | None, error: BaseException | None) -> None:
        """Thread: hand the result over to the caller's loop, if that still runs."""
        try:
            self.loop.call_soon_threadsafe(self.settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Loop: answer the caller, unless that was done."""
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


class ThreadWorker(Worker):
    """One connection on a daemon thread of its own. Open it before use, close it when done."""

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
        self._queue: queue.PriorityQueue[tuple[int, int, _Call[Any] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; it opens the connection. `ready` tells how that went."""
        self._thread.start()

    async def ready(self, timeout: float) -> None:
        """Wait until the connection stands, ``timeout`` seconds at most. Raises what opening raised."""
        call = self._call(lambda _: None, writes=False, deadline=timeout, lock=None)
        await self._answer(call, URGENT, timeout)

    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        call: _Call[T] = self._call(
            lambda call: self._write(call, work, lock),
            writes=True,
            deadline=self._deadline,
            lock=lock,
        )
        return await self._answer(call, URGENT if urgent else ORDINARY, self._deadline)

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        call: _Call[T] = self._call(
            lambda call: self._read(call, work), writes=False, deadline=self._deadline, lock=None
        )
        return await self._answer(call, URGENT if urgent else ORDINARY, self._deadline)

    async def close(self) -> None:
        """Let the queue drain, close the connection, end the thread (a hanging one is left behind)."""
        self._queue.put((ORDINARY + 1, next(self._order), None))
        await asyncio.to_thread(self._thread.join, self._deadline)

    def _call(
        self, run: Callable[[_Call[T]], T], *, writes: bool, deadline: float, lock: float | None
    ) -> _Call[T]:
        now = self._clock.monotonic()
        return _Call(
            run, writes, now + deadline, now + min(deadline, deadline if lock is None else lock)
        )

    async def _answer(self, call: _Call[T], priority: int, deadline: float) -> T:
        self._queue.put((priority, next(self._order), call))
        timer = call.loop.call_later(deadline, self._at_deadline, call)
        try:
            # A caller that is cancelled stops waiting; the transaction goes on to its end (R10).
            return await call.answer
        finally:
            timer.cancel()

    def _at_deadline(self, call: _Call[Any]) -> None:
        if call.withdraw():
            call.settle(None, self._not_begun())
        elif self._connection is not None:
            call.interrupt(self._connection)
            call.loop.call_later(GRACE, self._give_up, call)

    def _give_up(self, call: _Call[Any]) -> None:
        if call.writes:
            error: Exception = UnknownOutcome(
                f"{self._place}: a transaction is still under way {self._deadline:g} s after it was asked for; "
                "it may or may not be committed: check the disk"
            )
        else:
            error = DatabaseUnavailable(
                f"{self._place}: no answer within {self._deadline:g} s: check the disk"
            )
        call.settle(None, error)

    def _not_begun(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(
            f"{self._place}: no transaction could begin within {self._deadline:g} s, nothing was written: "
            "look for a long transaction of another program, or a slow disk"
        )

    # -- on the thread

    def _serve(self) -> None:
        try:
            self._connection = self._open_connection()
        except Exception as error:
            while (call := self._queue.get()[2]) is not None:
                call.deliver(None, translate(error, self._place))
            return
        try:
            while (call := self._queue.get()[2]) is not None:
                self._serve_one(call)
        finally:
            self._connection.close()

    def _serve_one(self, call: _Call[Any]) -> None:
        result, failure = None, None
        try:
            result = call.run(call)
        except BaseException as error:  # the thread lives on, the caller is told
            failure = error
        call.leave()
        call.deliver(result, failure)

    def _write(self, call: _Call[T], work: Work[T], lock: float | None) -> T:
        connection = self._connection
        assert connection is not None
        try:
            begun = begin_write(
                connection, until=call.lock_until, clock=self._clock, wanted=call.wanted
            )
        except sqlite3.Error as error:
            raise translate(error, self._place) from error
        if not begun:
            if lock is not None:
                raise ConflictError(
                    f"{self._place}: the write lock was not free within {lock:g} s; try again"
                )
            raise self._not_begun()
        if not call.enter():
            roll_back(connection)
            raise self._not_begun()
        return in_write(connection, work, self._clock, self._place)

    def _read(self, call: _Call[T], work: Work[T]) -> T:
        connection = self._connection
        assert connection is not None
        if not call.enter():
            raise self._not_begun()
        return in_read(connection, work, self._clock, self._place)
