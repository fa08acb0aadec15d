"""Lock waits are seen by the name of the statement; sessions are ended by what they run."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from tests.harness.waiting import until
from tests.harness.watch import LockWatch, terminate_sessions

# asyncpg says "cannot switch to state" when the server's farewell has come but is not read yet.
LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


async def connect(url: str, application: str) -> asyncpg.Connection[asyncpg.Record]:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
        url, server_settings={"application_name": application}
    )
    return connection


async def test_only_sessions_that_wait_for_a_lock_are_counted(postgres_url: str) -> None:
    one, two = await connect(postgres_url, "one"), await connect(postgres_url, "two")
    await one.execute("create table rows as select 1 as n")
    async with LockWatch(postgres_url) as watch:
        await one.execute("-- name: quiet\nupdate rows set n = 2")
        await until(lambda: watch.looks >= 5, what="five looks")
        assert not watch.waits
        async with one.transaction():
            await one.execute("-- name: holder\nupdate rows set n = 3")
            waiter = asyncio.ensure_future(two.execute("-- name: waiter\nupdate rows set n = 4"))
            await until(lambda: watch.waits["waiter"], what="the lock wait")
        await waiter
    assert set(watch.waits) == {"waiter"}
    await one.close()
    await two.close()


async def test_sessions_are_ended_by_application_and_statement(postgres_url: str) -> None:
    keeper, hot = await connect(postgres_url, "pod keeper"), await connect(postgres_url, "pod hot")
    await hot.fetchval("-- name: claim\nselect 1")
    await keeper.fetchval("-- name: renew\nselect 1")
    assert await terminate_sessions(postgres_url, statement="commit") == []
    assert await terminate_sessions(postgres_url, application="pod", statement="renew") == [
        keeper.get_server_pid()
    ]
    assert await terminate_sessions(postgres_url) == [hot.get_server_pid()]
    for lost in (keeper, hot):
        with pytest.raises(LOST):
            await lost.fetchval("select 1")


async def test_a_watch_that_lost_the_server_says_so(postgres_url: str) -> None:
    with pytest.raises(LOST):
        async with LockWatch(postgres_url) as watch:
            await until(lambda: watch.looks, what="a look")
            await terminate_sessions(postgres_url)
            await until(lambda: watch._task is None or watch._task.done(), what="the end")
