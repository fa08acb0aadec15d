"""A small cluster made of storage calls alone: runners without processes, runs without bodies."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg

from perdure.storage.clock import SeededRandomness, SystemClock
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.interface import ClusterStore, RunnerIdentity, RunStore
from perdure.storage.model import (
    SLOTS,
    ClaimedRun,
    ClaimRequest,
    Claims,
    Entry,
    EntryKind,
    Finish,
    Message,
    MessageKind,
    NewRun,
    Park,
    Reason,
    RunRecord,
    RunStatus,
    RunWrite,
    SendOutcome,
    SendStatus,
    ShardHold,
    StartOutcome,
    StrayRequest,
    Verdict,
)
from perdure.storage.sqlite import SqliteDatabase
from tests.harness.waiting import until

SHARDS = 4
WORKFLOW = "tests.flow"
LIMIT = 10_000
SEEDS = itertools.count(1)


@dataclass
class Runner:
    """A runner that exists in its tables only. Its lease is over at once unless a test says otherwise."""

    world: World
    runner_id: int
    holds: list[ShardHold] = field(default_factory=list)

    async def take(self, shard_ids: Iterable[int], dead: Sequence[int] = ()) -> Sequence[ShardHold]:
        taken = await self.world.cluster.take_shards(self.runner_id, list(shard_ids), list(dead))
        self.holds += taken
        return taken

    def request(self, **changes: Any) -> ClaimRequest:
        plain = ClaimRequest(
            runner_id=self.runner_id,
            holds=self.holds,
            workflows=[WORKFLOW],
            in_memory=[],
            limit=1_000,
            per_shard=1_000,
        )
        return replace(plain, **changes)

    async def claims(self, **changes: Any) -> Claims:
        return await self.world.runs.claim_runs(self.request(**changes))

    async def claim(self, **changes: Any) -> dict[str, ClaimedRun]:
        """What was claimed, by run id."""
        return {run.run_id: run for run in (await self.claims(**changes)).runs}

    async def claim_one(self, run_id: str, **changes: Any) -> ClaimedRun:
        """Claim what there is and return that run of it."""
        return (await self.claim(**changes))[run_id]

    def stray_request(self, **changes: Any) -> StrayRequest:
        return replace(StrayRequest(self.runner_id, [WORKFLOW], [], limit=1_000), **changes)

    async def lend_claims(self, **changes: Any) -> Claims:
        return await self.world.runs.claim_strays(self.stray_request(**changes))

    async def lend_claim(self, **changes: Any) -> dict[str, ClaimedRun]:
        """The strays that were claimed, by run id."""
        return {run.run_id: run for run in (await self.lend_claims(**changes)).runs}

    async def commit(self, *writes: RunWrite, batch_id: int | None = None) -> Mapping[str, Verdict]:
        return await self.world.runs.commit_writes(
            self.runner_id, batch_id or self.world.fresh_id(), writes
        )

    async def settle(self, *writes: RunWrite, batch_id: int) -> Mapping[str, Verdict]:
        return await self.world.runs.settle_writes(self.runner_id, batch_id, writes)

    async def park(
        self,
        run: ClaimedRun,
        *,
        wake_at: float | None = None,
        seen: int = 0,
        reason: Reason = Reason.TIMER,
    ) -> Verdict:
        return await self.park_as(write(run), wake_at=wake_at, seen=seen, reason=reason)

    async def park_as(
        self,
        parked: RunWrite,
        *,
        wake_at: float | None = None,
        seen: int = 0,
        reason: Reason = Reason.TIMER,
    ) -> Verdict:
        """Park by a write of one's own making."""
        outcome = Park(wake_at=wake_at, seen=seen, reason=reason)
        return (await self.commit(replace(parked, outcome=outcome)))[parked.run_id]

    async def finish(self, run: ClaimedRun, result: str | None = "null") -> Verdict:
        outcome = Finish(RunStatus.SUCCEEDED, result=result)
        return (await self.commit(write(run, outcome=outcome)))[run.run_id]


