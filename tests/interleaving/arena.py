"""The ground of the races: fresh rows for every merge, and the verdict on what it came to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import asyncpg

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, database_file
from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import (
    Message,
    MessageKind,
    Reason,
    RunWrite,
    ShardHold,
    StrayRequest,
    Verdict,
)
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.session import open_session
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.interleave import (
    LOCK_WAIT,
    Case,
    Judgement,
    PostgresConnections,
    Report,
    SqliteSession,
    StoreSessions,
    run_merges,
)
from tests.harness.watch import LockWatch
from tests.interleaving.actors import (
    PostgresActor,
    StoreActor,
    changed,
    text_of,
)
from tests.interleaving.notes import Attempt, Claiming, Notes, notes_of
from tests.interleaving.scripts import (
    ANOTHER,
    Draft,
    claim_request,
    entry,
    new_run,
    park,
)
from tests.interleaving.truths import Facts, lies

Preparation: TypeAlias = "Callable[[Arena, Notes], Awaitable[None]]"
Listener: TypeAlias = Callable[[str, Report], None]

CASE_KEY = re.compile(r"case-(\d+)")
SHARD = re.compile(r"(?:shard |shards of )(\d+)")
SENT_AGAIN = 5
BESIDE = 6
"""Merges run at the same time."""
# A session of the engine that never may wait for a lock.
RUNNERS = frozenset({"commit", "claim", "claim_strays", "due_in_memory", "take_shards"})

LOST = (
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    ConnectionError,
)

GROUND = [
    """insert into perdure_shards (shard_id, slot_lo, slot_hi, runner_id, epoch)
       values ({n}, {n} * 256, {n} * 256 + 255, {n} * 10 + 1, 1)""",
    """insert into perdure_runners (runner_id, replica_id, address, expires_at{columns})
       values ({n} * 10 + 1, 'a', 'a:1', {past}{values}), ({n} * 10 + 2, 'b', 'b:1', {future}{values}),
              ({n} * 10 + 3, 'c', 'c:1', {future}{values})""",
]  # fmt: skip


class Ground:
    """A migrated and audited database with everything that is kept open from race to race: connections cost
    more than merges."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store: StoreActor
        self.watcher: asyncpg.Pool[asyncpg.Record]
        self.file: SqliteSession | None = None
        self._stack = AsyncExitStack()
        self._idle_actors: list[PostgresActor] = []
        self._idle_stores: list[StoreActor] = []

    async def __aenter__(self) -> Ground:
        self.store = await self._open_store(pool=10)
        self._stack.push_async_callback(self.store.close)
        self._stack.push_async_callback(self._close_idle)
        if self.url.startswith("sqlite"):
            self.file = SqliteSession(str(database_file(self.url)))
            self._stack.callback(self.file.close)
        else:
            connections = await self._stack.enter_async_context(PostgresConnections(self.url))
            self.watcher = connections.observer
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _close_idle(self) -> None:
        for actor in self._idle_actors:
            actor.session.abort()
        for store in self._idle_stores:
            await store.close()

    async def _open_store(self, pool: int = 3) -> StoreActor:
        settings = DatabaseSettings(self.url, pool=pool, deadline=10.0)
        return await StoreActor(connect(settings, clock=SystemClock())).open()

    async def open_store(self) -> StoreActor:
        """The stores of one process."""
        return self._idle_stores.pop() if self._idle_stores else await self._open_store()

    async def put_back_store(self, store: StoreActor) -> None:
        self._idle_stores.append(store)

    async def open_actor(self, texts: Mapping[str, str]) -> PostgresActor:
        """A session that uses these statements in place of the engine's."""
        while self._idle_actors:
            actor = self._idle_actors.pop()
            if actor.session.alive:
                actor.texts = texts
                return actor
        settings = DatabaseSettings(self.url)
        session = await open_session(settings, address_of(self.url), hot=True)
        return PostgresActor(session, texts, self.watcher)

    async def put_back_actor(self, actor: PostgresActor) -> None:
        await actor.forget()
        self._idle_actors.append(actor)

    async def run_script(self, statements: Sequence[str]) -> None:
        """Statements of the test's own, in one transaction."""
        if self.file is None:
            await self.watcher.execute(";".join(statements))
            return
        for statement in ("begin immediate", *statements, "commit"):
            await self.file.execute(statement)


