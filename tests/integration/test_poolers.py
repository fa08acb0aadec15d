"""PgBouncer between pods and server: what is chosen, what works, what is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from perdure.sharding.lock_mode import choose
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, migrate
from perdure.storage.errors import ConfigurationError
from perdure.storage.model import LockFacts
from tests.harness.pgbouncer import MISSING, PgBouncer, PoolMode
from tests.harness.postgres import PrivatePostgres
from tests.harness.watch import terminate_sessions
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, taken_from

pytestmark = [
    pytest.mark.req("CL2"),
    pytest.mark.skipif(not PgBouncer.installed(), reason=MISSING),
]


async def facts_of(url: str) -> LockFacts:
    cluster = connect(DatabaseSettings(url), clock=SystemClock()).cluster()
    await cluster.open()
    try:
        return await cluster.read_lock_facts()
    finally:
        await cluster.close()


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


@pytest.mark.parametrize("pool", [pytest.param(3, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_pooler_that_rotates_sessions_is_noticed(
    postgres: PrivatePostgres, migrated_postgres_url: str, mode: PoolMode, pool: int
) -> None:
    """Also a quiet one, which would give the same session again and again, and one with few sessions."""
    with PgBouncer(postgres, mode=mode, pool=pool) as pooler:
        facts = await facts_of(pooler.url(name_of(migrated_postgres_url)))
    assert facts.session_locks
    assert (facts.rotated is not None) == (mode == "transaction")
    found = choose("auto", None, facts)
    assert found.mode == ("row" if mode == "transaction" else "advisory")
    if mode == "transaction":
        assert "auto: a pooler rotates sessions" in found.why
        with pytest.raises(ConfigurationError, match=r"pooler rotates sessions.*session mode"):
            choose("advisory", None, facts)


async def test_the_tables_can_be_made_through_either_and_again(
    postgres: PrivatePostgres, postgres_url: str
) -> None:
    for mode in ("transaction", "session"):
        with PgBouncer(postgres, mode=mode, pool=2) as pooler:
            settings = DatabaseSettings(pooler.url(name_of(postgres_url)))
            for _ in range(2):
                await asyncio.to_thread(migrate, settings)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("CL5", "CL4", "CL11")
@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_pods_through_a_pooler_lose_nothing_when_one_is_killed_and_sessions_are_cut(
    postgres: PrivatePostgres, audited_postgres_url: str, tmp_path: Path, mode: PoolMode
) -> None:
    with PgBouncer(postgres, mode=mode, pool=60) as pooler:
        url = pooler.url(name_of(audited_postgres_url))
        async with World(url, tmp_path) as w:
            pods = await w.three()
            lock = {runner.info["shard_lock"] for runner in (await w.cluster()).runners}
            assert lock == {"row" if mode == "transaction" else "advisory"}
            assert ("sessions.rotated" in pods[0].log) == (mode == "transaction")
            run_ids = await w.start_runs(60, Beats(work=0.02, rest=0.2))
            await w.beating(run_ids, steps=3)
            runner = (await w.runner_of(pods[0])).runner_id
            killed = pods[0].kill().at
            await w.beating(run_ids, since=killed + 0.5, steps=2)
            assert taken_from(await w.history(), runner)
            for _ in range(5):
                await terminate_sessions(audited_postgres_url, statement="commit")
                await w.beating(run_ids, since=time.monotonic(), steps=1)
            await w.finish()
            await w.check(w.pods.faults)


@pytest.mark.slow
async def test_a_pod_that_is_told_to_hold_locks_through_a_rotating_pooler_refuses_to_boot(
    postgres: PrivatePostgres, audited_postgres_url: str, tmp_path: Path
) -> None:
    with PgBouncer(postgres, mode="transaction") as pooler:
        url = pooler.url(name_of(audited_postgres_url))
        async with World(audited_postgres_url, tmp_path) as w:
            told = w.pods.start("told", env={"PERDURE_DB": url, "PERDURE_SHARD_LOCK": "advisory"})
            assert await told.wait_end() not in (0, None)
            last = told.log.strip().splitlines()[-1]
            assert "PERDURE_SHARD_LOCK=advisory is not possible here" in last
            assert "session mode" in last
            await w.start_pods(w.url)  # directly: the cluster becomes advisory
            late = w.pods.start("late", env={"PERDURE_DB": url})
            assert await late.wait_end() not in (0, None)
            assert "advisory locks, which this pod cannot" in late.log
