"""Every merge of the statements of two or three sessions, on real connections.

A *script* is what one session does: named operations in a fixed order (``BEGIN`` and ``COMMIT``
are operations of their own where there are several statements in a transaction). A *merge* is one
order in which the operations of all scripts can be issued; there are (a + b + …)! / (a! b! …) of
them, and each is run once, on fresh rows.

An operation that waits for a lock stays under way while the others go on; what its session has
left follows as soon as it gets on. Who waited is recorded. At the end the invariant sees the case
with everything that was answered and says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import asyncpg

CASES = itertools.count(1)
S = TypeVar("S")
"""A session: whatever the operations work on (a connection, a store)."""


@dataclass(slots=True)
class Case:
    """One merge on its way. ``key``: unique, for the names of its rows. ``state``: the scripts'
    own notes, such as claims. ``answers``: (script, operation) → value or exception."""

    key: str
    order: tuple[str, ...]
    state: dict[str, Any] = field(default_factory=dict)
    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    waits: list[tuple[str, str]] = field(default_factory=list)
    done: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, script: str, operation: str) -> Any:
        """What an operation returned. Raises its exception if it failed."""
        value = self.answers[script, operation]
        if isinstance(value, BaseException):
            raise value
        return value

    def error(self, script: str) -> BaseException | None:
        """The first exception of a script, None if all went well."""
        for (name, _), value in self.answers.items():
            if name == script and isinstance(value, BaseException):
                return value
        return None

    def waited(self, script: str) -> bool:
        return any(name == script for name, _ in self.waits)


@dataclass(frozen=True, slots=True)
class Operation(Generic[S]):
    """``run(session, case)`` issues one statement; what it returns or raises is kept in the case."""

    name: str
    run: Callable[[S, Case], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Script(Generic[S]):
    """What one session does. After an operation failed, the rest of its script is left out unless
    ``goes_on_after_error``."""

    name: str
    operations: Sequence[Operation[S]]
    goes_on_after_error: bool = False


class Sessions(Protocol[S]):
    """Where sessions come from, and how to see that one waits for a lock.

    sequential: merges cannot be run beside each other, as they would wait for each other.
    """

    sequential: bool

    async def open(self) -> S: ...

    async def close(self, session: S) -> None: ...

    async def clean(self, session: S) -> S:
        """Make a session ready for the next merge (end its transaction), or replace it."""
        ...

    async def waiting(self, session: S, since: float) -> bool:
        """Whether the operation under way since then (event loop time) waits for a lock."""
        ...


def count_merges(lengths: Iterable[int]) -> int:
    """The multinomial coefficient: in how many orders scripts of these lengths can be merged."""
    lengths = list(lengths)
    result = math.factorial(sum(lengths))
    for length in lengths:
        result //= math.factorial(length)
    return result


def merges(names: Sequence[str], lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """All merges, each as the names of the scripts in the order of their operations."""
    if not any(lengths):
        return [()]
    found = []
    for index, (name, left) in enumerate(zip(names, lengths, strict=True)):
        if left:
            rest = [*lengths[:index], left - 1, *lengths[index + 1 :]]
            found += [(name, *order) for order in merges(names, rest)]
    return found


@dataclass(slots=True)
class Report:
    """What all merges of one set of scripts came to.

    outcomes: number of merges by the class the invariant gave them. waits: number of merges in
    which a script waited for a lock. violations: (order, what was wrong).
    """

    title: str
    merges: int
    outcomes: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """In how many merges something was wrong."""
        return len({order for order, _ in self.violations})

    def __str__(self) -> str:
        waits = ", ".join(f"{name} {n}" for name, n in sorted(self.waits.items())) or "nobody"
        outcomes = ", ".join(f"{name} {n}" for name, n in sorted(self.outcomes.items()))
        text = f"{self.title}: {self.merges} merges, {self.bad} bad; waited: {waits}; {outcomes}"
        for order, what in self.violations[:5]:
            text += f"\n  {' '.join(order)}: {what}"
        return text


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the invariant says of one merge: its class of outcome, and what is wrong with it."""

    outcome: str
    violations: Sequence[str] = ()