class Arena:
    """Where merges are run, each on rows of its own.

    split: sessions send the engine's statements one by one (PostgreSQL), else they call stores.
    texts: statements to be used in place of the engine's, by name.
    """

    def __init__(self, ground: Ground, *, split: bool, listener: Listener) -> None:
        self.split = split
        self.texts: dict[str, str] = {}
        self.store = ground.store
        self._ground = ground
        self._listener = listener
        self._orders: dict[int, tuple[str, ...]] = {}

    def replace_text(self, name: str, old: str, new: str, *, times: int = 1) -> None:
        """Plant a mistake: a passage of a statement is written otherwise."""
        self.texts[name] = changed(self.texts.get(name) or text_of(name), old, new, times=times)

    # -- rows of a merge

    async def _lay_ground(self, number: int) -> None:
        """One shard, which runner a holds, and three runners; a's lease is over."""
        words = {"past": "now() - interval '1 h'", "future": "now() + interval '9 h'"}
        words |= {"columns": "", "values": ""}
        if self._ground.file is not None:
            words = {
                "past": "0",
                "future": f"{1 << 60}",
                "columns": ", started_at",
                "values": ", 0",
            }
        await self._ground.run_script([text.format(n=number, **words) for text in GROUND])

    async def start(self, notes: Notes, *names: str) -> None:
        """Start the main run (the name ""), or children of it."""
        await self.store.runs.start_runs([new_run(notes, name) for name in names])

    async def claim(self, notes: Notes, runner: int = 1) -> None:
        """All that is due becomes the runner's."""
        request = claim_request(notes, runner, limit=10)
        for run in (await self.store.runs.claim_runs(request)).runs:
            notes.held[run.run_id.removeprefix(notes.key).removeprefix(".")] = run

    async def mark(self, notes: Notes, runner: int = 1) -> None:
        """Its holder does not know the workflow."""
        request = claim_request(notes, runner, workflows=[ANOTHER])
        claims = await self.store.runs.claim_runs(request)
        assert claims.strays, "the run was not marked as a stray"

    async def lend(self, notes: Notes, runner: int = 2) -> None:
        """A runner that knows the workflow has the main run."""
        request = StrayRequest(notes.runner(runner), [notes.workflow], [], limit=10)
        found = {run.run_id: run for run in (await self.store.runs.claim_strays(request)).runs}
        notes.held[""] = found[notes.key]

    async def move(self, notes: Notes) -> None:
        """The shard is runner b's from now on."""
        await self.store.release_shards(notes.a, notes.holds.pop(notes.a))
        notes.holds[notes.b] = await self.store.take_shards(notes.b, notes.number, [])

    async def park(
        self, notes: Notes, *, reason: Reason = Reason.SIGNAL, wake_at: float | None = None
    ) -> None:
        """Its holder parks the main run."""
        held = notes.held.pop("")
        write = RunWrite(
            held.run_id,
            held.claim_id,
            held.revision,
            outcome=park(wake_at=wake_at, reason=reason)(notes),
        )
        attempt = Attempt(notes.a, write)
        await self.store.write(attempt)
        assert attempt.verdict is Verdict.PARKED

    async def send_and_take(self, notes: Notes) -> None:
        """A message to the main run that its holder has taken, so that the run is due without news."""
        message = Message(notes.key, "m0", MessageKind.SIGNAL, name="go")
        await self.store.runs.send_message(message, mailbox_limit=10)
        held = notes.held[""]
        write = RunWrite(
            held.run_id,
            held.claim_id,
            held.revision,
            entries=[entry(1, "m0")],
            consumed=[("m0", 1)],
        )
        await self.store.write(Attempt(notes.a, write))
        notes.held[""] = replace(held, revision=held.revision + 1, next_seq=2)
        notes.seen["before"] = 1

    # -- the race

    async def race(
        self,
        *drafts: Draft,
        prepare: Preparation,
        outcomes: Collection[str] = (),
        overlapping: Collection[str] = (),
        waiters: Collection[str] = (),
        title: str | None = None,
    ) -> Report:
        """Run every merge and demand that all went right.

        outcomes: the classes that must be reached, and no others. overlapping: further ones that only
        transactions can reach that are open at the same time. waiters: scripts that may wait for locks.
        """
        report = await self.run(*drafts, prepare=prepare, title=title)
        assert report.bad == 0, str(report)
        wanted = {*outcomes, *(overlapping if self.split else ())}
        assert set(report.outcomes) == wanted, _difference(report, wanted)
        if self.split:
            assert set(report.waits) <= set(waiters), str(report)
        return report

    async def run(
        self,
        *drafts: Draft,
        prepare: Preparation,
        title: str | None = None,
        planted: bool = False,
    ) -> Report:
        """Run every merge and report; whoever calls it judges the report."""
        scripts = [draft.lowered(split=self.split) for draft in drafts]

        async def ready(case: Case) -> None:
            notes = notes_of(case)
            notes.holds[notes.a] = [ShardHold(notes.number, 1)]
            self._orders[notes.number] = case.order
            await self._lay_ground(notes.number)
            await prepare(self, notes)

        sessions: Any
        async with AsyncExitStack() as stack:
            watch = None
            if self.split:
                sessions = PostgresActors(self._ground, self.texts)
                watch = await stack.enter_async_context(LockWatch(self._ground.url, period=0.02))
            else:
                sessions = StoreSessions(
                    self._ground.open_store,
                    self._ground.put_back_store,
                    patience=5.0,
                    sequential=True,
                )
            report = await run_merges(
                sessions, scripts, prepare=ready, judge=self._judge, title=title, beside=BESIDE
            )
        await self._judge_history(report)
        if watch is not None and not planted:
            assert watch.looks > 0
            waiting = RUNNERS & set(watch.waits)
            assert not waiting, f"{waiting} waited for a lock: {watch.waits}"
        self._listener("merges with a plant" if planted else "merges raced", report)
        return report

    async def plant(self, *drafts: Draft, prepare: Preparation, title: str | None = None) -> Report:
        """Race with a mistake in it, which the same checks have to find."""
        report = await self.run(*drafts, prepare=prepare, title=title, planted=True)
        assert report.bad > 0, str(report)
        return report

    # -- the verdict

    async def _judge(self, case: Case) -> Judgement:
        notes = notes_of(case)
        wrong = [
            f"{script}, {operation}: {error!r}"
            for (script, operation), error in case.answers.items()
            if isinstance(error, BaseException) and not _expected(script, error)
        ]
        await self._finish_what_was_set_aside(notes)
        facts = await self._facts(notes)
        wrong += lies(notes, facts)
        return Judgement(_class_of(notes, facts), wrong)

    async def _finish_what_was_set_aside(self, notes: Notes) -> None:
        """What callers do later by themselves: send again what has to be, scan again."""
        for attempt in notes.attempts.values():
            for _ in range(SENT_AGAIN):
                if attempt.verdict is not Verdict.AGAIN:
                    break
                await self._send_again(attempt)
        for claiming in notes.claims.values():
            request = claiming.request
            if isinstance(request, StrayRequest):
                continue
            if claiming.run is None and request.orphans and request.holds:
                await self._scan_again(claiming)

    async def _scan_again(self, claiming: Claiming) -> None:
        await self.store.claim(claiming)
        if claiming.run is not None:
            claiming.later = True
            claiming.journal = await self.store.journal(claiming.run.run_id)

    async def _send_again(self, attempt: Attempt) -> None:
        try:
            if not self.split:
                await self.store.write(attempt)
                return
            actor = await self._ground.open_actor(self.texts)
            try:
                await actor.write(attempt)
                await actor.ask_write(attempt)
            finally:
                await self._ground.put_back_actor(actor)
        except RunnerDeclaredDead:
            attempt.verdict = None
            attempt.told.append("declared dead")

    async def _facts(self, notes: Notes) -> dict[str, Facts]:
        ids = {run.run_id for run in notes.held.values()}
        ids |= {start.run.run_id for start in notes.starts.values()}
        ids |= {sent.message.run_id for sent in notes.sendings.values()}
        ids |= {asking.run_id for asking in notes.askings.values()}
        ids |= {notes.key}
        runs = self.store.runs
        journals, mailboxes = await asyncio.gather(
            runs.read_journals(list(ids)), runs.read_mailboxes(list(ids))
        )
        now = max((mailbox.db_now for mailbox in mailboxes.values()), default=0.0)
        facts = {}
        for run_id in sorted(ids):
            record = await runs.read_run(run_id)
            if record is not None:
                facts[run_id] = Facts(record, journals[run_id], mailboxes.get(run_id), now)
        return facts

    async def _judge_history(self, report: Report) -> None:
        """The checkers over the whole history at once; each violation goes to its merge."""
        for what in check_history(await read_history(self._ground.url)):
            found = CASE_KEY.search(what) or SHARD.search(what)
            order = self._orders.get(int(found.group(1)), ()) if found else ()
            report.violations.append((order, f"history: {what}"))
        await self._ground.run_script(["delete from audit_history"])


