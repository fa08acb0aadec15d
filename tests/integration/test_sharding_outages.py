"""Databases that go away, clocks that jump, processes that stand still: nobody healthy loses a shard."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.storage.clock import SystemClock
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.sharding_members import LEASES, Cluster, Member, cluster

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


async def renewed(c: Cluster, *members: Member, times: int) -> None:
    """Wait until each of these has renewed so many times more."""
    before = {row.runner_id: row.renew_count for row in (await c.topology()).runners}

    async def done() -> bool:
        now = {row.runner_id: row.renew_count for row in (await c.topology()).runners}
        return all(now[one.number] >= before[one.number] + times for one in members)

    await until(done, what=f"{times} renewals of each")


async def nobody_robbed(c: Cluster, before: dict[int, tuple[int | None, int]]) -> None:
    assert not [row.runner_id for row in (await c.topology()).runners if row.dead]
    assert await c.owners() == before


each_lock = pytest.mark.parametrize(
    "lock", ["row", pytest.param("advisory", marks=pytest.mark.slow)]
)


async def three(c: Cluster) -> list[Member]:
    members = await c.join(1, 2, 3)
    await c.even(*members)
    return members


# ---- the database goes away -------------------------------------------------------------------


@pytest.mark.req("CL11")
@each_lock
async def test_a_restart_of_the_database_under_three_keepers_robs_nobody(
    postgres: PrivatePostgres, migrated_postgres_url: str, lock: str
):
    async with cluster(migrated_postgres_url, lock=lock) as c:
        members = await three(c)
        before = await c.owners()
        for member in members:
            member.states.clear()
        await asyncio.to_thread(postgres.stop, "immediate")
        await until(
            lambda: all(any(not state.ready for state in member.states) for member in members),
            what="every keeper has noticed",
        )
        await asyncio.to_thread(postgres.start)
        await reopened(c)
        await renewed(c, *members, times=5)
        await nobody_robbed(c, before)
        assert all(member.trusted and member.keeper.unready() is None for member in members)


@pytest.mark.req("CL11")
@each_lock
async def test_an_outage_longer_than_the_lease_robs_nobody_and_is_seen(
    postgres: PrivatePostgres, migrated_postgres_url: str, lock: str
):
    async with cluster(migrated_postgres_url, lock=lock) as c:
        members = await three(c)
        before = await c.owners()
        last = max(row.expires_at for row in (await c.topology()).runners)
        await asyncio.to_thread(postgres.stop, "immediate")
        await until(
            lambda: c.clock.now() > last + LEASES.renewal, what="every lease is over", deadline=5.0
        )
        assert not [member for member in members if member.trusted]
        assert all("does not answer" in str(member.keeper.unready()) for member in members)
        assert all(member.alive for member in members), "nobody has read otherwise"
        await asyncio.to_thread(postgres.start)
        await reopened(c)
        await renewed(c, *members, times=5)
        await nobody_robbed(c, before)
        assert all(member.keeper.unready() is None for member in members)


@pytest.mark.req("CL11")
@each_lock
async def test_who_does_not_come_back_from_an_outage_is_declared_dead_after_it(
    postgres: PrivatePostgres, migrated_postgres_url: str, lock: str
):
    async with cluster(migrated_postgres_url, lock=lock) as c:
        one, two, lost = await three(c)
        await asyncio.to_thread(postgres.stop, "immediate")
        await lost.kill()
        await until(lambda: not one.trusted and not two.trusted, what="trust is gone")
        await asyncio.to_thread(postgres.start)
        await reopened(c)
        await c.even(one, two)
        assert {row.runner_id for row in (await c.topology()).runners if row.dead} == {3}


@pytest.mark.slow
@pytest.mark.req("CL11")
@each_lock
async def test_cut_connections_rob_nobody(
    postgres: PrivatePostgres, migrated_postgres_url: str, lock: str
):
    name = migrated_postgres_url.rpartition("/")[2]
    async with cluster(migrated_postgres_url, lock=lock) as c:
        members = await three(c)
        before = await c.owners()
        for _ in range(5):
            await postgres.query(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = $1 and pid <> pg_backend_pid()",
                name,
            )
            await reopened(c)
            await renewed(c, *members, times=1)
        await renewed(c, *members, times=4)
        await nobody_robbed(c, before)


FAULTS = [
    ("renew", "hang", "answer"),
    ("take_shards", "cut", "after_commit"),
    ("release_shards", "cut", "after_commit"),
]
MORE_FAULTS = [
    ("renew", "hang", "before"),
    ("renew", "cut", "before"),
    ("renew", "cut", "after_commit"),
    ("topology", "hang", "answer"),
    ("topology", "cut", "before"),
    ("topology", "cut", "after_commit"),
    ("take_shards", "cut", "before"),
    ("release_shards", "cut", "before"),
    ("declare_dead", "cut", "before"),
    ("declare_dead", "cut", "after_commit"),
]


OF_LOCKS = [
    ("renew", "cut", "before"),
    ("renew", "hang", "answer"),
    ("topology", "hang", "answer"),
    ("free_locks", "hang", "before"),
    ("free_locks", "cut", "after_commit"),
    ("declare_lost", "cut", "before"),
    ("declare_lost", "cut", "after_commit"),
]


@pytest.mark.req("CL11")
@pytest.mark.parametrize(
    ("statement", "fault", "where", "lock"),
    [
        *((*fault, "row") for fault in FAULTS),
        *(pytest.param(*fault, "row", marks=pytest.mark.slow) for fault in MORE_FAULTS),
        *(pytest.param(*fault, "advisory", marks=pytest.mark.slow) for fault in OF_LOCKS),
    ],
)
async def test_a_connection_lost_at_any_statement_costs_a_moment_and_no_shard(
    postgres: PrivatePostgres,
    migrated_postgres_url: str,
    statement: str,
    fault: str,
    where: str,
    lock: str,
):
    """Two members behind the fault, others who never see it: those behind it release, take, renew, look, judge."""
    name = migrated_postgres_url.rpartition("/")[2]
    async with (
        PostgresProxy(postgres.port) as proxy,
        cluster(migrated_postgres_url, shards=16, lock=lock) as c,
    ):
        behind = proxy.url(name)
        one, two = await c.join(1, 2, url=behind)
        (three,) = await c.join(3)
        await c.even(one, two, three)
        await renewed(c, one, two, times=2)  # their sessions are old enough to judge by locks
        rule = getattr(proxy, fault)(name=statement, where=where)
        (gone,) = await c.join(4)
        await c.even(one, two, three, gone)
        await gone.kill()
        await three.kill()
        await c.even(one, two)
        await asyncio.wait_for(rule.happened.wait(), 5.0)
        before = await c.owners()
        await renewed(c, one, two, times=5)
        assert await c.owners() == before
        assert {row.runner_id for row in (await c.topology()).runners if row.dead} == {3, 4}
        assert one.keeper.unready() is None
        assert two.keeper.unready() is None


async def reopened(c: Cluster) -> None:
    """The test's own observer had a connection to lose too."""
    with contextlib.suppress(Exception):
        await c.observer.close()
    c.observer = c.database.cluster()
    await c.observer.open()


