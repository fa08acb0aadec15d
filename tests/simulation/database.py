"""One database in memory, seen by each process through connections that fail as networks and servers do.

The stores are the product's own; only the worker below them differs: between a call and its transaction, and between
the transaction and its answer, virtual time passes, and either may be lost. Transactions themselves are serial, as
SQLite's are; what is interleaved are the calls of many processes.
"""

from __future__ import annotations

import contextvars
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Generic, TypeVar, cast

from perdure.storage import schema
from perdure.storage.clock import Clock, SeededRandomness
from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    RunnerDeclaredDead,
    UnknownOutcome,
)
from perdure.storage.interface import Capabilities, HintChannel, RunStore
from perdure.storage.model import (
    ClaimRequest,
    Claims,
    JournalPage,
    NewRun,
    RunWrite,
    StartOutcome,
    Verdict,
)
from perdure.storage.sqlite.database import SqliteDatabase
from perdure.storage.sqlite.runs import SqliteRunStore
from perdure.storage.sqlite.worker import InlineWorker, Work, Worker
from tests.harness.audit import COLUMNS, AuditRow, _from_sqlite, sqlite_audit_sql

from .loop import LANE, WORLD, Lane, VirtualLoop

T = TypeVar("T")

POISON = "a text this server refuses"
"""A text the simulated server refuses to store, as servers refuse NUL characters."""


CLAIMS = ("claim_runs", "claim_strays")
ENDS_GHOSTS = {"settle_writes": ("commit_writes",)} | dict.fromkeys(CLAIMS, CLAIMS)
"""Calls that the seam promises to answer only when an earlier one of unknown outcome is over."""


class FakeClock:
    """A clock of virtual time. offset: of its wall time; it may jump. monotonic never does."""

    def __init__(self, loop: VirtualLoop, offset: float = 0.0, since: float = 0.0) -> None:
        self._loop = loop
        self.offset = offset
        self._since = since

    def now(self) -> float:
        return round(1_700_000_000.0 + self._loop.now + self.offset, 6)

    def monotonic(self) -> float:
        return self._loop.now + self._since


@dataclass(slots=True)
class Faults:
    """How often a connection's calls go wrong, in parts of one; and what is wrong with it just now."""

    unavailable: float = 0.0
    conflict: float = 0.0
    lost_before: float = 0.0
    lost_after: float = 0.0
    ghost: float = 0.0
    slow: float = 0.0
    cut: bool = False
    """Nothing gets through, in either direction."""

    def clear(self) -> None:
        self.unavailable = self.conflict = self.lost_before = self.lost_after = 0.0
        self.ghost = self.slow = 0.0
        self.cut = False


