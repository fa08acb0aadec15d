"""Parked runs whose bodies are still in memory: woken without a replay, and only while nobody else wrote (R1, R7)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from perdure import App, Client, Context, Retry, Settings, step, workflow
from perdure.runtime.engine.activation import Rest
from perdure.runtime.runner import Runner
from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.interface import RunStore
from perdure.storage.model import RunStatus
from tests.harness.waiting import until
from tests.integration.in_process import (
    Definitions,
    Watched,
    client_on,
    execute,
    runner_on,
    until_status,
)

pytestmark = pytest.mark.req("SL1", "WF5", "CL4")

SOON = 0.05
"""park_after: shorter than every wait here, so that each of them parks."""

entered: list[str] = []
unwound: list[str] = []
executed: list[int] = []


@step
async def double(number: int) -> int:
    executed.append(number)
    return 2 * number


@workflow(name="naps")
async def naps(ctx: Context, count: int) -> int:
    entered.append(ctx.run_id)
    total = 0
    for number in range(count):
        total += await ctx.step(double, number)
        await ctx.sleep(2 * SOON)
    return total


@workflow(name="hears")
async def hears(ctx: Context, count: int) -> list[int]:
    entered.append(ctx.run_id)
    heard = []
    try:
        for number in range(count):
            await ctx.step(double, number)
            heard.append(await ctx.wait_signal("go", int))
    finally:
        unwound.append(ctx.run_id)
    return heard


@workflow(name="recalls")
async def recalls(ctx: Context) -> int:
    doubled = await ctx.step(double, 7)
    await ctx.wait_signal("go")
    return doubled


@step(retry=Retry(max_attempts=3, base_delay=4 * SOON, jitter=False))
async def third_time(number: int) -> int:
    executed.append(number)
    if len(executed) < 3:
        raise ValueError(number)
    return number


@workflow(name="insists")
async def insists(ctx: Context) -> int:
    entered.append(ctx.run_id)
    return await ctx.step(third_time, 7)


WORKFLOWS: Definitions = [naps, hears, recalls, insists]


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    for notes in (entered, unwound, executed):
        notes.clear()


class Counted(Watched):
    """Also counts the journals read: what a replay begins with."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.journals: list[str] = []

    def runs(self) -> RunStore:
        store = super().runs()
        read = store.read_journal_page

        async def read_journal_page(after, **limits):
            self.journals += after
            return await read(after, **limits)

        store.read_journal_page = read_journal_page  # type: ignore[method-assign]
        return store


@asynccontextmanager
async def counting(
    url: str, *, database: Counted | None = None, **settings: Any
) -> AsyncIterator[tuple[Runner, Client, Counted]]:
    database = database or Counted(url)
    chosen = {"park_after": SOON} | settings
    async with (
        runner_on(url, WORKFLOWS, database=database, **chosen) as runner,
        client_on(url, WORKFLOWS) as client,
    ):
        yield runner, client, database


def holds(runner: Runner) -> set[int]:
    return set(runner.session.ownership.holds)


def warm(runner: Runner) -> int:
    return runner.session.engine.warm


async def until_warm(runner: Runner, count: int = 1) -> None:
    await until(lambda: warm(runner) == count, what=f"{count} warm runs")


async def test_a_loop_of_sleeps_is_never_replayed(migrated_postgres_url: str) -> None:
    async with counting(migrated_postgres_url) as (runner, client, database):
        handles = [await client.start(naps, 6) for _ in range(3)]
        assert [await handle.wait(20) for handle in handles] == [30, 30, 30]
        claims = sum(len(runs) for runs in database.claims)
        assert claims == 3 * 7, "every sleep was a park and a claim"
        assert database.journals == []
        assert len(entered) == 3
        assert len(executed) == 18
        assert warm(runner) == 0


