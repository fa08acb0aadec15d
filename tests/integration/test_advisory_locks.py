"""Advisory mode: who loses its session's lock is replaced at once, who only loses its session loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator

import pytest

from perdure.sharding.state import LeaseConfig
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.errors import ConfigurationError
from perdure.storage.interface import ClusterStore, RunnerIdentity
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.sharding_members import Cluster, Member, cluster

pytestmark = pytest.mark.alone

LONG = LeaseConfig(lease=20.0, renewal=0.5, look=0.5)
"""A lease nobody waits for here: whatever happens sooner is the lock's work."""


@contextlib.asynccontextmanager
async def advisory(url: str, **options: object) -> AsyncIterator[Cluster]:
    async with cluster(url, leases=LONG, lock="advisory", **options) as opened:
        yield opened


async def settled(c: Cluster, *numbers: int) -> list[Member]:
    """Members that share evenly and whose sessions are old enough for the shortcut."""
    members = await c.join(*numbers)
    await c.even(*members)
    old = 2 * LONG.renewal
    began = c.clock.monotonic()
    await until(lambda: c.clock.monotonic() >= began + old, what="the sessions have lasted")
    return members


async def dead(c: Cluster) -> set[int]:
    return {row.runner_id for row in (await c.topology()).runners if row.dead}


async def lock_holders(postgres: PrivatePostgres, database: str) -> list[int]:
    found = await postgres.query(
        "select pid from pg_locks where locktype = 'advisory' and database = "
        "(select oid from pg_database where datname = $1) order by pid",
        database,
    )
    return [row["pid"] for row in found]


@pytest.mark.alone
@pytest.mark.req("CL5")
async def test_a_killed_runner_is_replaced_in_a_moment(migrated_postgres_url: str) -> None:
    """The median of several, from the end of its session to the last of its shards in other hands."""
    took = []
    async with advisory(migrated_postgres_url) as c:
        one, two = await settled(c, 1, 2)
        for number in (3, 4, 5):  # the median of three is not spoilt by one
            (victim,) = await c.join(number)
            await c.even(one, two, victim)
            before = await c.owners()
            await victim.kill()
            began = c.clock.monotonic()
            await c.even(one, two)
            took.append(c.clock.monotonic() - began)
            after = await c.owners()
            assert number in await dead(c)
            assert all(
                after[shard] == before[shard] for shard in before if before[shard][0] != number
            )
    print("replaced after", [f"{seconds:.3f}" for seconds in took])
    assert statistics.median(took) <= 1.2


@pytest.mark.alone
@pytest.mark.req("CL5", "CL11")
async def test_a_short_cut_of_the_keepers_session_alone_costs_nothing(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    """Once for a moment, once so that it cannot come back for 200 ms; two others watch."""
    database = migrated_postgres_url.rpartition("/")[2]
    direct = connect(DatabaseSettings(migrated_postgres_url), clock=SystemClock())
    async with PostgresProxy(postgres.port) as proxy, advisory(migrated_postgres_url) as c:
        one, two = await settled(c, 1, 2)
        (victim,) = await c.join(3, url=proxy.url(database), open_store=direct.cluster)
        await c.even(one, two, victim)
        before, holders = await c.owners(), await lock_holders(postgres, database)
        assert len(holders) == 3
        for pause in (0.0, 0.2, 0.2, 0.2):
            row = await c.row(3)
            assert row is not None
            async with proxy.refusing():
                await asyncio.sleep(pause)  # the length of the fault

            async def renewed(count: int = row.renew_count) -> bool:
                again = await c.row(3)
                return again is not None and again.renew_count >= count + 3

            await until(renewed, what="it renews as before")
            assert await dead(c) == set()
            assert await c.owners() == before
            assert victim.trusted
        assert len(await lock_holders(postgres, database)) == 3
        assert await lock_holders(postgres, database) != holders, "it is another session"


@pytest.mark.slow
@pytest.mark.req("CL5", "CL11")
async def test_all_sessions_end_at_once_and_the_first_one_back_robs_nobody(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    database = migrated_postgres_url.rpartition("/")[2]
    async with PostgresProxy(postgres.port) as proxy, advisory(migrated_postgres_url) as c:
        one, two = await settled(c, 1, 2)
        (late,) = await c.join(3, url=proxy.url(database))
        await c.even(one, two, late)
        before = await c.owners()
        async with proxy.refusing():  # this one comes back after a whole second
            await postgres.query(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = $1 and pid <> pg_backend_pid()",
                database,
            )
            c.observer = c.database.cluster()
            await c.observer.open()
            row = await c.row(1)
            assert row is not None

            async def back() -> bool:
                again = await c.row(1)
                return again is not None and again.renew_count > row.renew_count + 1

            await until(back, what="the first is back and has looked at the others")
        await until(lambda: late.trusted, what="the last is back")
        assert await dead(c) == set()
        assert await c.owners() == before


@pytest.mark.req("CL5")
async def test_a_ghost_that_holds_the_lock_is_ended(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    """The keeper's old session lives on at the server, as after a cut that the server has not noticed."""
    database = migrated_postgres_url.rpartition("/")[2]
    async with advisory(migrated_postgres_url) as c:
        one, two = await settled(c, 1, 2)
        before, holders = await c.owners(), await lock_holders(postgres, database)
        ghost = one.keeper._lease._store  # the connection goes out of sight, and stays open
        assert ghost is not None
        one.keeper._in_loop(lambda: setattr(one.keeper._lease, "_store", None))

        async def moved() -> bool:
            now = await lock_holders(postgres, database)
            return len(now) == 2 and now != holders

        await until(moved, what="the lock is on a new session, and on one only")
        assert await dead(c) == set()
        assert await c.owners() == before
        assert one.trusted
        assert two.trusted
        ghost_closed = asyncio.run_coroutine_threadsafe(ghost.close(), one.keeper._loop)  # type: ignore[arg-type]
        await asyncio.wrap_future(ghost_closed)


@pytest.mark.req("CL2")
async def test_runners_of_a_mode_without_locks_are_never_taken_for_lost(
    migrated_postgres_url: str,
) -> None:
    """A straggler that was frozen while the cluster changed its mode: its row says that it holds no lock."""
    async with advisory(migrated_postgres_url) as c:
        straggler_store: ClusterStore = c.database.cluster()
        await straggler_store.open()
        one, _ = await settled(c, 1, 2)
        await straggler_store.register(
            RunnerIdentity(7, "old", "x:1", [], {"shard_lock": "row"}), 60.0
        )
        row = await c.row(1)
        assert row is not None

        async def looked_often() -> bool:
            again = await c.row(1)
            return again is not None and again.renew_count > row.renew_count + 4

        await until(looked_often, what="the others have looked several times")
        assert await dead(c) == set()
        assert one.alive
        await straggler_store.leave(7)
        await straggler_store.close()


@pytest.mark.req("CL2")
async def test_a_keeper_refuses_to_begin_in_another_mode(migrated_postgres_url: str) -> None:
    async with advisory(migrated_postgres_url) as c:
        member = c.member(1, leases=LeaseConfig(lease=20.0, renewal=0.5))
        with pytest.raises(ConfigurationError, match=r"'advisory' locks by now.*'row'"):
            await member.start()
