"""The database goes away under a client, and under a runner that has to begin anew just then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from perdure import App, Context, Runner, Settings, step, workflow
from perdure.runtime.engine.engine import Engine
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, upkeep
from perdure.storage.errors import (
    DatabaseUnavailable,
    DisagreementError,
    InUseError,
    UnknownOutcome,
)
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.in_process import (
    SHARDS,
    client_on,
    execute,
    port_and_name,
    rows_of,
    runner_on,
)


@workflow(name="echo")
async def echo(ctx: Context, number: int) -> int:
    return number


@workflow(name="listens")
async def listens(ctx: Context, number: int) -> int:
    return int(await ctx.wait_signal("go", int))


async def refused(what: str, call: Callable[[], Awaitable[object]]) -> None:
    """It says so within twice the deadline of a statement, and names the server."""
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1") as caught:
        await call()
    took = time.monotonic() - began
    print(f"{what}: after {took:.2f} s: {caught.value}")
    assert took < 5.0


@pytest.mark.req("CL11")
async def test_a_client_says_that_the_database_is_away_and_goes_on_when_it_is_back(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        runner_on(url, [echo, listens]) as runner,
        PostgresProxy(port) as proxy,
        client_on(proxy.url(name), [echo, listens], storage_deadline=1.0) as client,
    ):
        assert await client.run(echo, 1, timeout=20) == 1
        handle = await client.start(listens, 1)
        waiting = asyncio.create_task(handle.wait(60))
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: client.get(handle.run_id),
            "list": client.list,
            "journal": lambda: client.journal(handle.run_id),
            "why": lambda: client.why(handle.run_id),
            "cluster": client.cluster,
            "start": lambda: client.start(echo, 2),
            "signal": lambda: handle.signal("go", 1),
            "cancel": handle.cancel,
            "resume": lambda: client.resume(handle.run_id),
        }
        async with proxy.refusing():
            await asyncio.gather(*(refused(what, call) for what, call in calls.items()))
            assert not waiting.done()
        await client.signal(handle.run_id, "go", 7)
        assert await waiting == 7
        assert await client.run(echo, 3, timeout=20) == 3
        assert len((await client.cluster()).runners) == 1
        assert await runner.client.get(handle.run_id) is not None


@pytest.mark.req("CL11")
async def test_a_signal_whose_answer_is_lost_is_never_said_to_be_not_written(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        client_on(proxy.url(name), [listens], storage_deadline=1.0) as client,
    ):
        handle = await client.start(listens, 1)
        lost = proxy.cut(name="signal", where="after_commit")
        sending = asyncio.create_task(client.signal(handle.run_id, "go", 1, id="once"))
        await lost.happened.wait()
        async with proxy.refusing():
            with pytest.raises(UnknownOutcome):
                await sending
        async with client_on(url, [listens]) as other:
            info = await other.get(handle.run_id)
            assert info is not None
            assert info.record.unread == 1


@pytest.mark.req("CL11")
async def test_a_runner_declared_dead_while_nobody_can_connect_begins_anew_when_they_can(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(name), [echo], lease=1.0) as runner,
        client_on(url, [echo]) as client,
    ):
        before = runner.session.runner_id
        closed = asyncio.create_task(runner.closed())
        async with proxy.refusing(cut=False):
            await execute(url, "update perdure_runners set dead = true")
            await until(lambda: not runner.session.ownership.holds, what="no shards held any more")
            attempts = asyncio.create_task(asyncio.sleep(1.0))  # a few tries to register again fail
            await asyncio.wait([closed, attempts], return_when=asyncio.FIRST_COMPLETED)
            assert not closed.done(), closed.exception()
        assert await client.run(echo, 5, timeout=30) == 5
        assert runner.session.runner_id != before
        closed.cancel()


@pytest.mark.req("CL11")
@pytest.mark.parametrize("fault", ["cut", "hang"])
async def test_a_runner_begins_anew_when_the_database_goes_away_as_it_looks_for_a_pooler(
    migrated_postgres_url: str, fault: str
):
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(name), [echo], lease=1.0, storage_deadline=1.0) as runner,
        client_on(url, [echo]) as client,
    ):
        closed = asyncio.create_task(runner.closed())
        arm = proxy.cut if fault == "cut" else proxy.hang
        rule = arm(predicate=lambda sql: "set_config('perdure.probe'" in sql)
        await execute(url, "update perdure_runners set dead = true")
        await asyncio.wait_for(rule.happened.wait(), 10)
        assert await client.run(echo, 5, timeout=10) == 5
        assert not closed.done()
        closed.cancel()


@pytest.mark.req("CL11")
async def test_a_runner_whose_new_keeper_fails_once_soon_begins_anew(migrated_postgres_url: str):
    """The keeper that failed wants no connection any more: nothing waits for it."""
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(name), [echo], lease=1.0) as runner,
        client_on(url, [echo]) as client,
    ):
        rule = proxy.cut(name="register")
        await execute(url, "update perdure_runners set dead = true")
        await asyncio.wait_for(rule.happened.wait(), 10)
        assert await client.run(echo, 5, timeout=5) == 5
        assert runner.session.ownership.holds


async def resharded(url: str) -> None:
    store = upkeep(DatabaseSettings(url), clock=SystemClock())
    await store.open()
    try:
        await store.reshard(16, apply=True)
    finally:
        await store.close()


@pytest.mark.req("OP7", "CL4")
async def test_a_runner_declared_dead_ends_when_the_others_have_agreed_on_another_number_of_shards(
    migrated_postgres_url: str,
):
    """It was away meanwhile, and finds itself dead before it can see that there are other shards."""
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(name), [echo], lease=1.0) as runner,
    ):
        async with proxy.refusing():
            await execute(url, "update perdure_runners set dead = true")
            await resharded(url)
        with pytest.raises(DisagreementError, match=r"16 shards.*PERDURE_SHARDS=16"):
            await asyncio.wait_for(runner.closed(), 20)


@pytest.mark.req("CL5", "CL4")
async def test_a_runner_declared_dead_ends_when_the_others_have_changed_the_lock_mode_it_asks_for(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with (
        PostgresProxy(port) as proxy,
        runner_on(proxy.url(name), [echo], lease=1.0, shard_lock="row") as runner,
        AsyncExitStack() as others,
    ):
        async with proxy.refusing():
            await execute(url, "update perdure_runners set dead = true")
            other = runner_on(url, [echo], lease=1.0, shard_lock="advisory")
            await others.enter_async_context(other)
        with pytest.raises(DisagreementError, match="cannot become 'row' while runners"):
            await asyncio.wait_for(runner.closed(), 20)


def failing_once(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set, it makes an engine that runs fail; those that begin later do not."""
    fail, run = asyncio.Event(), Engine.run

    async def failing(engine: Engine) -> None:
        if fail.is_set():
            await run(engine)
            return

        async def told() -> None:
            await fail.wait()
            raise RuntimeError("the engine fails")

        async with asyncio.TaskGroup() as both:
            both.create_task(run(engine))
            both.create_task(told())

    monkeypatch.setattr(Engine, "run", failing)
    return fail


