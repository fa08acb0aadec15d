"""What a run costs the database, counted on the wire: which statements, and how many commits, each event takes.

Each write is one statement in autocommit, so a statement that writes is a commit. The runner talks through a proxy that
counts; the client, where it is not what is counted, does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure import Client, Context, step, workflow
from perdure.runtime.runner import Runner
from perdure.storage.model import EntryKind, RunStatus
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.in_process import (
    Definitions,
    Watched,
    client_on,
    port_and_name,
    runner_on,
    until_all,
    until_status,
)

UPKEEP = {"renew", "topology", "notify"}
CONNECTING = {"set", "select", "with", "about_session"}
"""Statements without a name of ours: settings and the driver's questions for types, once for each connection."""
RARE = 60.0  # seconds between scans where a scan is not what is counted


@step
async def double(number: int) -> int:
    return 2 * number


@workflow(name="steps")
async def steps(ctx: Context, count: int) -> int:
    total = 0
    for number in range(count):
        total += await ctx.step(double, number)
    return total


@workflow(name="rests")
async def rests(ctx: Context, after: int) -> str:
    for number in range(after):
        await ctx.step(double, number)
    await ctx.sleep(3600)
    return "woken"


@workflow(name="listens")
async def listens(ctx: Context, after: int) -> str:
    for number in range(after):
        await ctx.step(double, number)
    _waiting.append(ctx.run_id)
    return str(await ctx.wait_signal("go"))


_waiting: list[str] = []


async def until_durable(client: Client, run_id: str, *, entries: int) -> None:
    """Wait until a run that listens has all it did before in its journal."""

    async def look() -> bool:
        return len(await client.journal(run_id)) == entries

    await until(lambda: run_id in _waiting, what="the run waiting", deadline=20)
    await until(look, what=f"{entries} entries of {run_id}")


class Counts:
    """The statements of the runner since `begin`, by name, without those that go on whatever happens."""

    def __init__(self, proxy: PostgresProxy, *, without: set[str]) -> None:
        self._proxy, self._without = proxy, without
        self.begin()

    def begin(self) -> None:
        self._before = Counter(self._proxy.statements)

    @property
    def all(self) -> dict[str, int]:
        found = Counter(self._proxy.statements) - self._before
        return {name: n for name, n in found.items() if name not in CONNECTING}

    @property
    def seen(self) -> dict[str, int]:
        return {name: n for name, n in self.all.items() if name not in self._without}


@asynccontextmanager
async def counted(
    postgres: PrivatePostgres,
    url: str,
    definitions: Definitions = (steps, rests, listens),
    **settings: Any,
) -> AsyncIterator[tuple[Runner, Client, Counts]]:
    """A runner behind a proxy, whose first looks for runs are over, and a client beside it."""
    port, database = port_and_name(url)
    chosen = {"scan": RARE, "park_after": 0.1} | settings
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(database), definitions, **chosen) as runner,
        client_on(url, definitions) as client,
    ):
        sent = proxy.statements
        await until(lambda: sent["claim"] and sent["upcoming"], what="the first look for runs")
        engine = runner.session.engine
        await until(lambda: engine.births.open and not engine.looking, what="the look being over")
        yield runner, client, Counts(proxy, without=UPKEEP)


# ---- one run ----------------------------------------------------------------------------------


@pytest.mark.req("WF1", "CL4")
@pytest.mark.parametrize("count", [0, 1, 10])
async def test_a_run_costs_a_claim_and_a_commit_for_each_step(
    postgres: PrivatePostgres, migrated_postgres_url: str, count: int
):
    """The finish rides on the last step; a fresh run is entered without a read."""
    async with counted(postgres, migrated_postgres_url) as (_, client, counts):
        assert await client.run(steps, count, timeout=20) == count * (count - 1)
        assert counts.seen == {"claim": 1, "commit": max(1, count)}


