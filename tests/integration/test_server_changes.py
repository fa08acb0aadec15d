"""A server that is another one when the connection comes back: promoted from a copy, with or without everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from perdure.storage.connect import DatabaseSettings, migrate
from tests.harness.postgres import MISSING, PrivatePostgres, find_binaries
from tests.harness.waiting import until
from tests.integration.sharding_members import cluster

pytestmark = [pytest.mark.slow, pytest.mark.req("CL11", "CL4")]


@pytest.fixture
def server() -> Iterator[PrivatePostgres]:
    if find_binaries() is None:
        pytest.skip(MISSING)
    with PrivatePostgres() as started:
        yield started


@pytest.mark.parametrize("lock", ["row", "advisory"])
@pytest.mark.parametrize("promoted", [True, False])
async def test_every_keeper_notices_and_its_runner_is_void(
    server: PrivatePostgres, lock: str, promoted: bool
) -> None:
    name = server.create_database()
    await asyncio.to_thread(migrate, DatabaseSettings(server.url(name)))
    async with cluster(server.url(name), lock=lock) as c:
        one, two = await c.join(1, 2)
        await c.even(one, two)
        copy = await asyncio.to_thread(server.base_backup)
        row = await c.row(1)
        assert row is not None

        async def gone_on(count: int = row.renew_count) -> bool:
            again = await c.row(1)
            return again is not None and again.renew_count > count + 3

        await until(gone_on, what="commits that the copy lacks")
        await asyncio.to_thread(server.stop, "immediate")
        await asyncio.to_thread(server.start_copy, copy, promote=promoted)
        await until(lambda: not (one.alive or two.alive), what="both have noticed")
        for member in (one, two):
            assert member.keeper.state.reason == "the database is not the one it was"
        await until(lambda: not (one.held or two.held), what="they hold nothing")
        c.observer = c.database.cluster()
        await c.observer.open()
        (three,) = await c.join(3)
        await c.even(three)
        rows = await server.query("select key, value from perdure_meta", database=name)
        facts = {row["key"]: row["value"] for row in rows}
        assert facts["server"].endswith("/2" if promoted else "/1")
        # One that came back while the copy was a standby still finds out by what is missing.
        told = ["time line 2, before 1", "an older copy"] if promoted else ["an older copy"]
        assert any(words in facts["server_change"] for words in told)


async def test_a_restart_is_no_change(server: PrivatePostgres) -> None:
    name = server.create_database()
    await asyncio.to_thread(migrate, DatabaseSettings(server.url(name)))
    async with cluster(server.url(name)) as c:
        one, two = await c.join(1, 2)
        await c.even(one, two)
        for mode in ("immediate", "fast"):
            await asyncio.to_thread(server.restart, mode)
            c.observer = c.database.cluster()
            await c.observer.open()
            row = await c.row(1)
            assert row is not None

            async def renewed(count: int = row.renew_count) -> bool:
                again = await c.row(1)
                return again is not None and again.renew_count > count + 1

            await until(renewed, what="it has come back")
        assert one.alive
        assert two.alive
        assert one.keeper._lease._history == 0
