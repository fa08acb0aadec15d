"""Pods of the first release and of this one share a schema, under load and while pods are exchanged (R16)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from perdure import Client
from perdure.storage.model import RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.pods import ROOT, Pods
from tests.harness.releases import FIRST, need_commit, wheel_of
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.apps.fleet import ALL, KNOWS, Errand, common, novel, service_b
from tests.integration.fault_world import World

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(420), pytest.mark.req("OP3")]


@pytest.fixture(scope="module")
def first_release(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What to put into PYTHONPATH to run the first release's wheel."""
    need_commit(FIRST)
    return f"{wheel_of(FIRST, tmp_path_factory.mktemp('first-release'))}:{ROOT}"


async def test_both_releases_work_beside_each_other_and_are_exchanged_under_load(
    audited_postgres_url: str, tmp_path: Path, first_release: str
) -> None:
    old = {"PERDURE_DB": audited_postgres_url, "PYTHONPATH": first_release}
    async with World(audited_postgres_url, tmp_path, lease=5.0) as world:
        pods = [world.pods.start(f"first-{n}", env=old) for n in range(2)]
        pods += [world.start_pod(name=f"second-{n}") for n in range(2)]
        for pod in pods:
            await pod.wait_http("/readyz", deadline=60)
        await world.even(4)
        runs = await world.start_runs(150, Beats(work=0.05, rest=0.4, spread=1.0))
        parked = await world.start_runs(50, Beats(work=0.05, rest=7.0))
        began = time.monotonic()
        while time.monotonic() - began < 20:
            runs += await world.start_runs(5, Beats(work=0.02, rest=0.2, most=5))
            await asyncio.sleep(0.5)
        faults = []
        for pod in pods[:2]:  # the update; then half of it is taken back
            new = world.start_pod()
            await new.wait_http("/readyz", deadline=60)
            pod.terminate()
            assert await pod.wait_end() == 0
            await world.even(4)
        again = world.pods.start("first-again", env=old)
        await again.wait_http("/readyz", deadline=60)
        pods[2].terminate()
        assert await pods[2].wait_end() == 0
        faults.append(pods[3].kill())
        await world.even(3, deadline=40)
        lively = [run_id for run_id in runs if await running(world, run_id)]
        await world.beating(lively, since=time.monotonic())
        await world.beating(parked, since=time.monotonic())
        await world.finish(deadline=120)
        await world.check(faults)
        executed = {e.runner or e.pid for e in world.executions}
        assert len(executed) >= 6
        assert "Traceback" not in pods[0].log + again.log


async def running(world: World, run_id: str) -> bool:
    info = await world.client.get(run_id)
    return info is not None and not info.status.final


async def test_a_workflow_that_only_the_first_release_knows_and_one_that_it_does_not(
    audited_postgres_url: str, tmp_path: Path, first_release: str
) -> None:
    """The first release lends nothing and borrows nothing, but what was marked comes to it with its shard."""
    side_log = SideLog(tmp_path / "side.log")
    async with Client(audited_postgres_url, workflows=ALL) as client:
        pods = Pods(
            "tests.integration.apps.fleet:app",
            audited_postgres_url,
            tmp_path,
            env={"PERDURE_LEASE": "5"},
            side_log=side_log.path,
        )
        with pods:
            first = {KNOWS: "common,service-b", "PYTHONPATH": first_release}
            await pods.ready("first", env=first)
            second = await pods.ready("second", env={KNOWS: "common,novel"})

            async def shared() -> bool:
                return sorted(r.shards for r in (await client.cluster()).runners) == [128, 128]

            await until(shared, what="an even share", deadline=20)
            errand = Errand(work=0.01, rest=0.3)
            runs = {
                each: [
                    await client.start(each, errand, run_id=f"{each.name}-{n}") for n in range(20)
                ]
                for each in ALL
            }
            for handle in runs[common]:
                await handle.wait(30)

            async def settled() -> bool:
                left = await client.list(
                    statuses=[RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED], limit=100
                )
                # What the first release holds of `novel` waits for its shard to move, as in that release.
                return all(info.record.stray or info.workflow == novel.name for info in left)

            await until(settled, what="nothing left but strays and novel runs", deadline=40)
            third = await pods.ready("third", env={KNOWS: "common,novel"})
            second.terminate()
            assert await second.wait_end() == 0
            third.terminate()
            for handle in runs[service_b]:
                assert await handle.wait(150) == ["first", "first"]
            await pods.ready("fourth", env={KNOWS: "common,novel"})
            pods.all[0].terminate()
            for handle in runs[novel]:
                assert set(await handle.wait(60)) <= {"second", "third", "fourth"}
    assert check_history(await read_history(audited_postgres_url)) == []