@pytest.mark.req("WF1", "CL4")
async def test_a_start_in_the_runners_process_costs_one_commit_more(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    """And no claim, since it is born claimed, and no read of its end."""
    async with counted(postgres, migrated_postgres_url) as (runner, _, counts):
        assert await runner.client.run(steps, 1, timeout=20) == 0
        assert counts.seen == {"start": 1, "commit": 1}


@pytest.mark.req("SL1")
@pytest.mark.parametrize("after", [0, 3])
async def test_a_park_before_a_long_sleep_rides_on_the_last_step(
    postgres: PrivatePostgres, migrated_postgres_url: str, after: int
):
    async with counted(postgres, migrated_postgres_url) as (_, client, counts):
        handle = await client.start(rests, after)
        await until_status(client, handle.run_id, RunStatus.SUSPENDED)
        assert counts.seen == {"claim": 1, "commit": max(1, after)}


@pytest.mark.req("SL2", "WF5")
@pytest.mark.parametrize(
    ("after", "warm", "reads"),
    [(20, 1_000, ["mailbox"]), (0, 0, ["mailbox"]), (20, 0, ["journal", "mailbox"])],
    ids=["body in memory", "no journal", "replay"],
)
async def test_a_wake_costs_a_claim_and_what_the_run_does_then(
    postgres: PrivatePostgres,
    migrated_postgres_url: str,
    after: int,
    warm: int,
    reads: list[str],
):
    """A replay of its steps reads, and writes nothing; a body that is still in memory does not even read."""
    url = migrated_postgres_url
    async with counted(postgres, url, warm_runs=warm) as (_, client, counts):
        handle = await client.start(listens, after)
        await until_status(client, handle.run_id, RunStatus.SUSPENDED)
        assert counts.seen == {
            "claim": 1,
            "commit": after + 1,
        }  # a wait nobody can time parks later
        counts.begin()
        await handle.signal("go", "gone")
        assert await handle.wait(20) == "gone"
        assert counts.seen == {"claim": 1, "commit": 1} | dict.fromkeys(reads, 1)


@pytest.mark.req("SL2")
async def test_a_signal_to_a_run_in_memory_costs_a_read_and_a_commit(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    async with counted(postgres, migrated_postgres_url, park_after=RARE) as (_, client, counts):
        handle = await client.start(listens, 1)
        await until_durable(client, handle.run_id, entries=1)
        counts.begin()
        await handle.signal("go", "gone")
        assert await handle.wait(20) == "gone"
        assert counts.seen == {"mailbox": 1, "commit": 1}


@pytest.mark.req("WF5", "CL5")
async def test_taking_a_run_over_and_replaying_it_writes_no_more_than_its_claim(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    async with client_on(url, [listens]) as client:
        async with runner_on(url, [listens], park_after=RARE):
            handle = await client.start(listens, 20)
            await until_durable(client, handle.run_id, entries=20)
        _waiting.clear()
        watched = Watched(url)
        async with runner_on(url, [listens], park_after=RARE, database=watched):
            await until(lambda: handle.run_id in _waiting, what="the run waiting again")
            assert watched.batches == []
            await handle.signal("go", "gone")
            assert await handle.wait(20) == "gone"
        [batch] = watched.batches
        assert [entry.kind for entry in batch.writes[0].entries] == [EntryKind.SIGNAL]


# ---- many runs --------------------------------------------------------------------------------


@pytest.mark.req("WF1")
async def test_runs_in_flight_share_commits(postgres: PrivatePostgres, migrated_postgres_url: str):
    async with counted(postgres, migrated_postgres_url) as (runner, _, counts):
        handles = await asyncio.gather(*(runner.client.start(steps, 1) for _ in range(50)))
        await asyncio.gather(*(h.wait(20) for h in handles))
        one_step = counts.seen
        print(f"50 runs of one step: {one_step}")
        assert one_step["start"] == 1
        assert one_step["commit"] <= 10
        assert set(one_step) <= {"start", "commit", "read_results"}
        counts.begin()
        handles = await asyncio.gather(*(runner.client.start(steps, 10) for _ in range(50)))
        await asyncio.gather(*(h.wait(20) for h in handles))
        ten_steps = counts.seen
        print(f"50 runs of ten steps: {ten_steps}")
        assert ten_steps["commit"] <= 100  # for 500 steps


@pytest.mark.req("SL1")
async def test_runs_that_park_together_share_commits(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    async with counted(postgres, migrated_postgres_url) as (runner, client, counts):
        await asyncio.gather(*(runner.client.start(rests, 0) for _ in range(50)))
        await until_all(client, RunStatus.SUSPENDED, 50)
        print(f"50 parks: {counts.seen}")
        assert counts.seen.get("claim", 0) == 0, "they are born claimed"
        assert counts.seen["commit"] <= 10


# ---- idle -------------------------------------------------------------------------------------


@pytest.mark.req("CL1")
async def test_an_idle_runner_sends_only_renewals_looks_and_scans(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    """However many runs are parked."""
    lease, renewal, look, scan, parked = 4.0, 1.0, 0.25, 0.5, 50
    figures: Any = {"lease": lease, "renewal": renewal, "look": look, "scan": scan}
    async with counted(postgres, migrated_postgres_url, **figures) as (_, client, counts):
        await asyncio.gather(*(client.start(rests, 0) for _ in range(parked)))
        await until_all(client, RunStatus.SUSPENDED, parked)
        counts.begin()
        began = time.monotonic()
        await asyncio.sleep(3.0)  # the time itself is what is measured
        seconds = time.monotonic() - began
        seen = counts.all
        print(f"idle for {seconds:.1f} s with {parked} parked: {dict(seen)}")
        assert set(seen) <= {"renew", "topology", "claim", "claim_strays", "upcoming"}
        assert 1 <= seen["renew"] <= seconds / renewal + 1
        assert 1 <= seen["topology"] <= seconds / look + 1
        assert 1 <= seen["claim"] <= seconds / (0.8 * scan) + 1
        assert 1 <= seen["upcoming"] <= seconds / (0.8 * scan) + 1


@pytest.mark.req("SL1")
async def test_runs_waiting_in_memory_cost_one_look_a_scan(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    async with counted(postgres, migrated_postgres_url, park_after=RARE, scan=0.5) as found:
        _, client, counts = found
        _waiting.clear()
        handles = [await client.start(listens, 0) for _ in range(20)]
        await until(lambda: len(_waiting) == len(handles), what="all waiting")
        counts.begin()
        began = time.monotonic()
        await asyncio.sleep(2.0)  # the time itself is what is measured
        seconds = time.monotonic() - began
        seen = counts.seen
        assert set(seen) <= {"claim", "claim_strays", "upcoming", "due_in_memory"}
        assert 1 <= seen["due_in_memory"] <= seconds / (0.8 * 0.5) + 1


@pytest.mark.req("CL1")
async def test_an_idle_client_sends_nothing(postgres: PrivatePostgres, migrated_postgres_url: str):
    url = migrated_postgres_url
    port, database = port_and_name(url)
    async with PostgresProxy(port) as proxy, client_on(proxy.url(database), [listens]) as client:
        handle = await client.start(listens, 0)
        await until(lambda: proxy.statements["notify"] > 0, what="the hint of the start")
        counts = Counts(proxy, without=set())
        await asyncio.sleep(1.5)  # the time itself is what is measured
        assert counts.seen == {}
        with contextlib.suppress(TimeoutError):
            await handle.wait(2.0)
        assert set(counts.seen) == {"read_results"}  # one at once, then one a second
        assert counts.seen["read_results"] <= 4