class World:
    """The stores of one process on one database."""

    def __init__(self, url: str) -> None:
        self.settings = DatabaseSettings(url, pool=3)
        self.database: Database = connect(self.settings, clock=SystemClock())
        self.runs: RunStore = self.database.runs()
        self.cluster: ClusterStore = self.database.cluster()
        self._random = SeededRandomness(next(SEEDS))

    async def open(self, *, shard_count: int | None = SHARDS) -> World:
        await self.runs.open()
        await self.cluster.open()
        if shard_count is not None:
            await self.cluster.agree(shard_count=shard_count, lock_mode="row")
        return self

    async def close(self) -> None:
        await self.runs.close()
        await self.cluster.close()

    async def execute(self, sql: str) -> None:
        """What no store would ever do: a restored backup, a row written by hand. Plain SQL for every engine."""
        if isinstance(self.database, SqliteDatabase):
            await self.database.writer.write(lambda tx: tx.select(sql, {}))
            return
        connection = await asyncpg.connect(self.settings.url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    async def age_due_times(self, seconds: int) -> None:
        """As if whatever is due had been due for longer."""
        await self._age("wake_at", seconds)

    async def age_strays(self, seconds: int) -> None:
        """As if nobody had taken any stray for longer."""
        await self._age("stray_since", seconds)

    async def _age(self, column: str, seconds: int) -> None:
        sqlite = isinstance(self.database, SqliteDatabase)
        age = f"{seconds * 1_000_000}" if sqlite else f"interval '{seconds} s'"
        await self.execute(f"update perdure_wakes set {column} = {column} - {age}")

    def fresh_id(self) -> int:
        return self._random.bits63()

    async def now(self) -> float:
        return await self.runs.server_now()

    async def runner(
        self, shard_ids: Iterable[int] | None = None, *, lease: float = 0.0, replica: str = "pod"
    ) -> Runner:
        """A registered runner that has taken these shards (all that are free unless said otherwise)."""
        runner = Runner(self, self.fresh_id())
        me = RunnerIdentity(runner.runner_id, replica, "127.0.0.1:1", [WORKFLOW], {})
        await self.cluster.register(me, lease)
        topology = await self.cluster.read_topology()
        await runner.take(range(len(topology.shards)) if shard_ids is None else shard_ids)
        return runner

    async def kill(self, runner: Runner) -> None:
        """Declare a runner dead whose lease is over."""

        async def declared() -> bool:
            renewals = {
                row.runner_id: row.renew_count
                for row in (await self.cluster.read_topology()).runners
            }
            return await self.cluster.declare_dead(runner.runner_id, renewals[runner.runner_id])

        await until(declared, what=f"runner {runner.runner_id} declared dead", deadline=5.0)

    def new_run(self, run_id: str, **changes: Any) -> NewRun:
        plain = NewRun(
            run_id=run_id,
            slot=zlib.crc32(run_id.encode("utf-8", "surrogatepass")) % SLOTS,
            workflow=WORKFLOW,
            start_token=self.fresh_id(),
            payload="{}",
            seed=self.fresh_id(),
        )
        return replace(plain, **changes)

    async def start(self, *run_ids: str, **changes: Any) -> Sequence[StartOutcome]:
        return await self.runs.start_runs([self.new_run(run_id, **changes) for run_id in run_ids])

    async def send(
        self,
        run_id: str,
        message_id: str = "m1",
        *,
        kind: MessageKind = MessageKind.SIGNAL,
        name: str = "go",
        body: str | None = "1",
        limit: int = LIMIT,
    ) -> SendOutcome:
        message = Message(run_id, message_id, kind, name=name, body=body)
        return await self.runs.send_message(message, mailbox_limit=limit)

    async def deliver(self, run_id: str, *message_ids: str) -> None:
        """Send messages that must arrive."""
        for message_id in message_ids:
            assert (await self.send(run_id, message_id)).status is SendStatus.DELIVERED

    async def record(self, run_id: str) -> RunRecord:
        """The run, which must exist."""
        record = await self.runs.read_run(run_id)
        assert record is not None, f"no run {run_id!r}"
        return record

    async def mailbox(self, run_id: str) -> list[str]:
        """Ids of the unread messages in their order."""
        mailboxes = await self.runs.read_mailboxes([run_id])
        return [message.message_id for message in mailboxes[run_id].messages]

    async def wake_seq(self, run_id: str) -> int:
        return (await self.runs.read_mailboxes([run_id]))[run_id].wake_seq

    async def journal(self, run_id: str) -> Sequence[Entry]:
        return (await self.runs.read_journals([run_id]))[run_id]


def write(run: ClaimedRun, *, revision: int | None = None, **changes: Any) -> RunWrite:
    """A write of a run as it was claimed; ``revision`` once it has committed since."""
    return RunWrite(
        run.run_id, run.claim_id, run.revision if revision is None else revision, **changes
    )


def entry(seq: int, key: str = "a", **changes: Any) -> Entry:
    plain = Entry(
        seq=seq, kind=EntryKind.STEP, key=f"/{key}#{seq}", at=1_700_000_000.000001, output="1"
    )
    return replace(plain, **changes)


async def both(first: Any, second: Any) -> tuple[Any, Any]:
    """Two awaitables at the same time."""
    one, two = await asyncio.gather(first, second)
    return one, two
