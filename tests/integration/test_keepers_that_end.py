"""Other connections of a process wait for its keeper's, but not for one that no longer wants any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from perdure.sharding.keeper import Keeper
from perdure.sharding.runner_port import RunnerPort
from perdure.sharding.state import KeeperState
from perdure.storage.clock import SystemClock
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunnerIdentity
from perdure.storage.model import RunnerRow
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.in_process import port_and_name
from tests.integration.sharding_members import LEASES

pytestmark = [pytest.mark.req("CL11"), pytest.mark.timeout(40)]


@pytest.fixture
async def proxy(migrated_postgres_url: str) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(port_and_name(migrated_postgres_url)[0]) as running:
        yield running


@pytest.fixture
async def database(proxy: PostgresProxy, migrated_postgres_url: str) -> Database:
    url = proxy.url(port_and_name(migrated_postgres_url)[1])
    database = connect(DatabaseSettings(url), clock=SystemClock())
    store = database.cluster()
    await store.open()  # what lies between here and the server is known from now on
    await store.agree(shard_count=4, lock_mode="row")
    await store.close()
    return database


def keeper_on(
    database: Database,
    states: list[KeeperState] | None = None,
    port: RunnerPort | None = None,
) -> Keeper:
    me = RunnerIdentity(1, "pod-1", "127.0.0.1:1", [], {})
    states = [] if states is None else states
    return Keeper(database.keeper, me, LEASES, SystemClock(), states.append, port=port)


async def runners(database: Database) -> Sequence[RunnerRow]:
    store = database.cluster()
    await store.open()
    try:
        return (await store.read_topology()).runners
    finally:
        await store.close()


async def others_connect(database: Database) -> None:
    began = time.monotonic()
    store = database.cluster()
    await store.open()
    await store.close()
    assert time.monotonic() - began < 3.0


async def test_one_that_cannot_connect_as_it_boots(proxy: PostgresProxy, database: Database):
    keeper = keeper_on(database)
    async with proxy.refusing():
        with pytest.raises(PerdureError):
            await keeper.begin()
    await others_connect(database)


@pytest.mark.parametrize("statement", ["register", "topology"])
async def test_one_that_is_cut_off_as_it_boots(
    proxy: PostgresProxy, database: Database, statement: str
):
    rule = proxy.cut(name=statement)
    with pytest.raises(PerdureError):
        await keeper_on(database).begin()
    assert rule.happened.is_set()
    assert not [row for row in await runners(database) if not row.dead], "it has said good-bye"
    await others_connect(database)


async def test_one_whose_port_cannot_be_served(database: Database, monkeypatch: pytest.MonkeyPatch):
    async def serve(*_: object) -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(RunnerPort, "serve", serve)
    with pytest.raises(OSError, match="descriptors"):
        await keeper_on(database, port=RunnerPort(host="127.0.0.1", port=0, status=dict)).begin()
    assert [row.dead for row in await runners(database)] == [True], "it has said good-bye"


async def test_one_that_is_stopped_while_it_tries_to_reconnect(
    proxy: PostgresProxy, database: Database
):
    keeper = keeper_on(database)
    await keeper.begin()
    async with proxy.refusing():
        await until(lambda: not keeper.state.ready, what="a keeper without a connection")
        await keeper.finish(leave=True)
    await others_connect(database)


async def test_one_whose_last_word_is_never_answered(proxy: PostgresProxy, database: Database):
    keeper = keeper_on(database)
    await keeper.begin()
    rule = proxy.hang(name="leave")
    await keeper.finish(leave=True)
    assert rule.happened.is_set()
    proxy.cut_all()
    await others_connect(database)


async def test_while_one_only_fails_to_reconnect_the_others_wait(
    proxy: PostgresProxy, database: Database
):
    states: list[KeeperState] = []
    keeper = keeper_on(database, states)
    await keeper.begin()
    async with proxy.refusing():
        await until(lambda: not keeper.state.ready, what="a keeper without a connection")
        waiting = asyncio.create_task(others_connect(database))
        more = len(states) + 5
        await until(lambda: len(states) >= more, what="some more tries that failed")
        assert not waiting.done()
    await waiting
    await keeper.finish(leave=True)


@pytest.mark.parametrize("statement", ["read_meta", "renew"])
async def test_no_connection_of_one_that_gave_up_waiting_is_left(
    proxy: PostgresProxy, database: Database, statement: str
):
    """Its calls, and the closing after them, end at its own deadline; what they were about may still arrive."""
    go_on = asyncio.Event()
    store = database.keeper()
    if statement == "renew":
        await store.open()
    rule = proxy.call(lambda _: go_on.wait(), name=statement)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await (store.open() if statement == "read_meta" else store.renew(1, 1.0))
    store.forgo()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await store.close()
    assert proxy.connections
    go_on.set()
    await rule.happened.wait()
    await until(lambda: not proxy.connections, what="no connection any more", deadline=2)
    await others_connect(database)