async def test_signals_wake_without_a_replay_and_none_is_lost(migrated_postgres_url: str) -> None:
    async with counting(migrated_postgres_url) as (runner, client, database):
        handle = await client.start(hears, 4)
        for number in range(4):
            await until_warm(runner)
            await handle.signal("go", number)
            if number < 3:
                await until(partial(executed.__contains__, number + 1), what="the next step")
        assert await handle.wait(20) == [0, 1, 2, 3]
        assert (database.journals, len(entered)) == ([], 1)


async def test_what_was_committed_with_the_park_holds_no_step_back(
    migrated_postgres_url: str,
) -> None:
    """A failed attempt and the park that its back-off leads to are one write; the next attempt waits for both."""
    async with counting(migrated_postgres_url) as (_, client, database):
        assert await (await client.start(insists)).wait(20) == 7
        assert (executed, len(entered), database.journals) == ([7, 7, 7], 1, [])


async def test_what_another_runner_has_had_meanwhile_is_replayed(
    migrated_postgres_url: str,
) -> None:
    url = migrated_postgres_url
    figures: Any = {"lease": 4.0, "renewal": 1.0, "park_after": SOON}
    async with counting(url, **figures) as (runner, client, database):
        handles = [await client.start(hears, 3) for _ in range(8)]
        await until_warm(runner, 8)

        async def next_signal(number: int) -> None:
            await asyncio.gather(*(handle.signal("go", number) for handle in handles))
            await until(lambda: len(executed) == 8 * (number + 2), what="the steps after it")
            for handle in handles:
                await until_status(client, handle.run_id, RunStatus.SUSPENDED)

        second = Runner(
            App("tests", workflows=WORKFLOWS),
            Settings(db=url, runner_storage="sql", replica_id="second", **figures),
            port=False,
        )
        await second.start()
        try:
            await until(
                lambda: len(runner.session.ownership.holds) == 128, what="half of them moved"
            )
            stayed = {
                h.run_id for h in handles if shard_of(slot_of(h.run_id), 256) in holds(runner)
            }
            await until_warm(runner, len(stayed))
            await next_signal(0)
            assert database.journals == []
            assert warm(second) == 8 - len(stayed)
        finally:
            await second.stop()
        await until(lambda: len(runner.session.ownership.holds) == 256, what="all shards again")
        await next_signal(1)
        assert set(database.journals) == {h.run_id for h in handles} - stayed
        await asyncio.gather(*(handle.signal("go", 2) for handle in handles))
        assert [await handle.wait(20) for handle in handles] == [[0, 1, 2]] * 8
        assert len(executed) == 8 * 3, "what was recorded was not executed again"


class SlowMail(Counted):
    """Mailboxes are read, and the answers kept back until they are let go."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.let_go = asyncio.Event()
        self.reading: list[str] = []

    def runs(self) -> RunStore:
        store = super().runs()
        read = store.read_mailboxes

        async def read_mailboxes(run_ids):
            mailboxes = await read(run_ids)
            self.reading += run_ids
            await self.let_go.wait()
            return mailboxes

        store.read_mailboxes = read_mailboxes  # type: ignore[method-assign]
        return store


async def test_a_clock_that_is_set_while_a_waking_runs_mail_is_read_parks_nothing(
    migrated_url: str,
) -> None:
    """A park there would say that the run has seen the very message that woke it: nobody would look again."""
    database = SlowMail(migrated_url)
    async with counting(migrated_url, database=database) as (runner, client, _):
        handle = await client.start(hears, 1)
        await until_warm(runner)
        await handle.signal("go", 7)
        await until(lambda: handle.run_id in database.reading, what="its mail being read")
        sent = len(database.batches)
        runner.session.engine._clock_moved(3.0)
        for _ in range(5):
            await asyncio.sleep(0)
        database.let_go.set()
        assert await handle.wait(20) == [7]
        assert len(database.batches) == sent + 1, "its end, and nothing before that"
        assert len(entered) == 1


OTHER_HISTORIES = {
    # As after a fail-over that lost commits: another history has come to the same revision and length.
    "the same revision": "last_batch = 1",
    "two writes later": "last_batch = 1, revision = revision + 2",
    "an operator's resume": "revision = revision + 1",
}


async def go_on_after(url: str, change: str) -> list[int]:
    """What the journal and the result say of a run whose rows are changed while it rests."""
    async with counting(url) as (runner, client, _):
        handle = await client.start(recalls)
        await until_warm(runner)
        await execute(url, f"update perdure_fences set {change} where run_id = $1", handle.run_id)
        await execute(url, "update perdure_steps set output = '100'")
        await handle.signal("go")
        return [await handle.wait(20), warm(runner)]


@pytest.mark.parametrize("change", OTHER_HISTORIES.values(), ids=OTHER_HISTORIES)
async def test_whoever_wrote_meanwhile_is_believed(migrated_postgres_url: str, change: str) -> None:
    assert await go_on_after(migrated_postgres_url, change) == [100, 0]


async def test_a_wake_that_does_not_look_would_be_noticed(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plant: any body that is still there goes on."""
    monkeypatch.setattr(Rest, "goes_on", lambda self, claimed: True)
    assert await go_on_after(migrated_postgres_url, OTHER_HISTORIES["the same revision"]) == [14, 0]


