"""A session as the scripts see it.

`PostgresActor` sends the engine's own statements one by one, so that a transaction of somebody else can
come between any two of them, or (gated) between a statement's snapshot and its row locks.
`StoreActor` calls the methods of the seam, on any engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

import asyncpg

from perdure.storage import births
from perdure.storage.connect import Database
from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.interface import MAILBOX_BYTES, ClusterStore, RunStore
from perdure.storage.model import (
    Entry,
    Mailbox,
    Park,
    SendStatus,
    ShardHold,
    StrayRequest,
    Verdict,
)
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.session import Session
from perdure.storage.postgres.settlement import Settlement
from perdure.storage.verdicts import FenceSeen, judge
from tests.harness.waiting import until
from tests.interleaving.notes import Asking, Attempt, Claiming, Sending, Starting, fresh_id

LEASE = 3_600.0
MAILBOX_LIMIT = 1_000
JOURNAL_BYTES, JOURNAL_ENTRIES = 1 << 20, 1_000
AT_GATE = "select wait_event = 'PgSleep' from pg_stat_activity where pid = $1"

# Each statement with the place where it stops after its snapshot was taken and before any row lock,
# and what names it there.
ALIVE = "exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)"
GATES: Mapping[str, tuple[str, str]] = {
    "claim": (f"   where {ALIVE}\n   order", f"   where {ALIVE} and test_gate($1::bigint::text)\n   order"),
    "claim_strays": (
        f"where {ALIVE}\n           limit",
        f"where {ALIVE} and test_gate($1::bigint::text)\n           limit",
    ),
    "commit": (f"   where {ALIVE}\n), fl", f"   where {ALIVE} and test_gate($2::bigint::text)\n), fl"),
    "due_in_memory": (
        "where run_id = m.run_id offset 0) w\n), idle",
        "where run_id = m.run_id offset 0) w\n   where test_gate(m.run_id)\n), idle",
    ),
    "take_shards": (f"     and {ALIVE}", f"     and {ALIVE} and test_gate($1::bigint::text)"),
    "cancel_unentered": ("where run_id = $1 and claim_id", "where test_gate($1) and run_id = $1 and claim_id"),
}  # fmt: skip
GATE_KEYS = {
    "claim": 0,
    "claim_strays": 0,
    "commit": 1,
    "due_in_memory": 0,
    "take_shards": 0,
    "cancel_unentered": 0,
}
GATE_SCRIPT = (
    "create table test_gates (key text primary key)",
    """create function test_gate(wanted text) returns boolean language plpgsql volatile as $$
begin
  while not exists (select 1 from test_gates where key = wanted) loop perform pg_sleep(0.001); end loop;
  return true;
end $$""",
)


def changed(text: str, old: str, new: str, *, times: int = 1) -> str:
    """A statement with one passage replaced, which must be there so many times."""
    assert text.count(old) == times, f"{old!r} stands {text.count(old)} times in\n{text}"
    return text.replace(old, new)


def text_of(name: str) -> str:
    """The engine's statement of that name."""
    text = getattr(queries, name.upper())
    assert isinstance(text, str)
    return text


class Actor(Protocol):
    """What a script can do with its session. Answers go into the notes; refusals of the seam are raised."""

    async def write(self, attempt: Attempt) -> None: ...

    async def send(self, sending: Sending) -> None: ...

    async def start(self, starting: Starting) -> None: ...

    async def cancel(self, asking: Asking) -> None: ...

    async def hold_run(self, asking: Asking) -> None: ...

    async def release_hold(self, asking: Asking) -> None: ...

    async def claim(self, claiming: Claiming) -> None: ...

    async def journal(self, run_id: str) -> Sequence[Entry]: ...

    async def mailbox(self, run_id: str) -> Mailbox: ...

    async def due_in_memory(self, run_id: str, seen: int) -> bool: ...

    async def settle(self, attempt: Attempt, ghost: object) -> None: ...

    async def renew(self, runner_id: int) -> bool: ...

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool: ...

    async def take_shards(self, me: int, shard: int, dead: Sequence[int]) -> list[ShardHold]: ...

    async def release_shards(self, me: int, holds: Sequence[ShardHold]) -> None: ...