@pytest.mark.req("CL5")
async def test_a_runner_whose_engine_fails_has_its_shards_back_before_a_lease_is_over(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    fail = failing_once(monkeypatch)
    async with runner_on(migrated_postgres_url, [echo], lease=20.0, shard_lock="row") as runner:
        before = runner.session
        fail.set()
        await until(
            lambda: runner.session is not before and len(runner.session.ownership.holds) == SHARDS,
            what="all shards in the hands of the next session",
            deadline=6,
        )


@pytest.mark.req("CL8", "CL5")
async def test_a_runner_whose_name_is_taken_leaves_as_it_ends(migrated_postgres_url: str):
    url = migrated_postgres_url
    name = "the-same"
    async with runner_on(url, [echo], lease=2.0, shard_lock="row", replica_id=name) as first:
        second = Runner(
            App("tests", workflows=[echo]),
            Settings(db=url, lease=2.0, shard_lock="row", runner_storage="sql", replica_id=name),
            port=False,
        )
        await second.start()
        with pytest.raises(InUseError, match="'the-same' is used by two live processes"):
            await asyncio.wait_for(second.closed(), 20)
        rows = await rows_of(url, "select runner_id from perdure_runners where not dead")
        assert [row["runner_id"] for row in rows] == [first.session.runner_id]
        await second.stop()


@pytest.mark.req("CL5")
@pytest.mark.parametrize(
    ("cause", "busy"), [("dead", True), ("dead", False), ("fails", True), ("name", True)]
)
async def test_a_drain_says_whether_the_end_of_its_session_cut_runs_short(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch, cause: str, busy: bool
):
    url, fail = migrated_postgres_url, failing_once(monkeypatch)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @step
    async def lasting() -> None:
        begun.set()
        await go_on.wait()

    @workflow(name="lasts")
    async def lasts(ctx: Context) -> None:
        await ctx.step(lasting)

    async with runner_on(url, [lasts], lease=2.0) as runner:
        if busy:
            await runner.client.start(lasts)
            await begun.wait()
        match cause:
            case "dead":
                await execute(url, "update perdure_runners set dead = true")
            case "fails":
                fail.set()
            case _:
                runner.session.failure_seen(InUseError("as if its name were taken"))
        runner.begin_drain()
        assert await asyncio.wait_for(runner.drain(), 10) is not busy


@pytest.mark.req("CL5")
async def test_a_runner_whose_ownership_fails_begins_anew(migrated_postgres_url: str):
    async with runner_on(migrated_postgres_url, [echo], lease=20.0, shard_lock="row") as runner:
        before = runner.session

        def fails() -> tuple[int, ...]:
            raise RuntimeError("the ownership fails")

        before.ownership._judge = fails  # type: ignore[method-assign]
        await until(
            lambda: runner.session is not before and len(runner.session.ownership.holds) == SHARDS,
            what="all shards in the hands of the next session",
            deadline=6,
        )
        assert await runner.client.run(echo, 5, timeout=10) == 5


@pytest.mark.req("CL3")
async def test_a_renewal_after_a_jump_of_the_clock_does_not_take_it_back(
    migrated_postgres_url: str,
):
    """A keeper's state that brings a renewal holds the look from before it, with the time it was then."""
    async with runner_on(migrated_postgres_url, [echo]) as runner:
        session, jumps = runner.session, list[float]()
        clock = session.database_clock
        clock.on_jump(jumps.append)
        asked = clock.mark()
        clock.observe(clock.now() + 3600, asked)
        assert session._state is not None
        session._adopt(replace(session._state, db_offset=session._state.db_offset + 3600))
        assert [round(jump) for jump in jumps] == [3600]