@cache
def _template() -> sqlite3.Connection:
    """Tables and witness of an empty database; copied for each simulation."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _functions(connection, lambda: 0.0, lambda: 0, lambda: 0)
    for statement in schema.all_statements("sqlite"):
        connection.execute(statement)
    meta = {**schema.initial_meta(0.0), "cluster_id": "simulated"}
    connection.executemany("insert into perdure_meta (key, value) values (?, ?)", meta.items())
    defaults = {"at": "simulated_now()", "txid": "simulated_tx()", "backend": "simulated_writer()"}
    connection.executescript(sqlite_audit_sql(defaults=defaults))
    return connection


def _functions(
    connection: sqlite3.Connection,
    now: Callable[[], float],
    tx: Callable[[], int],
    writer: Callable[[], int],
) -> None:
    connection.create_function("simulated_now", 0, now)
    connection.create_function("simulated_tx", 0, tx)
    connection.create_function("simulated_writer", 0, writer)


@dataclass(frozen=True, slots=True)
class Lost:
    """A fail-over to an old copy: what was written between the two moments is gone. rows: the history of that time."""

    copied_at: float
    restored_at: float
    rows: Sequence[AuditRow]


class Server:
    """The database server: one SQLite connection, its clock, its history, its copies."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.clock = FakeClock(loop)
        self.down = False
        self.lost: list[Lost] = []
        self.writer = 0
        """Number of the process whose transaction is at work."""
        self.transactions = 0
        self.calls: Counter[str] = Counter()
        self._copy: tuple[float, int, sqlite3.Connection] | None = None
        self.connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
        _template().backup(self.connection)
        _functions(
            self.connection, lambda: loop.now, lambda: self.transactions, lambda: self.writer
        )
        self.inline = InlineWorker(self.connection, self.clock, "the simulated database")

    def perform(self, call: Call[Any]) -> bool:
        """One transaction, now. Whether it committed."""
        self.writer = call.writer
        self.transactions += 1
        doing = (self.inline.write if call.writes else self.inline.read)(call.work)
        try:
            doing.send(None)
        except StopIteration as done:
            call.value = done.value
            return True
        except Exception as error:
            call.error = error
            return False
        raise AssertionError("a transaction on a database in memory waited for something")

    def copy(self) -> None:
        """A replica that stops following now."""
        if self._copy is not None:
            self._copy[2].close()
        target = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.backup(target)
        self._copy = (self.loop.now, self._last_line(), target)

    def fail_over(self) -> bool:
        """The copy is the database from now on. False: there is none."""
        if self._copy is None:
            return False
        copied_at, line, source = self._copy
        self.lost.append(Lost(copied_at, self.loop.now, self.history(after=line)))
        source.backup(self.connection)
        source.close()
        self._copy = None
        return True

    def _last_line(self) -> int:
        return int(
            self.connection.execute("select coalesce(max(id), 0) from audit_history").fetchone()[0]
        )

    def history(self, after: int = 0) -> list[AuditRow]:
        """What was written, but for renewals; transaction and writer of each line are the simulation's own numbers."""
        listed = ", ".join(f'"{column}"' for column in COLUMNS)
        found = self.connection.execute(
            f"select {listed} from audit_history where id > ? "
            """and not ("table" = 'runners' and op = 'U' and dead is old_dead) order by id""",
            (after,),
        )
        return [_from_sqlite(row) for row in found]

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """What is there, for the simulation's own eyes."""
        return self.connection.execute(text, values).fetchall()

    def close(self) -> None:
        self.connection.close()
        if self._copy is not None:
            self._copy[2].close()


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One transaction asked for."""

    name: str
    work: Work[Any]
    writes: bool
    writer: int
    value: Any = None
    error: Exception | None = None
    ghost: bool = False
    """Its sender was told that the connection is lost."""
    state: str = "sent"
    """sent, ended (its transaction is over, or will never be)."""


class Connections(Worker):
    """All connections of one process to the server."""

    def __init__(
        self,
        server: Server,
        lane: Lane,
        number: int,
        faults: Faults,
        chance: Random,
        deadline: float,
        latency: float,
        told: Callable[[str], None],
    ) -> None:
        self._server = server
        self._lane = lane
        self._number = number
        self.faults = faults
        self._chance = chance
        self._deadline = deadline
        self._slowest = latency
        self._ghosts: list[Call[Any]] = []
        self._told = told
        self._world = contextvars.Context()

    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        return await self._ask(work, writes=True)

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        return await self._ask(work, writes=False)

    async def close(self) -> None:
        """The server lives on."""

    async def _ask(self, work: Work[T], *, writes: bool) -> T:
        name = work.__qualname__.partition(".<locals>")[0].rpartition(".")[2]
        call: Call[Any] = Call(name, work, writes, self._number)
        self._server.calls[name] += 1
        if name in ENDS_GHOSTS:
            self._end_ghosts(ENDS_GHOSTS[name])
        answer = self._server.loop.create_future()
        self._send(call, answer)
        await answer
        if call.error is not None:
            raise call.error
        return cast(T, call.value)

    # -- what happens to it on its way
    def _send(self, call: Call[Any], answer: Any) -> None:
        chance, faults, later = self._chance, self.faults, self._later
        out, back = self._latency(), self._latency()
        lot = chance.random()
        if faults.cut or self._server.down:
            later(min(out * 20, self._deadline), self._fail, call, answer, self._unavailable(call))
            return
        lot -= faults.unavailable
        if lot < 0:
            later(out, self._fail, call, answer, self._unavailable(call))
            return
        if not call.writes:
            later(out, self._arrive, call, answer, back)
            return
        for part, kind in (
            (faults.conflict, "conflict"),
            (faults.lost_before, "lost-before"),
            (faults.lost_after, "lost-after"),
            (faults.ghost, "ghost"),
        ):
            lot -= part
            if lot < 0:
                self._spoil(kind, call, answer, out, back)
                return
        later(out, self._arrive, call, answer, back)

    def _spoil(self, kind: str, call: Call[Any], answer: Any, out: float, back: float) -> None:
        self._told(f"{kind} {call.name}")
        self._server.calls[f"{kind} {call.name}"] += 1
        self._server.calls[kind] += 1
        unknown = UnknownOutcome(f"{call.name}: the connection was lost ({kind})")
        if kind == "conflict":
            self._later(out, self._fail, call, answer, ConflictError(f"{call.name}: try again"))
        elif kind == "lost-before":
            self._later(out, self._fail, call, answer, unknown)
        elif kind == "lost-after":
            self._later(out, self._perform, call)
            self._later(out + back, self._fail, call, answer, unknown)
        else:
            # Told that the connection is lost, while the server still works on it.
            call.ghost = True
            self._ghosts.append(call)
            self._later(out, self._fail, call, answer, unknown, True)
            self._later(out + self._chance.uniform(0, self._deadline), self._perform, call)

    def _latency(self) -> float:
        chance = self._chance
        if chance.random() < self.faults.slow:
            self._server.calls["slow"] += 1
            return chance.uniform(0.05, self._deadline / 3)
        return chance.uniform(0.0003, self._slowest)

    def _later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        # In nobody's lane: what was sent arrives, whatever becomes of its sender.
        self._server.loop.call_later(delay, callback, *args, context=self._world)

    def _unavailable(self, call: Call[Any]) -> Exception:
        self._server.calls["unavailable"] += 1
        return DatabaseUnavailable(f"{call.name}: no connection")

    def _arrive(self, call: Call[Any], answer: Any, back: float) -> None:
        if self.faults.cut or self._server.down:
            error = self._unavailable(call)
            if call.writes:
                error = UnknownOutcome(f"{call.name}: the connection was cut on the way")
            self._fail(call, answer, error)
            return
        self._perform(call)
        self._later(back, self._answer, call, answer)

    def _perform(self, call: Call[Any]) -> None:
        if call.state == "sent":
            call.state = "ended"
            if self._server.perform(call) and call.ghost:
                self._server.calls["ghost committed"] += 1

    def _answer(self, call: Call[Any], answer: Any) -> None:
        if (self.faults.cut or self._server.down) and call.writes:
            self._server.calls["lost-after"] += 1
            self._fail(call, answer, UnknownOutcome(f"{call.name}: the connection was cut"))
        elif not answer.done():
            answer.set_result(None)

    def _fail(self, call: Call[Any], answer: Any, error: Exception, ghost: bool = False) -> None:
        if not ghost:
            call.state = "ended"
        if not answer.done():
            call.error = error
            answer.set_result(None)

    def _end_ghosts(self, names: Sequence[str]) -> None:
        """A session whose answer was lost is over now: it ends by itself just before, or it is ended."""
        ghosts, self._ghosts = self._ghosts, []
        for ghost in ghosts:
            if ghost.name not in names:
                self._ghosts.append(ghost)
            elif ghost.state == "sent":
                if self._chance.random() < 0.5:
                    self._perform(ghost)
                ghost.state = "ended"


class SimulatedRunStore(SqliteRunStore):
    """The product's own, watched."""

    _database: SimulatedDatabase

    async def claim_runs(self, request: ClaimRequest) -> Claims:
        claims = await super().claim_runs(request)
        for run in claims.runs:
            if run.taken_over:
                self._database.seen["orphan re-claimed"] += 1
            if run.reclaim_count:
                self._database.seen["suspect claimed"] += 1
            if run.next_seq > 1:
                self._database.seen["replayed"] += 1
        if claims.strays:
            self._database.seen["strays marked"] += 1
        if claims.runs:
            self._database.claimed(claims)
        return claims

    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        outcomes = await super().start_runs(runs)
        for run in runs:
            if run.birth is not None:
                self._database.seen["birth asked"] += 1
        return outcomes

    async def read_journal_page(self, after: Mapping[str, int], **limits: Any) -> JournalPage:
        page = await super().read_journal_page(after, **{**limits, "entries": self._database.page})
        if page.more:
            self._database.seen["journal goes on"] += 1
        return page

    async def due_in_memory(self, seen: Mapping[str, int]) -> Sequence[str]:
        found = await super().due_in_memory(seen)
        self._database.seen["mail found by a scan"] += len(found)
        return found

    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        seen = self._database.seen
        if any(_poisoned(write) for write in writes):
            seen["batch halved" if len(writes) > 1 else "write refused"] += 1
            await self._database.writer.write(_refuse)
        try:
            verdicts = await super().commit_writes(runner_id, batch_id, writes)
        except RunnerDeclaredDead:
            seen["dead at commit"] += 1
            raise
        for verdict in verdicts.values():
            if verdict not in (Verdict.COMMITTED, Verdict.PARKED):
                seen[verdict.value] += 1
        return verdicts

    async def settle_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        verdicts = await super().settle_writes(runner_id, batch_id, writes)
        for verdict in verdicts.values():
            self._database.seen[f"settled {verdict.value}"] += 1
        return verdicts