class StoreActor:
    """The methods of the seam as units, over connections of its own."""

    def __init__(self, database: Database) -> None:
        self.runs: RunStore = database.runs()
        self.cluster: ClusterStore = database.cluster()

    async def open(self) -> StoreActor:
        await self.runs.open()
        await self.cluster.open()
        return self

    async def close(self) -> None:
        await self.runs.close()
        await self.cluster.close()

    async def write(self, attempt: Attempt) -> None:
        write = attempt.write
        verdicts = await self.runs.commit_writes(attempt.runner_id, attempt.batch_id, [write])
        attempt.tell(verdicts[write.run_id])

    async def send(self, sending: Sending) -> None:
        sent = await self.runs.send_message(sending.message, mailbox_limit=MAILBOX_LIMIT)
        sending.status = sent.status

    async def start(self, starting: Starting) -> None:
        (starting.outcome,) = await self.runs.start_runs([starting.run])

    async def cancel(self, asking: Asking) -> None:
        asking.answer = await self.runs.cancel_unentered(
            asking.run_id, batch_id=asking.batch_id, reason="by hand"
        )

    async def hold_run(self, asking: Asking) -> None:
        asking.answer = await self.runs.hold_run(
            asking.run_id, batch_id=asking.batch_id, reason="by hand"
        )

    async def release_hold(self, asking: Asking) -> None:
        asking.answer = await self.runs.release_hold(asking.run_id, batch_id=asking.batch_id)

    async def claim(self, claiming: Claiming) -> None:
        request = claiming.request
        if isinstance(request, StrayRequest):
            claims = await self.runs.claim_strays(request)
        else:
            claims = await self.runs.claim_runs(request)
        claiming.run = claims.runs[0] if claims.runs else None

    async def journal(self, run_id: str) -> Sequence[Entry]:
        return (await self.runs.read_journals([run_id]))[run_id]

    async def mailbox(self, run_id: str) -> Mailbox:
        return (await self.runs.read_mailboxes([run_id]))[run_id]

    async def due_in_memory(self, run_id: str, seen: int) -> bool:
        return run_id in await self.runs.due_in_memory({run_id: seen})

    async def settle(self, attempt: Attempt, ghost: object) -> None:
        write = attempt.write
        verdicts = await self.runs.settle_writes(attempt.runner_id, attempt.batch_id, [write])
        attempt.tell(verdicts[write.run_id])

    async def renew(self, runner_id: int) -> bool:
        return (await self.cluster.renew(runner_id, LEASE)).alive

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        return await self.cluster.declare_dead(runner_id, renew_count)

    async def take_shards(self, me: int, shard: int, dead: Sequence[int]) -> list[ShardHold]:
        return list(await self.cluster.take_shards(me, [shard], dead))

    async def release_shards(self, me: int, holds: Sequence[ShardHold]) -> None:
        await self.cluster.release_shards(me, holds)