async def run_merges(
    sessions: Sessions[S],
    scripts: Sequence[Script[S]],
    *,
    prepare: Callable[[Case], Awaitable[object]],
    judge: Callable[[Case], Awaitable[Judgement]],
    title: str | None = None,
    beside: int = 8,
    deadline: float = 20.0,
) -> Report:
    """Run every merge of the scripts and print one line about them.

    ``prepare(case)`` makes the fresh rows of a merge, ``judge(case)`` looks at what it came to
    when all its sessions are idle again; both need connections of their own. ``beside``: so many
    merges are run at the same time. ``deadline``: seconds for one merge, after which an operation
    still under way counts as a violation ("stuck").
    """
    names = [script.name for script in scripts]
    orders = merges(names, [len(script.operations) for script in scripts])
    report = Report(title or "|".join(names), len(orders))
    queue = orders[::-1]

    async def worker() -> None:
        async with _open_all(sessions, scripts) as own:
            while queue:
                case = Case(f"case-{next(CASES)}", queue.pop())
                await prepare(case)
                merge = _Merge(sessions, scripts, own, case, deadline)
                stuck = await merge.run()
                for name in names:
                    own[name] = await sessions.clean(own[name])
                _note(report, case, stuck, await judge(case))

    workers = 1 if sessions.sequential else min(beside, len(orders))
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())
    print(report)
    return report


@asynccontextmanager
async def _open_all(
    sessions: Sessions[S], scripts: Sequence[Script[S]]
) -> AsyncIterator[dict[str, S]]:
    own: dict[str, S] = {}

    async def close(name: str) -> None:
        await sessions.close(own[name])  # the session that is there then, not the first one

    async with AsyncExitStack() as stack:
        for script in scripts:
            own[script.name] = await sessions.open()
            stack.push_async_callback(close, script.name)
        yield own


def _note(report: Report, case: Case, stuck: Collection[str], judged: Judgement) -> None:
    report.outcomes[judged.outcome] += 1
    for name in {name for name, _ in case.waits}:
        report.waits[name] += 1
    wrong = [f"{name} is stuck" for name in sorted(stuck)] + list(judged.violations)
    report.violations += [(case.order, what) for what in wrong]


class _Merge(Generic[S]):
    """Issues the operations of one merge in its order, around those that wait."""

    def __init__(
        self,
        sessions: Sessions[S],
        scripts: Sequence[Script[S]],
        own: dict[str, S],
        case: Case,
        deadline: float,
    ) -> None:
        self._sessions, self._own, self._case = sessions, own, case
        self._scripts = {script.name: script for script in scripts}
        self._left = {script.name: list(script.operations) for script in scripts}
        self._owed = {script.name: 0 for script in scripts}
        self._under_way: dict[str, tuple[asyncio.Task[None], float]] = {}
        self._limit = asyncio.get_running_loop().time() + deadline

    async def run(self) -> list[str]:
        """The names of the scripts that were still waiting at the deadline."""
        for name in self._case.order:
            self._owed[name] += 1
            await self._advance()
        while self._under_way and self._time() < self._limit:
            tasks = [task for task, _ in self._under_way.values()]
            await asyncio.wait(
                tasks, timeout=self._limit - self._time(), return_when=asyncio.FIRST_COMPLETED
            )
            await self._advance()
        stuck = list(self._under_way)
        for task, _ in self._under_way.values():
            task.cancel()
        await asyncio.gather(*(t for t, _ in self._under_way.values()), return_exceptions=True)
        return stuck

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    async def _advance(self) -> None:
        """Issue what is owed until everything is done or waits for a lock."""
        moved = True
        while moved:
            moved = False
            for name in self._scripts:
                if name in self._under_way and await self._comes_to_rest(name):
                    continue
                if self._owed[name] and self._left[name]:
                    self._owed[name] -= 1
                    await self._issue(name)
                    moved = True

    async def _issue(self, name: str) -> None:
        operation = self._left[name].pop(0)
        task = asyncio.ensure_future(self._perform(name, operation))
        self._under_way[name] = (task, self._time())
        if await self._comes_to_rest(name):
            self._case.waits.append((name, operation.name))

    async def _perform(self, name: str, operation: Operation[S]) -> None:
        case = self._case
        try:
            value: object = await operation.run(self._own[name], case)
        except Exception as error:  # the invariant judges it
            value = error
            if not self._scripts[name].goes_on_after_error:
                self._left[name].clear()
        case.answers[name, operation.name] = value
        case.done.append((name, operation.name))

    async def _comes_to_rest(self, name: str) -> bool:
        """Wait until the operation under way is done (False) or waits for a lock (True)."""
        task, since = self._under_way[name]
        pause = 0.001
        while self._time() < self._limit:
            done, _ = await asyncio.wait({task}, timeout=pause)
            if done:
                del self._under_way[name]
                task.result()
                return False
            if await self._sessions.waiting(self._own[name], since):
                return True
            pause = min(pause * 2, 0.02)
        return True