# ---- clocks -----------------------------------------------------------------------------------


class JumpingClock(SystemClock):
    """The machine's clock, and with it that of a database file, can be set."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.req("CL3")
@pytest.mark.parametrize("jump", [30.0, -30.0])
async def test_a_jump_of_the_databases_clock_robs_nobody(migrated_sqlite_url: str, jump: float):
    clock = JumpingClock()
    async with cluster(migrated_sqlite_url, clock=clock) as c:
        members = await three(c)
        before = await c.owners()
        clock.ahead = jump
        now = (await c.topology()).db_now
        expired = [row.expires_at < now for row in (await c.topology()).runners]
        assert expired == [jump > 0] * 3
        await renewed(c, *members, times=6)
        await nobody_robbed(c, before)


@pytest.mark.slow
@pytest.mark.req("CL3")
async def test_a_pod_whose_own_clock_is_wrong_robs_nobody_and_is_not_robbed(
    postgres: PrivatePostgres, migrated_postgres_url: str
):
    wrong = JumpingClock()
    wrong.ahead = 3600.0
    async with cluster(migrated_postgres_url) as right:
        one, two = await right.join(1, 2)
        await right.even(one, two)
        async with cluster(migrated_postgres_url, clock=wrong) as c:
            (odd,) = await c.join(3)
            await right.even(one, two, odd)
            before = await right.owners()
            await renewed(right, one, two, odd, times=5)
            await nobody_robbed(right, before)


# ---- processes that stand still ---------------------------------------------------------------


class PodProcess:
    """A member in a process of its own that can be frozen."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.told: dict[str, object] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, url: str, number: int) -> AsyncIterator["PodProcess"]:
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.sharding_pod", url, str(number)),
            cwd=ROOT,
            env=os.environ | paths,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        pod = cls(process)
        try:
            yield pod
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await pod._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.told = json.loads(line)


