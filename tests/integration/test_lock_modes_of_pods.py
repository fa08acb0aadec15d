"""Real pods in advisory mode: taken over in a moment when killed, not at all when only a session was cut."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, of_runs, taken_from

pytestmark = pytest.mark.alone

LONG = 10.0
"""A lease nobody waits for here, with the usual renewal and look: 2.5 and 0.5 s."""
STEADY = Beats(work=0.1, spread=0.5)


async def settled(w: World) -> None:
    """Every survivor's session is old enough that it may go by the others' locks."""
    since = time.monotonic()
    await until(
        lambda: time.monotonic() > since + LONG / 2, what="sessions that lasted", deadline=LONG
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.req("CL5")
async def test_killed_pods_are_taken_over_within_a_second(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    """Ten kills. For each, from the kill to the first step that a taken-over run begins, and to the last one's."""
    firsts, lasts = [], []
    async with World(audited_postgres_url, tmp_path, lease=LONG, shard_lock="advisory") as w:
        pods = await w.three()
        run_ids = await w.start_runs(40, STEADY)
        await settled(w)
        for number in range(10):
            await w.beating(run_ids, since=time.monotonic(), steps=1)
            victim = pods.pop(0)
            runner = (await w.runner_of(victim)).runner_id
            killed = victim.kill().at
            await w.beating(run_ids, since=killed + 0.1, steps=1)
            taken = taken_from(await w.history(), runner)
            assert taken
            begun = [
                next(e.started for e in executions if e.started > killed and e.pid != victim.pid)
                - killed
                for run_id, executions in of_runs(w.executions).items()
                if run_id in taken
            ]
            firsts.append(min(begun))
            lasts.append(max(begun))
            pods.append(w.start_pod(name=f"again-{number}"))
            await pods[-1].wait_http("/readyz", deadline=30)
            await w.even(3)
        await w.finish()
        await w.check(w.pods.faults)
    print("first steps after", [f"{each:.3f}" for each in sorted(firsts)])
    print("last of them after", [f"{each:.3f}" for each in sorted(lasts)])
    assert statistics.median(firsts) <= 1.0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.req("CL5", "CL11")
async def test_a_pod_whose_keeper_alone_is_cut_off_for_200_ms_repeats_nothing(
    postgres: PrivatePostgres, audited_postgres_url: str, tmp_path: Path
) -> None:
    """Its connection is reset and every new one refused; the two others watch its lock."""
    async with (
        PostgresProxy(postgres.port) as proxy,
        World(audited_postgres_url, tmp_path, lease=4.0, shard_lock="advisory") as w,
    ):
        cut, _, _ = await w.start_pods(proxy.url(w.database), w.url, w.url)
        run_ids = await w.start_runs(60, STEADY)
        before = (await w.runner_of(cut)).runner_id
        await w.beating(run_ids, steps=2)
        since = time.monotonic()
        await until(lambda: time.monotonic() > since + 2, what="sessions that lasted")
        for _ in range(3):
            rule = proxy.cut(name="free_locks", where="before")
            await asyncio.wait_for(rule.happened.wait(), 5)
            proxy.refuse()
            await asyncio.sleep(0.2)  # the length of the fault
            await proxy.accept()
            await w.beating(run_ids, since=time.monotonic(), steps=2)
        assert not [row for row in (await w.topology()).runners if row.dead]
        assert (await w.runner_of(cut)).runner_id == before
        await w.finish()
        assert await w.check() == 0
        assert "database.lost" in cut.log


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("CL11", "CL4")
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_an_old_copy_of_the_server_is_started_under_live_pods(
    tmp_path: Path, shard_lock: str
) -> None:
    """A base backup, work for a while, then the copy in the server's place: commits are lost, and nothing else."""
    with PrivatePostgres() as server, audited_database(server) as url:
        async with World(url, tmp_path, lease=4.0, shard_lock=shard_lock) as w:
            pods = await w.three()
            run_ids = await w.start_runs(60, Beats(work=0.1, rest=0.2))
            await w.beating(run_ids, steps=3)
            old = {pod.name: (await w.runner_of(pod)).runner_id for pod in pods}
            copied = time.monotonic()
            copy = await asyncio.to_thread(server.base_backup)
            await w.beating(run_ids, since=time.monotonic(), steps=3)
            await asyncio.to_thread(server.stop, "immediate")
            await asyncio.to_thread(server.start_copy, copy)
            started = time.monotonic()
            for pod in pods:
                await w.goes_on_anew(pod, old[pod.name])
            await w.even(3)
            back = time.monotonic()
            print(f"all shards in new hands after {back - started:.3f} s")
            await w.beating(run_ids, since=back, steps=2)
            await w.finish()
            beyond = await w.check([Fault("old copy", at=copied, until=back)])
            print(f"executions beyond commits: {beyond} of {len(w.executions)}")
            for pod in pods:
                assert "server.changed" in pod.log
                assert "an older copy of the server: commits are lost" in pod.log
            changes = [
                row["value"]
                for row in await server.query(
                    "select value from perdure_meta where key = 'server_change'",
                    database=w.database,
                )
            ]
            assert "older copy" in changes[0]
