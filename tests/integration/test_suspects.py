"""A run that takes its process down dies alone in the end; the runs beside it do not share its fate (R8)."""

from __future__ import annotations

import asyncio
import math
import re
import time
from pathlib import Path

import pytest

from perdure import Client, WorkflowCrashLooped
from perdure.storage.model import Reason, RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.pods import Pod, Pods
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.bombs import Bomb, Stall, Work, bomb, staller, worker

pytestmark = pytest.mark.req("CL9")

APP = "tests.integration.apps.bombs:app"


class Ward:
    """Pods that are replaced when they end, as an orchestrator does."""

    def __init__(self, url: str, folder: Path, *, lease: float) -> None:
        self.side_log = SideLog(folder / "side.log")
        settings = {"PERDURE_LEASE": f"{lease:g}", "PERDURE_SCAN": "0.4"}
        self.pods = Pods(APP, url, folder, env=settings, side_log=self.side_log.path)
        self._replaced: list[Pod] = []

    async def replace(self) -> None:
        while True:
            for pod in self.pods.all:
                if not pod.alive and pod not in self._replaced:
                    self._replaced.append(pod)
                    self.pods.start()
            await asyncio.sleep(0.02)

    @property
    def lost(self) -> int:
        return len(self._replaced)


async def held(client: Client, run_id: str) -> bool:
    info = await client.get(run_id)
    return info is not None and info.reason == Reason.CRASH_LOOP


async def check_only_one_is_held(client: Client, run_id: str) -> None:
    """What people see of it, by each way there is; and of nobody else."""
    assert [info.run_id for info in await client.list(reason=Reason.CRASH_LOOP.value)] == [run_id]
    assert [info.run_id for info in await client.list(status=RunStatus.SUSPENDED)] == [run_id]
    (event,) = [each for each in await client.events(run_id) if each.type == "run-crashlooped"]
    named = f"{WorkflowCrashLooped.__name__}: run {run_id!r} lost its process"
    assert (event.detail or "").startswith(named)
    why = await client.why(run_id)
    assert "on hold (crash-loop)" in why.summary
    assert why.facts["said"] == event.detail


@pytest.mark.parametrize(
    "innocent",
    [
        pytest.param(16, id="16"),
        pytest.param(200, id="200", marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
async def test_who_kills_its_process_is_held_and_nobody_else(
    audited_postgres_url: str, tmp_path: Path, innocent: int
) -> None:
    """The innocent are in steps that outlast the killer's: each time they lose what they have done."""
    done = tmp_path / "done"
    done.touch()
    async with Client(audited_postgres_url, workflows=[bomb, worker]) as client:
        ward = Ward(audited_postgres_url, tmp_path, lease=1.0)
        with ward.pods:
            for pod in (ward.pods.start(), ward.pods.start()):
                await pod.wait_http("/readyz", deadline=30)
            replacing = asyncio.create_task(ward.replace())
            plan = Work(work=0.6, stop=str(done))
            runs = [await client.start(worker, plan, run_id=f"w-{n}") for n in range(innocent)]
            killer = await client.start(bomb, Bomb(fuse=0.3, safe="/never"), run_id="killer")
            await until(lambda: held(client, killer.run_id), what="the killer held", deadline=60)
            assert ward.lost >= 3
            results = await asyncio.gather(*(run.wait(300) for run in runs))
            assert results == [0] * innocent
            replacing.cancel()
            await check_only_one_is_held(client, killer.run_id)
            print(f"{ward.lost} pods lost, {innocent} innocent runs")
    assert check_history(await read_history(audited_postgres_url)) == []


def letters_for(seconds: float) -> int:
    """How long a text keeps the regular expression busy for at least so long; each letter more doubles it."""
    length = 20
    while True:
        began = time.process_time()
        re.match(r"(a+)+$", "a" * length + "b")
        took = time.process_time() - began
        if took > 0.2:
            return length + math.ceil(math.log2(seconds / took))
        length += 1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_who_holds_the_interpreter_for_three_leases_is_held_and_its_neighbours_finish(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    lease = 2.0
    done = tmp_path / "done"
    async with Client(audited_postgres_url, workflows=[staller, worker]) as client:
        ward = Ward(audited_postgres_url, tmp_path, lease=lease)
        with ward.pods:
            # Three, so that somebody is there to see that the third one is silent.
            for pod in [ward.pods.start() for _ in range(3)]:
                await pod.wait_http("/readyz", deadline=30)
            plan = Work(work=0.05, stop=str(done))
            runs = [await client.start(worker, plan, run_id=f"w-{n}") for n in range(30)]
            stall = Stall(letters=letters_for(4 * lease))
            culprit = await client.start(staller, stall, run_id="culprit")
            await until(lambda: held(client, culprit.run_id), what="the culprit held", deadline=150)
            done.touch()
            assert all(await asyncio.gather(*(run.wait(60) for run in runs)))
            await check_only_one_is_held(client, culprit.run_id)
            assert ward.lost == 0
    assert check_history(await read_history(audited_postgres_url)) == []


@pytest.mark.slow
@pytest.mark.alone
async def test_a_step_that_blocks_the_loop_for_three_leases_loses_nothing_and_stays_alive(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    """Probed as a kubelet would: a second of patience, each second."""
    lease = 2.0
    async with Client(audited_postgres_url, workflows=[staller]) as client:
        ward = Ward(audited_postgres_url, tmp_path, lease=lease)
        with ward.pods:
            pod = ward.pods.start()
            await pod.wait_http("/readyz", deadline=30)
            (before,) = [runner.runner_id for runner in (await client.cluster()).runners]
            run = await client.start(staller, Stall(sleep=3 * lease), run_id="blocker")
            answers = []
            ends = time.monotonic() + 3 * lease + 1
            while time.monotonic() < ends:
                answers.append(await pod.http("/livez", timeout=1.0))
                await asyncio.sleep(1.0)
            assert [answer and answer[0] for answer in answers] == [200] * len(answers)
            assert await run.wait(20) == "done"
            assert [r.runner_id for r in (await client.cluster()).runners if r.alive] == [before]
    assert len(ward.side_log.executions()) == 1
    assert check_history(await read_history(audited_postgres_url)) == []