async def test_the_oldest_leave_first_and_are_unwound(migrated_postgres_url: str) -> None:
    async with counting(migrated_postgres_url, warm_runs=2) as (runner, client, database):
        handles = []
        for _ in range(4):
            handles.append(await client.start(hears, 1))
            await until_status(client, handles[-1].run_id, RunStatus.SUSPENDED)
        assert warm(runner) == 2
        assert unwound == [handle.run_id for handle in handles[:2]]
        for handle in handles:
            await handle.signal("go", 7)
            assert await handle.wait(20) == [7]
        assert database.journals == [handle.run_id for handle in handles[:2]]


@pytest.mark.parametrize("limit", [{"warm_runs": 0}, {"warm_bytes": 0}], ids=["runs", "bytes"])
async def test_none_is_kept_where_none_may_be(migrated_postgres_url: str, limit: Any) -> None:
    async with counting(migrated_postgres_url, **limit) as (runner, client, _):
        handle = await client.start(naps, 2)
        assert await handle.wait(20) == 2
        assert warm(runner) == 0
        assert len(entered) == 3


async def test_a_runner_that_ends_unwinds_what_it_kept(migrated_postgres_url: str) -> None:
    async with counting(migrated_postgres_url) as (runner, client, _):
        handle = await client.start(hears, 1)
        await until_warm(runner)
        held = runner.session.engine._warm._runs[handle.run_id][1].body
        assert held is not None
        assert held.idle() is not None
        assert unwound == []
        await runner.drain()
        assert unwound == [handle.run_id]
        assert held.idle() is None


async def test_what_a_foreign_thread_does_to_a_frozen_body_harms_nobody(
    migrated_postgres_url: str,
) -> None:
    async with counting(migrated_postgres_url) as (runner, client, database):
        handle = await client.start(hears, 1)
        await until_warm(runner)
        body = runner.session.engine._warm._runs[handle.run_id][1].body
        assert body is not None
        with pytest.raises(Exception, match="thread wakes its workflow body"):
            await asyncio.to_thread(body._loop.call_soon_threadsafe, print)
        await until(lambda: unwound == [handle.run_id], what="the body given up")
        await handle.signal("go", 3)
        assert await handle.wait(20) == [3]
        assert (database.journals, len(entered)) == ([handle.run_id], 2)


@pytest.mark.req("SL7")
async def test_a_warm_run_that_is_suspended_runs_nothing_until_it_is_resumed(
    migrated_postgres_url: str,
) -> None:
    async with counting(migrated_postgres_url) as (runner, client, _):
        handle = await client.start(hears, 2)
        await until_warm(runner)
        await client.suspend(handle.run_id)
        await handle.signal("go", 1)
        await client.resume(handle.run_id)
        await until(lambda: len(executed) == 2, what="the step after the signal")
        await until_warm(runner)
        assert unwound == [handle.run_id], "the body of before the hold"
        await handle.signal("go", 2)
        assert await handle.wait(20) == [1, 2]
        assert len(entered) == 2