# ---- where sessions come from -----------------------------------------------------------------


# Sessions that enlarge a table or insert a key at one moment also wait for each other, for
# microseconds; that is nobody's transaction and not meant.
LOCK_WAIT = """
select exists (select 1 from pg_locks where pid = $1 and not granted
                  and locktype not in ('extend', 'page', 'spectoken'))
   and cardinality(pg_blocking_pids($1)) > 0
"""


class PostgresConnections:
    """Bare asyncpg connections; lock waits by ``pg_blocking_pids``, seen by a connection apart."""

    sequential = False

    def __init__(self, url: str, *, setup: Sequence[str] = ()) -> None:
        self._url, self._setup = url, setup
        self._observer: asyncpg.Pool[asyncpg.Record] | None = None

    async def __aenter__(self) -> PostgresConnections:
        self._observer = await asyncpg.create_pool(self._url, min_size=1, max_size=4)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._observer is not None:
            await self._observer.close()

    @property
    def observer(self) -> asyncpg.Pool[asyncpg.Record]:
        """Connections for ``prepare`` and ``judge``, no session's own."""
        assert self._observer is not None, "use it as a context manager"
        return self._observer

    async def open(self) -> asyncpg.Connection[asyncpg.Record]:
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
            self._url, timeout=10
        )
        for statement in self._setup:
            await connection.execute(statement)
        return connection

    async def close(self, session: asyncpg.Connection[asyncpg.Record]) -> None:
        session.terminate()

    async def clean(
        self, session: asyncpg.Connection[asyncpg.Record]
    ) -> asyncpg.Connection[asyncpg.Record]:
        if session.is_closed():
            return await self.open()
        if session.is_in_transaction():
            await session.execute("rollback")
        return session

    async def waiting(self, session: asyncpg.Connection[asyncpg.Record], since: float) -> bool:
        if session.is_closed():
            return False
        return bool(await self.observer.fetchval(LOCK_WAIT, session.get_server_pid()))


class SqliteSession:
    """One SQLite connection in a thread of its own. ``busy``: its statement waits for a lock."""

    def __init__(self, path: str) -> None:
        self.busy = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-session")
        self._connection = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False
        )

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Any]:
        """Run one statement, again and again while the database is locked; its rows."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    return await loop.run_in_executor(self._thread, self._once, sql, parameters)
                except sqlite3.OperationalError as error:
                    # Not BUSY_SNAPSHOT: a reader that is no longer up to date never gets the lock.
                    if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                        raise
                self.busy = True
                await asyncio.sleep(0.001)
        finally:
            self.busy = False

    def _once(self, sql: str, parameters: Sequence[object]) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()

    async def rollback(self) -> None:
        if self._connection.in_transaction:
            await self.execute("rollback")

    def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()


class SqliteConnections:
    """Bare SQLite connections to one file; a lock wait is SQLITE_BUSY. One merge at a time."""

    sequential = True

    def __init__(self, path: str) -> None:
        self._path = path

    async def open(self) -> SqliteSession:
        return SqliteSession(self._path)

    async def close(self, session: SqliteSession) -> None:
        session.close()

    async def clean(self, session: SqliteSession) -> SqliteSession:
        await session.rollback()
        return session

    async def waiting(self, session: SqliteSession, since: float) -> bool:
        return session.busy


class StoreSessions(Generic[S]):
    """Sessions of any kind, such as a store on its own connections; a lock wait is an operation
    that is ``blocked`` by the word of a callable, or, without one, under way for ``patience``
    seconds (for engines that cannot be asked, such as SQLite's busy waiting)."""

    def __init__(
        self,
        open_session: Callable[[], Awaitable[S]],
        close_session: Callable[[S], Awaitable[object]],
        *,
        blocked: Callable[[S], Awaitable[bool]] | None = None,
        patience: float = 0.05,
        sequential: bool = False,
    ) -> None:
        self.sequential = sequential
        self._open, self._close = open_session, close_session
        self._blocked, self._patience = blocked, patience

    async def open(self) -> S:
        return await self._open()

    async def close(self, session: S) -> None:
        await self._close(session)

    async def clean(self, session: S) -> S:
        return session

    async def waiting(self, session: S, since: float) -> bool:
        if self._blocked is not None:
            return await self._blocked(session)
        return asyncio.get_running_loop().time() - since >= self._patience