@pytest.mark.req("CL3", "CL4", "CL5")
async def test_a_process_that_stood_still_for_too_long_sees_that_it_is_dead_and_writes_nothing(
    migrated_url: str,
):
    async with cluster(migrated_url, shards=16) as c, PodProcess.start(migrated_url, 3) as pod:
        await until(lambda: pod.told.get("held") == 16, what="the process has all shards")
        one, two = await c.join(1, 2)
        await until(lambda: one.held + two.held > 9, what="they share")
        pod.process.send_signal(signal.SIGSTOP)
        await c.even(one, two)
        row, owners = await c.row(3), await c.owners()
        assert row is not None
        assert row.dead
        pod.process.send_signal(signal.SIGCONT)
        await until(lambda: pod.told == {"held": 0, "alive": False}, what="it sees that it is dead")
        await renewed(c, one, two, times=3)
        assert await c.row(3) == row
        assert await c.owners() == owners


@pytest.mark.slow
@pytest.mark.req("CL3")
async def test_a_short_stop_of_a_process_costs_it_nothing(migrated_url: str):
    """Shorter than the lease: it renews and goes on."""
    async with cluster(migrated_url, shards=16) as c, PodProcess.start(migrated_url, 3) as pod:
        await until(lambda: pod.told.get("held") == 16, what="the process has all shards")
        (one,) = await c.join(1)
        await until(lambda: pod.told.get("held") == 8 and one.held == 8, what="they share")
        before = await c.owners()
        pod.process.send_signal(signal.SIGSTOP)
        row = await c.row(3)
        assert row is not None
        await renewed(c, one, times=1)
        pod.process.send_signal(signal.SIGCONT)

        async def went_on() -> bool:
            later = await c.row(3)
            assert later is not None
            return later.renew_count > row.renew_count + 2

        await until(went_on, what="it renews again")
        await nobody_robbed(c, before)


@pytest.mark.req("CL3")
async def test_when_all_processes_stood_still_the_first_to_wake_robs_nobody(migrated_url: str):
    """A suspended machine: every lease is over, and nobody could renew."""
    async with (
        cluster(migrated_url, shards=16) as c,
        PodProcess.start(migrated_url, 1) as one,
        PodProcess.start(migrated_url, 2) as two,
    ):
        await until(lambda: one.told.get("held") == two.told.get("held") == 8, what="they share")
        before = await c.owners()
        for pod in (one, two):
            pod.process.send_signal(signal.SIGSTOP)

        async def over() -> bool:
            topology = await c.topology()
            return all(row.expires_at < topology.db_now for row in topology.runners)

        await until(over, what="both leases are over")
        row = await c.row(1)
        assert row is not None
        one.process.send_signal(signal.SIGCONT)

        async def woke() -> bool:
            later = await c.row(1)
            return later is not None and later.renew_count > row.renew_count

        await until(woke, what="the first one has renewed", interval=0.002)
        two.process.send_signal(signal.SIGCONT)
        counts = {1: row.renew_count + 5, 2: 5}

        async def going() -> bool:
            rows = (await c.topology()).runners
            return all(row.renew_count >= counts[row.runner_id] for row in rows)

        await until(going, what="both renew")
        await nobody_robbed(c, before)