class PostgresActor:
    """The statements of PostgreSQL on one session with the engine's settings.

    What a store does in a second statement after the first is in ``ask_…``, an operation of its own.
    """

    def __init__(
        self, session: Session, texts: Mapping[str, str], watcher: asyncpg.Pool[asyncpg.Record]
    ) -> None:
        self.session = session
        self.texts = texts
        self._watcher = watcher
        self._gate: str | None = None
        self._gated: asyncio.Task[object] | None = None
        self._looking = False

    @property
    def connection(self) -> asyncpg.Connection[asyncpg.Record]:
        return self.session.connection

    async def _fetch(self, name: str, *args: object) -> list[asyncpg.Record]:
        text = self.texts.get(name) or text_of(name)
        if self._looking and name in GATES:
            text = changed(text, *GATES[name])
            key = args[GATE_KEYS[name]]
            self._gate = str(key[0] if isinstance(key, list) else key)
        return await self.connection.fetch(text, *args)

    async def begin(self) -> None:
        await self.connection.execute("begin")

    async def commit(self) -> None:
        await self.connection.execute("commit")

    async def forget(self, *, commit: bool = False) -> None:
        """End whatever is left of a merge."""
        if self._gated is not None:
            self._gated.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._gated
            self._gated = None
        if self.session.alive and self.connection.is_in_transaction():
            await self.connection.execute("commit" if commit else "rollback")

    # -- a statement in two halves: its snapshot, then its row locks
    async def look(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a statement and return when it has its snapshot and no lock yet (or is done)."""
        self._gate, self._looking = None, True
        task = self._gated = asyncio.ensure_future(work)
        try:

            async def at_gate() -> bool:
                pid = self.session.backend.pid
                return task.done() or bool(await self._watcher.fetchval(AT_GATE, pid))

            await until(at_gate, what="the statement has its snapshot", deadline=3.0)
        finally:
            self._looking = False

    async def lock(self) -> None:
        """Let it go on, and wait for its end."""
        task, self._gated = self._gated, None
        assert task is not None
        if self._gate is not None:
            sql = "insert into test_gates values ($1) on conflict do nothing"
            await self._watcher.execute(sql, self._gate)
        await task

    # -- runs
    async def write(self, attempt: Attempt) -> None:
        write = attempt.write
        arguments = columns.commit_columns(attempt.runner_id, attempt.batch_id, [write])
        rows = await self._fetch("commit", *arguments)
        if not rows[0]["alive"]:
            raise RunnerDeclaredDead(f"runner {attempt.runner_id}")
        attempt.verdict = None
        if rows[0]["missing"]:
            return
        parked = Verdict.PARK_REFUSED if rows[0]["refused"] else Verdict.PARKED
        attempt.tell(parked if isinstance(write.outcome, Park) else Verdict.COMMITTED)

    async def ask_write(self, attempt: Attempt) -> None:
        """The verdict on a write that was not applied."""
        if attempt.verdict is None:
            rows = await self._fetch("settle_rest", [attempt.write.run_id])
            attempt.tell(_judged(attempt, rows))

    async def send(self, sending: Sending) -> None:
        message = sending.message
        arguments = (message.kind.value, message.name, message.body, message.format)
        limits = (MAILBOX_LIMIT, MAILBOX_BYTES)
        (row,) = await self._fetch(
            "signal", message.run_id, message.message_id, *arguments, *limits
        )
        if row["stored"] is not None:
            sending.status = SendStatus.DELIVERED
        elif row["given"] is not None:
            full = not row["room"] and not row["known"]
            sending.status = SendStatus.FULL if full else SendStatus.DUPLICATE

    async def ask_send(self, sending: Sending) -> None:
        """There was no wake row: has the run ended?"""
        if sending.status is None:
            rows = await self._fetch("find_run", sending.message.run_id)
            ended = rows and rows[0]["status"] != "open"
            sending.status = SendStatus.ENDED if ended else SendStatus.UNKNOWN_RUN

    async def start(self, starting: Starting) -> None:
        run = starting.run
        rows = await self._fetch("start", *columns.start_columns([run]))
        if rows:
            starting.outcome = births.created(run, born_at=rows[0]["born_at"])

    async def ask_start(self, starting: Starting) -> None:
        """What already has the id."""
        if starting.outcome is None:
            run = starting.run
            (row,) = await self._fetch("find_runs", [run.run_id])
            starting.outcome = columns.start_found(run, row)

    async def cancel(self, asking: Asking) -> None:
        outside = not self.connection.is_in_transaction()
        async with self.connection.transaction() if outside else contextlib.nullcontext():
            await self._fetch("lock_unentered", asking.run_id)
            found = await self._fetch("cancel_unentered", asking.run_id, asking.batch_id, "by hand")
        asking.answer = bool(found)

    async def hold_run(self, asking: Asking) -> None:
        rows = await self._fetch("hold_run", asking.run_id, asking.batch_id, "by hand")
        asking.answer = bool(rows)

    async def release_hold(self, asking: Asking) -> None:
        asking.answer = bool(await self._fetch("release_hold", asking.run_id, asking.batch_id))

    async def ask_cancel(self, asking: Asking) -> None:
        """It did not end the run: or had it, when it was sent before?"""
        if not asking.answer:
            rows = await self._fetch("find_run", asking.run_id)
            cancelled = bool(rows) and rows[0]["status"] == "cancelled"
            asking.answer = cancelled and rows[0]["last_batch"] == asking.batch_id

    async def ask_hold(self, asking: Asking) -> None:
        if not asking.answer:
            rows = await self._fetch("settle_rest", [asking.run_id])
            asking.answer = bool(rows) and rows[0]["last_batch"] == asking.batch_id

    async def ask_release(self, asking: Asking) -> None:
        await self.ask_hold(asking)
        if not asking.answer:
            asking.answer = bool(await self._fetch("withdraw_suspend", asking.run_id))

    async def claim(self, claiming: Claiming) -> None:
        request = claiming.request
        ids = [fresh_id() for _ in range(request.limit)]
        if isinstance(request, StrayRequest):
            rows = await self._fetch("claim_strays", *columns.stray_columns(request, ids))
        else:
            rows = await self._fetch("claim", *columns.claim_columns(request, ids))
        if not rows[0]["alive"]:
            raise RunnerDeclaredDead(f"runner {request.runner_id}")
        taken = [columns.claimed_run(row) for row in rows if row["run_id"] is not None]
        claiming.run = taken[0] if taken else None

    async def journal(self, run_id: str) -> Sequence[Entry]:
        rows = await self._fetch("journal", [run_id], [0], JOURNAL_BYTES, JOURNAL_ENTRIES)
        return [columns.entry_of(row) for row in rows]

    async def mailbox(self, run_id: str) -> Mailbox:
        rows = await self._fetch("mailbox", [run_id])
        messages = [columns.message_of(row) for row in rows if row["message_id"] is not None]
        return Mailbox(rows[0]["wake_seq"], messages, rows[0]["db_now"])

    async def due_in_memory(self, run_id: str, seen: int) -> bool:
        return bool(await self._fetch("due_in_memory", [run_id], [seen]))

    # -- settlement: as a whole, and in its statements
    async def settle(self, attempt: Attempt, ghost: object) -> None:
        assert ghost is None or isinstance(ghost, PostgresActor)
        backend = None if ghost is None else ghost.session.backend
        settlement = Settlement(self.session, backend, deadline=5.0)
        verdicts = await settlement.verdicts(attempt.batch_id, [attempt.write])
        attempt.tell(verdicts[attempt.write.run_id])

    async def locked_fence(self, attempt: Attempt) -> FenceSeen | None:
        """The fence by a locking read that skips it while somebody has it locked."""
        rows = await self._fetch("settle", [attempt.write.run_id])
        return columns.fence_of(rows[0]) if rows else None

    async def waited_fence(self, attempt: Attempt) -> FenceSeen | None:
        """The same, waiting while somebody has it locked."""
        rows = await self._fetch("settle_one", attempt.write.run_id)
        return columns.fence_of(rows[0]) if rows else None

    async def plain_state(self, attempt: Attempt, locked: FenceSeen | None) -> Verdict | None:
        """The verdict now possible; None: somebody has the fence locked."""
        if locked is not None:
            return judge(attempt.write, attempt.batch_id, locked, None)
        rows = await self._fetch("settle_rest", [attempt.write.run_id])
        return None if rows and rows[0]["fenced"] else _judged(attempt, rows)

    async def end(self, ghost: PostgresActor) -> None:
        """End another session, and return when it is gone."""
        key = (ghost.session.backend.pid, ghost.session.backend.started, None)
        await self._fetch("end_ghost", *key)

        async def gone() -> bool:
            return not await self._fetch("find_ghost", *key)

        await until(gone, what="the old session is gone", deadline=5.0)

    # -- runners and shards
    async def renew(self, runner_id: int) -> bool:
        (row,) = await self._fetch("renew", runner_id, LEASE)
        return bool(row["alive"])

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        return bool(await self._fetch("declare_dead", runner_id, renew_count))

    # The lock's key is the runner's number: the statements take what they are given.
    async def hold_lock(self, runner_id: int) -> bool:
        (row,) = await self._fetch("hold_lock", runner_id)
        return bool(row["held"])

    async def let_lock_go(self, runner_id: int) -> None:
        """What the end of the session does."""
        await self.connection.execute("select pg_advisory_unlock($1)", runner_id)

    async def suspected(self, runner_id: int) -> int | None:
        """The renew_count of a runner whose lock is free; None: somebody holds it."""
        count = await self.connection.fetchval(
            "select renew_count from perdure_runners where runner_id = $1", runner_id
        )
        free = await self._fetch("free_locks", [runner_id], [runner_id])
        return int(count) if free else None

    async def declare_lost(self, runner_id: int, renew_count: int) -> bool:
        return bool(await self._fetch("declare_lost", runner_id, renew_count, runner_id))

    async def ask_dead(self, runner_id: int) -> bool:
        rows = await self._fetch("is_dead", runner_id)
        return bool(rows[0]["dead"])

    async def take_shards(self, me: int, shard: int, dead: Sequence[int]) -> list[ShardHold]:
        rows = await self._fetch("take_shards", me, [shard], list(dead))
        return [ShardHold(row["shard_id"], row["epoch"]) for row in rows]

    async def release_shards(self, me: int, holds: Sequence[ShardHold]) -> None:
        ids, epochs = [hold.shard_id for hold in holds], [hold.epoch for hold in holds]
        await self._fetch("release_shards", me, ids, epochs)


def _judged(attempt: Attempt, rows: Sequence[asyncpg.Record]) -> Verdict:
    """The verdict from the rows of `settle_rest`."""
    if not rows:
        return judge(attempt.write, attempt.batch_id, None, None)
    fence = columns.fence_of(rows[0]) if rows[0]["fenced"] else None
    return judge(attempt.write, attempt.batch_id, fence, rows[0]["run_batch"])
