"""Processes that do one thing and may be killed, or kill themselves, while they do: a client's call, or a pod's work.

    python -m tests.integration.apps.crash_actor

Reads lines of JSON, each an `Order`, and carries each out in a process of its own. Says "began NUMBER PID" and "ended
NUMBER CODE" of each, of a pod also "running NUMBER". What is told by `Order.die` works on SQLite only, where no proxy
stands between the process and its database.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from perdure import App, Client
from perdure.runtime.authoring.registry import Registry
from perdure.runtime.hints import HintBus
from perdure.runtime.parts import Parts
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock, SystemRandomness
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.interface import RunStore
from perdure.storage.model import (
    ClaimRequest,
    Claims,
    EntryKind,
    Finish,
    JournalPage,
    Mailbox,
    Message,
    NewRun,
    Park,
    RunStatus,
    RunWrite,
    SendOutcome,
    StartOutcome,
    Verdict,
)
from perdure.storage.sqlite import SqliteDatabase
from perdure.storage.sqlite.runs import SqliteRunStore
from perdure.storage.sqlite.worker import Work, Worker
from tests.harness.waiting import until
from tests.integration.apps.crossing import app, crossing, logging_to, unknown

T = TypeVar("T")
Act = Literal["pod", "birth", "start", "signal", "cancel"]
"""birth: a pod that starts a run itself, in a shard it holds."""
Where = Literal["before", "inside", "after"]
"""Of a transaction: before it begins, with all its statements done and no COMMIT, after the COMMIT."""

PARK_AFTER = 0.05
SCAN = 0.5
LEASE = 2.0
SHARDS = 16


@dataclass(frozen=True, slots=True)
class Order:
    """What to do. run_id: of the run that a client acts on, or at one of whose events to die. name, scan (in seconds),
    shard_lock: of a pod. die: the event (see `crash_world.MOMENTS`, or the act of a client) and where in it. number:
    given when it is sent."""

    act: Act
    url: str
    run_id: str = ""
    workflow: str = "crossing"
    name: str = "actor"
    scan: float = SCAN
    shard_lock: str = "auto"
    side_log: str = ""
    die: tuple[str, Where] | None = None
    number: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def settings_of(
    url: str, name: str = "actor", scan: float = SCAN, shard_lock: str = "auto"
) -> Settings:
    return Settings(
        db=url,
        park_after=PARK_AFTER,
        warm_runs=0,  # every wake reads and replays, so that this can be interrupted
        scan=scan,
        lease=LEASE,
        shards=SHARDS,
        shard_lock=shard_lock,
        replica_id=name,
        runner_port=0,
    )


# ---- dying ------------------------------------------------------------------------------------


class Undone(BaseException):
    """Rolls a transaction back."""


def anything(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Doom:
    """What awaits a transaction whose result is ``did``: death before its COMMIT, or, to ``undo`` it, a roll-back."""

    did: Callable[[Any], bool]
    undo: bool


_doomed: ContextVar[Doom | None] = ContextVar("doomed", default=None)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FatalWriter(Worker):
    """The writer of a database, with a death inside its transactions."""

    def __init__(self, writer: Worker) -> None:
        self._writer = writer

    async def write(self, work: Work[T], *, urgent: bool = False, lock: float | None = None) -> T:
        doomed = _doomed.get()

        def fatal(tx: Any) -> T:
            result = work(tx)
            if doomed is not None and doomed.did(result):
                if doomed.undo:
                    raise Undone
                die()
            return result

        return await self._writer.write(fatal, urgent=urgent, lock=lock)

    async def read(self, work: Work[T], *, urgent: bool = False) -> T:
        return await self._writer.read(work, urgent=urgent)

    async def close(self) -> None:
        await self._writer.close()


class FatalDatabase(SqliteDatabase):
    """A SQLite database whose run store kills the process at one event of one run."""

    def __init__(self, settings: DatabaseSettings, run_id: str, event: str, where: Where) -> None:
        super().__init__(settings, clock=SystemClock())
        self.run_id, self.event, self.where = run_id, event, where

    @property
    def writer(self) -> Worker:
        return FatalWriter(super().writer)

    def runs(self) -> RunStore:
        return FatalRunStore(self)


class FatalRunStore(SqliteRunStore):
    def __init__(self, database: FatalDatabase) -> None:
        super().__init__(database)
        self._fatal = database

    async def _at(
        self,
        is_event: bool,
        call: Callable[[], Awaitable[T]],
        did: Callable[[T], bool] = anything,
    ) -> T:
        """Make a call. did: of its result, whether it was the event after all."""
        where = self._fatal.where
        if not is_event:
            return await call()
        if where == "before" and did is anything:
            die()
        token = _doomed.set(Doom(did, undo=where == "before")) if where != "after" else None
        try:
            result = await call()
        except (
            Undone
        ):  # it would have been the event, and has not been begun for all that anybody can see
            die()
            raise
        finally:
            if token is not None:
                _doomed.reset(token)
        if where == "after" and did(result):
            die()
        return result

    # -- of a client
    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        return await self._at(
            self._fatal.event == "start", lambda: super(FatalRunStore, self).start_runs(runs)
        )

    async def send_message(self, message: Message, **limits: int) -> SendOutcome:
        return await self._at(
            self._fatal.event == f"send {message.kind.value}",
            lambda: super(FatalRunStore, self).send_message(message, **limits),
        )

    async def cancel_unentered(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        return await self._at(
            self._fatal.event == "cancel unentered",
            lambda: super(FatalRunStore, self).cancel_unentered(
                run_id, batch_id=batch_id, reason=reason
            ),
        )

    # -- of a pod
    async def claim_runs(self, request: ClaimRequest) -> Claims:
        return await self._at(
            self._fatal.event in ("claim", "wake"),
            lambda: super(FatalRunStore, self).claim_runs(request),
            self._took,
        )

    def _took(self, claims: Claims) -> bool:
        first = self._fatal.event == "claim"
        mine = [run for run in claims.runs if run.run_id == self._fatal.run_id]
        return any((run.next_seq == 1) == first for run in mine)

    async def read_journal_page(self, after: Mapping[str, int], **limits: int) -> JournalPage:
        return await self._at(
            self._fatal.event == "journal",
            lambda: super(FatalRunStore, self).read_journal_page(after, **limits),
        )

    async def read_mailboxes(self, run_ids: Sequence[str]) -> Mapping[str, Mailbox]:
        return await self._at(
            self._fatal.event == "mailbox" and self._fatal.run_id in run_ids,
            lambda: super(FatalRunStore, self).read_mailboxes(run_ids),
        )

    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        events = [event_of(w) for w in writes if w.run_id == self._fatal.run_id]
        return await self._at(
            self._fatal.event in events,
            lambda: super(FatalRunStore, self).commit_writes(runner_id, batch_id, writes),
        )


def event_of(write: RunWrite) -> str:
    """The name of a write in `crash_world.MOMENTS`."""
    match write.outcome:
        case Park():
            return "park"
        case Finish(status=RunStatus.CANCELLED):
            return "cancelled"
        case Finish():
            return "finish"
    kinds = {entry.kind for entry in write.entries}
    if EntryKind.SIGNAL in kinds:
        return "signal"
    return "cancel" if EntryKind.CANCEL in kinds else "step"


# ---- acting -----------------------------------------------------------------------------------


def client_of(order: Order) -> Client:
    if order.die is None:
        return Client(order.url, workflows=[crossing, unknown])
    registry = Registry()
    for definition in (crossing, unknown):
        registry.add(definition)
    database = FatalDatabase(DatabaseSettings(order.url), order.run_id, *order.die)
    return Client.sharing(
        Parts(
            store=database.runs(),
            bus=HintBus(database.hints()),
            clock=SystemClock(),
            randomness=SystemRandomness(),
            registry=registry,
            settings=settings_of(order.url),
            database=database,
        )
    )


async def call(order: Order) -> None:
    client = client_of(order)
    if order.die is not None:
        await client._parts.store.open()
    async with client:
        if order.act == "start":
            await client.start(order.workflow, run_id=order.run_id)
        elif order.act == "signal":
            await client.signal(order.run_id, "go", "on", id="go")
        else:
            await client.cancel(order.run_id, "enough")
        await (
            asyncio.Event().wait()
        )  # to be killed at what comes after the answer, such as the hint


async def serve(order: Order, served: App) -> None:
    settings = settings_of(order.url, order.name, order.scan, order.shard_lock)
    database = (
        connect(settings.database(), clock=SystemClock())
        if order.die is None
        else FatalDatabase(settings.database(), order.run_id, *order.die)
    )
    with logging_to(Path(order.side_log)):
        runner = Runner(served, settings, port=False, database=database)
        await runner.start()
        print("running", order.number, flush=True)
        if order.act == "birth":
            await until(
                lambda: (
                    len(runner.session.ownership.holds) == SHARDS
                    and runner.session.engine.births.open
                    and not runner.session.engine.looking
                ),
                what="births",
                deadline=10,
            )
            await runner.client.start(order.workflow, run_id=order.run_id)
        await runner.closed()


def carry_out(order: Order) -> None:
    """In a child of the process that reads orders: act in a child of its own, and tell how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        asyncio.run(serve(order, app) if order.act in ("pod", "birth") else call(order))
        return
    print("began", order.number, pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print("ended", order.number, os.waitstatus_to_exitcode(status), flush=True)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    for line in sys.stdin:
        if os.fork() == 0:  # there is no thread and no event loop yet
            try:
                carry_out(Order(**json.loads(line)))
            finally:
                sys.stdout.flush()
                os._exit(0)
    os.killpg(0, signal.SIGKILL)  # whoever gives the orders is gone: nobody is left behind


if __name__ == "__main__":
    main()
