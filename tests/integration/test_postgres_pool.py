"""One process's connections: lanes that cannot starve each other, bounded waits, clear words when too few."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import asyncpg
import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.errors import ConfigurationError, DatabaseUnavailable
from perdure.storage.model import Verdict
from perdure.storage.postgres.pool import lane_sizes
from tests.contract.world import entry, write
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until
from tests.integration.postgres_world import foreign, migrated_database, world_of

pytestmark = pytest.mark.req("DB1")


@pytest.fixture
def url(postgres: PrivatePostgres) -> Iterator[str]:
    postgres.start()
    made = migrated_database(postgres)
    yield made
    postgres.drop_database(made.rpartition("/")[2])


def test_lanes_share_out_the_whole_pool() -> None:
    assert [lane_sizes(n) for n in (3, 4, 5, 10, 40)] == [
        (1, 1, 1),
        (2, 1, 1),
        (2, 1, 2),
        (2, 3, 5),
        (2, 12, 26),
    ]
    with pytest.raises(ConfigurationError, match="PERDURE_DB_POOL to 3"):
        connect(DatabaseSettings("postgresql://localhost/x", pool=2), clock=SystemClock()).runs()


async def test_clients_that_wait_for_a_row_keep_neither_claims_nor_commits_waiting(
    url: str,
) -> None:
    """Twenty senders wait for one wake row; the runner's work goes on, and the one too many is told why."""
    async with world_of(url, pool=5, deadline=2.0) as world:
        await world.runs.prepare()
        runner = await world.runner(lease=60.0)
        await world.start("r1", "r2")
        runs = await runner.claim()
        lock = "select 1 from perdure_wakes where run_id = 'r1' for update"
        async with foreign(url, lock):
            senders = [asyncio.create_task(world.send("r1", f"m{n}")) for n in range(20)]
            await until(lambda: _waiting(url, 2), what="two senders waiting for the row")
            for seq in range(1, 20):
                verdicts = await asyncio.wait_for(
                    runner.commit(write(runs["r2"], revision=seq, entries=[entry(seq)])), 0.5
                )
                assert verdicts == {"r2": Verdict.COMMITTED}
                assert await asyncio.wait_for(runner.claim(in_memory=[1]), 0.5) == {}
            outcomes = await asyncio.gather(*senders, return_exceptions=True)
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        busy = [o for o in outcomes if isinstance(o, DatabaseUnavailable)]
        assert busy
        assert "all 2 connections for it were busy" in str(busy[0])
        assert "PERDURE_DB_POOL" in str(busy[0])
        assert (await world.send("r1", "m1")).slot is not None


async def _waiting(url: str, least: int) -> bool:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
    finally:
        await connection.close()
    return bool(found >= least)


async def test_a_process_never_has_more_connections_than_its_pool(url: str) -> None:
    async with world_of(url, pool=4) as world:
        await world.start("r1")
        await asyncio.gather(*(world.record("r1") for _ in range(50)))
        await asyncio.gather(*(world.mailbox("r1") for _ in range(50)))
        connection = await asyncpg.connect(url)
        rows = await connection.fetch(
            "select application_name from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid()"
        )
        await connection.close()
        assert [row["application_name"] for row in rows].count(
            "perdure"
        ) <= 4 + 1  # and the cluster store's


async def test_settings_are_made_after_connecting(url: str) -> None:
    """A pooler refuses startup parameters; a name may hold anything."""
    name = 'it\'s a "pod"'
    async with world_of(url, application_name=name) as world:
        assert await world.now() > 0
        connection = await asyncpg.connect(url)
        found = await connection.fetch(
            "select 1 from pg_stat_activity where application_name = $1", name
        )
        await connection.close()
        assert len(found) == 2


async def test_a_closed_store_says_so(url: str) -> None:
    async with world_of(url) as world:
        await world.runs.close()
        with pytest.raises(DatabaseUnavailable, match="closed"):
            await world.now()


async def test_a_restarted_server_is_found_again_by_the_next_call(
    postgres: PrivatePostgres, url: str
) -> None:
    async with world_of(url) as world:
        await world.start("r1")
        postgres.restart("immediate")

        async def answered() -> bool:
            with contextlib.suppress(DatabaseUnavailable):
                return (await world.record("r1")).run_id == "r1"
            return False

        await until(answered, what="an answer of the restarted server")


@pytest.mark.req("CL11")
async def test_the_keeper_reconnects_before_the_pool_does(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    database = connect(DatabaseSettings(migrated_postgres_url, pool=3), clock=SystemClock())
    keeper, runs = database.keeper(), database.runs()
    await runs.open()
    await keeper.open()
    lost = asyncio.Event()
    keeper.on_lost(lost.set)
    await postgres.query(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = $1 and pid <> pg_backend_pid()",
        migrated_postgres_url.rpartition("/")[2],
    )
    await asyncio.wait_for(lost.wait(), 5)
    # A session of the pool may not have heard yet that it is gone: its read fails.
    for _ in range(4):
        read = asyncio.create_task(runs.server_now())
        done, _ = await asyncio.wait([read], timeout=0.3)
        if not done:
            break
        assert isinstance(read.exception(), DatabaseUnavailable), "the pool waits"
    assert not read.done(), "the pool waits"
    again = database.keeper()
    await again.open()
    assert await asyncio.wait_for(read, 5) > 0
    for store in (keeper, again, runs):
        await store.close()