def _poisoned(write: RunWrite) -> bool:
    return any(POISON in (entry.output or "") for entry in write.entries)


def _refuse(tx: Any) -> None:
    raise DataRefused("the server refuses a text")


class SimulatedDatabase(SqliteDatabase):
    """The database as one process sees it. claimed: told of claims that were answered."""

    def __init__(
        self,
        server: Server,
        connections: Connections,
        *,
        chance: int,
        deadline: float,
        hints: Callable[[], HintChannel],
        seen: Counter[str],
        page: int,
        claimed: Callable[[Claims], None],
    ) -> None:
        self.settings = DatabaseSettings("sqlite:///:memory:", deadline=deadline)
        self.clock: Clock = server.clock
        self.randomness = SeededRandomness(chance)
        self.path = None
        self.seen = seen
        self.page = page
        self.claimed = claimed
        self.capabilities = Capabilities(
            dialect="sqlite",
            server_version=sqlite3.sqlite_version,
            shared=True,
            multi_host=False,
            pushes_hints=True,
            returning=True,
        )
        self._link = cast(Any, _Link(connections))
        self._hints = hints

    def runs(self) -> RunStore:
        return SimulatedRunStore(self)

    def hints(self) -> HintChannel:
        return self._hints()


class _Link:
    """Always open."""

    def __init__(self, connections: Connections) -> None:
        self.writer: Worker = connections
        self.reader: Worker = connections

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return


def lane_now() -> Lane:
    """Whose code runs."""
    return LANE.get(WORLD)
