"""Pods that know different workflows share one database: every run is executed where its code is (R15)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perdure import Client, Handle
from perdure.storage.model import RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.pods import Pod, Pods
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.fleet import ALL, KNOWS, Errand, common, novel, service_b

pytestmark = pytest.mark.req("CL13")

BOUND = 2.0
"""Seconds until a run that somebody can execute has begun."""


class Fleet:
    """Pods of one application, each with the workflows that it knows."""

    def __init__(self, url: str, folder: Path, client: Client) -> None:
        self.client = client
        self.side_log = SideLog(folder / "side.log")
        settings = {
            "PERDURE_LEASE": "5",
            "PERDURE_RUNNER_STORAGE": "sql",
            "PERDURE_PARK_AFTER": "0.5",
        }
        self.pods = Pods(
            "tests.integration.apps.fleet:app",
            url,
            folder,
            env=settings,
            side_log=self.side_log.path,
        )
        self._ids = itertools.count(1)
        self.started: dict[str, float] = {}

    async def pod(self, name: str, *knows: str) -> Pod:
        return await self.pods.ready(name, env={KNOWS: ",".join(knows)})

    async def start(self, workflow: Any, count: int, errand: Errand) -> list[Handle[Any]]:
        found = []
        for _ in range(count):
            run_id = f"{workflow.name}-{next(self._ids)}"
            self.started[run_id] = time.monotonic()
            found.append(await self.client.start(workflow, errand, run_id=run_id))
        return found

    def late(self) -> dict[str, float]:
        """Seconds from each start to the run's first step."""
        first: dict[str, float] = {}
        for execution in self.side_log.executions():
            first.setdefault(execution.run, execution.started)
        return {
            run_id: first[run_id] - at for run_id, at in self.started.items() if run_id in first
        }

    async def stray(self, run_id: str) -> bool:
        info = await self.client.get(run_id)
        return info is not None and info.record.stray


async def executed_by(handles: list[Handle[Any]]) -> set[str]:
    """The pods that executed the steps of these runs."""
    results = await asyncio.gather(*(handle.wait(30) for handle in handles))
    return {pod for result in results for pod in result}


async def test_each_run_is_executed_where_its_code_is(audited_url: str, tmp_path: Path) -> None:
    async with Client(audited_url, workflows=ALL) as client:
        fleet = Fleet(audited_url, tmp_path, client)
        with fleet.pods:
            await fleet.pod("v1", "common")
            await fleet.pod("v2", "common", "novel")
            await fleet.pod("b", "service-b")
            await traffic(fleet, rounds=4)
    assert check_history(await read_history(audited_url)) == []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(240)
async def test_a_minute_of_two_releases_and_two_services(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with Client(audited_postgres_url, workflows=ALL) as client:
        fleet = Fleet(audited_postgres_url, tmp_path, client)
        with fleet.pods:
            await fleet.pod("v1", "common")
            await fleet.pod("v2", "common", "novel")
            await fleet.pod("b", "service-b")
            await traffic(fleet, rounds=120)
    assert check_history(await read_history(audited_postgres_url)) == []


async def traffic(fleet: Fleet, *, rounds: int) -> None:
    """A few runs of each workflow every half second: each begins in time, in a pod that knows it, and once."""
    runs: dict[Any, list[Handle[Any]]] = {each: [] for each in ALL}
    for _ in range(rounds):
        for each in ALL:
            runs[each] += await fleet.start(each, 3, Errand(work=0.01, rest=0.7))
        await asyncio.sleep(0.5)
    assert await executed_by(runs[novel]) == {"v2"}
    assert await executed_by(runs[service_b]) == {"b"}
    assert await executed_by(runs[common]) <= {"v1", "v2"}
    late = fleet.late()
    print(f"{len(late)} runs, first step after {max(late.values()):.3f} s at most")
    assert len(late) == 9 * rounds
    assert max(late.values()) <= BOUND
    counted = Counter((e.run, e.key) for e in fleet.side_log.executions())
    assert set(counted.values()) == {1}


@pytest.mark.slow
async def test_a_lent_run_gets_its_mail_and_goes_on_when_its_borrower_is_killed_or_leaves(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with Client(audited_postgres_url, workflows=ALL) as client:
        fleet = Fleet(audited_postgres_url, tmp_path, client)
        with fleet.pods:
            await fleet.pod("holder", "common")
            first = await fleet.pod("first", "novel")
            waiting = await fleet.start(novel, 6, Errand(wait=True))
            working = await fleet.start(novel, 6, Errand(work=3.0))

            async def begun() -> bool:
                parked = await client.list(status=RunStatus.SUSPENDED)
                return len(parked) == 6 and len(fleet.side_log.executions()) == 12

            await until(begun, what="six runs parked, six in their first step", deadline=10)
            first.kill()
            await fleet.pod("second", "novel")
            for handle in waiting:
                await handle.signal("go", "now")
            assert await executed_by(waiting) == {"first", "second"}
            assert await executed_by(working) == {"second"}
    assert check_history(await read_history(audited_postgres_url)) == []


@pytest.mark.slow
@pytest.mark.alone
async def test_what_nobody_knows_waits_visibly_until_the_pod_is_back_with_the_code(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with Client(audited_postgres_url, workflows=ALL) as client:
        fleet = Fleet(audited_postgres_url, tmp_path, client)
        with fleet.pods:
            old = await fleet.pod("v1", "common")
            (lone,) = await fleet.start(novel, 1, Errand(wait=True))
            await until(lambda: fleet.stray(lone.run_id), what="a stray", deadline=10)
            why = await client.why(lone.run_id)
            assert "no live runner knows the workflow 'novel'" in why.summary
            await lone.signal("go", "early")
            assert await executed_by(await fleet.start(common, 3, Errand())) == {"v1"}
            info = await client.get(lone.run_id)
            assert info is not None
            assert info.status is RunStatus.PENDING
            old.terminate()
            assert await old.wait_end() == 0
            began = time.monotonic()
            await fleet.pod("v2", "common", "novel")
            assert await executed_by([lone]) == {"v2"}
            assert time.monotonic() - began < 6  # a boot, and no waiting for a safety scan
    assert check_history(await read_history(audited_postgres_url)) == []


@pytest.mark.slow
@pytest.mark.alone
async def test_a_holder_without_a_free_slot_does_not_keep_others_runs_from_them(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with Client(audited_postgres_url, workflows=ALL) as client:
        fleet = Fleet(audited_postgres_url, tmp_path, client)
        with fleet.pods:
            await fleet.pods.ready("busy", env={KNOWS: "common", "PERDURE_SLOTS": "2"})
            await fleet.start(common, 6, Errand(work=2.0))

            def busy() -> bool:
                return len(fleet.side_log.executions()) >= 2

            await until(busy, what="both slots taken", deadline=10)
            await fleet.pod("b", "service-b")
            assert await executed_by(await fleet.start(service_b, 10, Errand())) == {"b"}
            late = {run_id: s for run_id, s in fleet.late().items() if run_id.startswith("service")}
            assert max(late.values()) <= BOUND
    assert check_history(await read_history(audited_postgres_url)) == []
