"""How many connections a process opens: never more than the formula that operators are given."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter

import asyncpg
import pytest

from perdure import Context, step, workflow
from perdure.runtime import retention
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.in_process import client_on, port_and_name, runner_on
from tests.integration.test_retention import retention_on

POOL = 3
RUNS = 40


@step
async def double(number: int) -> int:
    return 2 * number


@workflow(name="connected")
async def connected(ctx: Context, number: int) -> int:
    return await ctx.step(double, number)


@pytest.mark.req("CL1")
async def test_a_pod_and_a_client_keep_to_the_formula_at_their_busiest(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PERIOD", 0.01)
    most: Counter[str] = Counter()
    sweeps = 0
    sweep = retention.Retention.sweep

    async def counted(self: retention.Retention) -> None:
        nonlocal sweeps
        await sweep(self)
        sweeps += 1

    monkeypatch.setattr(retention.Retention, "sweep", counted)

    async def watch() -> None:
        connection = await asyncpg.connect(migrated_postgres_url)
        try:
            while True:
                rows = await connection.fetch(
                    "select application_name as name, count(*) as n from pg_stat_activity"
                    " where datname = current_database() and application_name like 'perdure%' group by 1"
                )
                for row in rows:
                    most[row["name"]] = max(most[row["name"]], row["n"])
                await asyncio.sleep(0.002)
        finally:
            await connection.close()

    watching = asyncio.create_task(watch())
    try:
        async with (
            runner_on(migrated_postgres_url, [connected], db_pool=POOL) as runner,
            client_on(migrated_postgres_url, [connected], db_pool=POOL) as client,
        ):
            handles = [await client.start(connected, n) for n in range(RUNS)]
            looks = [client.why(handle.run_id) for handle in handles]
            lists = [client.list() for _ in handles]
            await asyncio.gather(*looks, *lists, *(handle.wait(30) for handle in handles))
            await until(lambda: sweeps >= 3, what="three sweeps", deadline=30)
            allowed = runner.settings.connections
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    assert allowed == POOL + 4
    assert POOL < most["perdure"] <= allowed
    # Of a client's pool the lanes of a runner stay empty: pool, listener and one look.
    assert most["perdure-client"] == 3


@pytest.mark.req("CL1", "CL11")
@pytest.mark.parametrize("who", ["cluster", "why", "retention"])
async def test_a_look_that_is_given_up_while_it_connects_leaves_no_connection(
    migrated_postgres_url: str, who: str
) -> None:
    """At once, and not only when a cyclic collector comes by."""
    port, name = port_and_name(migrated_postgres_url)
    async with (
        PostgresProxy(port) as proxy,
        client_on(proxy.url(name), [connected], db_pool=POOL) as client,
        retention_on(proxy.url(name)) as service,
    ):
        handle = await client.start(connected, 1)
        looks = {
            "cluster": client.cluster,
            "why": lambda: client.why(handle.run_id),
            "retention": service.sweep,
        }
        before = set(proxy.connections)
        looking: asyncio.Task[object] = asyncio.ensure_future(looks[who]())
        rule = proxy.call(lambda _: looking.cancel(), name="read_meta")
        gc.disable()
        try:
            with pytest.raises(asyncio.CancelledError):
                await looking
            assert rule.happened.is_set()
            await until(lambda: set(proxy.connections) <= before, what="the end of its connection")
        finally:
            gc.enable()


@pytest.mark.req("CL1", "CL11")
@pytest.mark.parametrize("kind", ["cluster", "runs"])
async def test_a_store_that_is_closed_before_it_is_open_keeps_no_connection(
    migrated_postgres_url: str, kind: str
) -> None:
    port, name = port_and_name(migrated_postgres_url)
    async with PostgresProxy(port) as proxy:
        database = connect(DatabaseSettings(proxy.url(name), deadline=0.3), clock=SystemClock())
        store = database.cluster() if kind == "cluster" else database.runs()
        closed = asyncio.Event()
        rule = proxy.call(lambda _: closed.wait(), predicate=lambda sql: "pg_backend_pid" in sql)
        opening = asyncio.ensure_future(store.open())
        await until(lambda: rule.begun, what="half of the opening")
        opening.cancel()
        await store.close()
        gc.disable()
        try:
            closed.set()
            await until(lambda: proxy.statements["read_meta"], what="the rest of it")
            await until(lambda: not proxy.connections, what="the end of its connection")
        finally:
            gc.enable()