class PostgresActors:
    """Where `PostgresActor`s come from; see `tests.harness.interleave.Sessions`."""

    sequential = False

    def __init__(self, ground: Ground, texts: Mapping[str, str]) -> None:
        self._ground, self._texts = ground, texts

    async def open(self) -> PostgresActor:
        return await self._ground.open_actor(self._texts)

    async def close(self, session: PostgresActor) -> None:
        await self._ground.put_back_actor(session)

    async def clean(self, session: PostgresActor) -> PostgresActor:
        await session.forget()
        return session if session.session.alive else await self.open()

    async def waiting(self, session: PostgresActor, since: float) -> bool:
        if not session.session.alive:
            return False
        pid = session.session.backend.pid
        return bool(await self._ground.watcher.fetchval(LOCK_WAIT, pid))


def _expected(script: str, error: BaseException) -> bool:
    """A runner may be told that it is dead; a ghost loses its connection."""
    return isinstance(error, RunnerDeclaredDead) or (script == "ghost" and isinstance(error, LOST))


def _class_of(notes: Notes, facts: Mapping[str, Facts]) -> str:
    """What everybody was told, and where the main run stands."""
    parts = [f"{key}: {', '.join(a.told)}" for key, a in notes.attempts.items() if a.told]
    parts += [
        f"{key}: {sent.status.value if sent.status else 'no answer'}"
        for key, sent in notes.sendings.items()
    ]
    parts += [
        f"{key}: {'born' if s.outcome.claimed else 'created' if s.outcome.created else 'found'}"
        for key, s in notes.starts.items()
        if s.outcome is not None
    ]
    parts += [f"{key}: {'yes' if a.answer else 'no'}" for key, a in notes.askings.items()]
    for key, claim in notes.claims.items():
        got = "nothing" if claim.run is None else f"after {claim.run.next_seq - 1}"
        parts.append(f"{key}: {'later ' if claim.later else ''}{got}")
    for key, words in notes.said.items():
        parts += [f"{key.strip()}: {words.replace(f'{notes.key}.', '')}"] if words else []
    record = facts[notes.key].record
    due = " due" if record.wake_at is not None else ""
    state = record.status.value + (" stray" if record.stray else due)
    return f"{'; '.join(sorted(parts))} → {state}"


def _difference(report: Report, wanted: Collection[str]) -> str:
    found: Sequence[str] = sorted(report.outcomes)
    missing = "".join(f"\n  never reached: {name}" for name in sorted(set(wanted) - set(found)))
    new = "".join(f"\n  not foreseen: {name}" for name in found if name not in wanted)
    return f"{report.title}: classes of outcome differ{missing}{new}"
