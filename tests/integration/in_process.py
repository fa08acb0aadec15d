"""Runners in the test's own process, on a real database, with a look at what their stores were asked and answered."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url

from perdure import App, Client
from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.interface import ClusterStore, HintChannel, RunStore
from perdure.storage.model import ClaimedRun, RunStatus, RunWrite, Verdict
from tests.harness.waiting import until

SHARDS = 256
SETTINGS: dict[str, Any] = {"runner_storage": "sql"}
"""Of every runner that `runner_on` makes, unless it is told otherwise."""
Definitions = Sequence[WorkflowDefinition[Any, Any]]

_numbers = itertools.count(1)


@dataclass
class Batch:
    """One call of the committer's store. verdicts: empty where it raised ``error``."""

    writes: list[RunWrite]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def run_ids(self) -> set[str]:
        return {write.run_id for write in self.writes}


class Watched:
    """A database whose stores keep what was claimed and committed through them; nothing is changed on its way."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._database: Database = connect(DatabaseSettings(url, **settings), clock=SystemClock())
        self.batches: list[Batch] = []
        self.claims: list[list[ClaimedRun]] = []

    def runs(self) -> RunStore:
        store = self._database.runs()
        commit, claim = store.commit_writes, store.claim_runs

        async def commit_writes(runner_id, batch_id, writes):
            batch = Batch(list(writes))
            self.batches.append(batch)
            try:
                batch.verdicts = dict(await commit(runner_id, batch_id, writes))
            except BaseException as error:
                batch.error = error
                raise
            return batch.verdicts

        async def claim_runs(request):
            claims = await claim(request)
            self.claims.append(list(claims.runs))
            return claims

        store.commit_writes = commit_writes  # type: ignore[method-assign]
        store.claim_runs = claim_runs  # type: ignore[method-assign]
        return store

    def cluster(self) -> ClusterStore:
        return self._database.cluster()

    def keeper(self) -> ClusterStore:
        return self._database.keeper()

    def hints(self) -> HintChannel:
        return self._database.hints()

    def verdicts(self, verdict: Verdict) -> int:
        """How often a write ended so."""
        return sum(list(batch.verdicts.values()).count(verdict) for batch in self.batches)


@asynccontextmanager
async def runner_on(
    url: str, workflows: Definitions, *, database: Database | None = None, **settings: Any
) -> AsyncIterator[Runner]:
    """A runner with a name of its own that holds all shards (of one cluster of one). settings: of `Settings`."""
    named = SETTINGS | {"replica_id": f"in-process-{next(_numbers)}"} | settings
    runner = Runner(
        App("tests", workflows=workflows), Settings(db=url, **named), port=False, database=database
    )
    await runner.start()
    try:
        await holds_all(runner)
        yield runner
    finally:
        await runner.stop()


async def holds_all(runner: Runner) -> None:
    await until(
        lambda: len(runner.session.ownership.holds) == SHARDS,
        what="all shards in the hands of this runner",
        deadline=20,
    )


@asynccontextmanager
async def client_on(
    url: str, workflows: Definitions = (), **settings: Any
) -> AsyncIterator[Client]:
    async with Client(Settings(db=url, **settings), workflows=workflows) as client:
        yield client


async def status_of(client: Client, run_id: str) -> RunStatus:
    info = await client.get(run_id)
    assert info is not None, f"there is no run {run_id}"
    return info.status


async def until_status(
    client: Client, run_id: str, status: RunStatus, *, deadline: float = 20.0
) -> None:
    async def look() -> bool:
        return await status_of(client, run_id) is status

    await until(look, what=f"{run_id} being {status}", deadline=deadline)


async def until_all(
    client: Client, status: RunStatus, count: int, *, deadline: float = 30.0
) -> None:
    """Wait until so many runs that have not ended are in this status."""

    async def look() -> bool:
        return len(await client.list(status=status, limit=count + 1)) >= count

    await until(look, what=f"{count} runs {status}", deadline=deadline, interval=0.05)


async def rows_of(url: str, query: str, *args: object) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(query, *args))
    finally:
        await connection.close()


async def execute(url: str, statement: str, *args: object) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement, *args)
    finally:
        await connection.close()


@asynccontextmanager
async def rows_held(url: str, run_id: str, *tables: str) -> AsyncIterator[None]:
    """Somebody else's transaction that has locked the run's rows in these tables and does nothing more."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("begin")
        for table in tables:
            await connection.fetch(
                f"select 1 from perdure_{table} where run_id = $1 for update", run_id
            )
        yield
    finally:
        with contextlib.suppress(Exception):
            await connection.execute("rollback")
        connection.terminate()


def port_and_name(url: str) -> tuple[int, str]:
    """Port and database of a URL of the private server, for a proxy before it."""
    parsed = make_url(url)
    assert parsed.port is not None
    return parsed.port, str(parsed.database)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def within(
    measure: Callable[[], Awaitable[Sequence[float]]],
    what: str,
    *,
    p50: float = math.inf,
    p99: float = math.inf,
    rounds: int = 3,
    also: Callable[[], bool] = lambda: True,
) -> None:
    """Measure until one round is within both limits, in seconds: other work of the machine may spoil some of them.

    also: what has to be so of the same round. Fails with the figures of all rounds when none is as it should be.
    """
    figures = []
    for _ in range(rounds):
        found = await measure()
        figures.append(milliseconds(found))
        print(f"{what}: {figures[-1]}")
        if percentile(found, 0.5) <= p50 and percentile(found, 0.99) <= p99 and also():
            return
    raise AssertionError(f"{what}: not within p50 {p50:g} s and p99 {p99:g} s: {figures}")


def milliseconds(values: Sequence[float]) -> str:
    """p50, p99 and most, for people who read a test's output."""
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    return f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, most {max(values) * 1e3:.1f} ms ({len(values)})"
