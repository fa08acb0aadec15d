"""A body that ends its process is set aside at the limit; until somebody resumes it, it runs no code (SL7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from perdure import Client
from perdure.runtime.authoring.errors import WorkflowCancelled
from perdure.runtime.client import Handle
from perdure.storage.model import Reason, RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.pods import Pod, Pods
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.bombs import EXIT_CODE, Bomb, Work, bomb, worker
from tests.integration.in_process import client_on, status_of, until_status

LIMIT = 2
INNOCENT = 6


class Site:
    """Two pods with bombs in them, and somebody who replaces each pod that ends."""

    def __init__(self, url: str, folder: Path, client: Client) -> None:
        self.client = client
        self.safe, self.stop = folder / "safe", folder / "stop"
        self.side_log = SideLog(folder / "side.log")
        settings = {"PERDURE_LEASE": "1", "PERDURE_MAX_RECLAIMS": str(LIMIT), "PERDURE_SCAN": "0.4"}
        self.pods = Pods(
            "tests.integration.apps.bombs:app",
            url,
            folder,
            env=settings,
            side_log=self.side_log.path,
        )
        self.ended: list[Pod] = []

    async def replace(self) -> None:
        """As an orchestrator does: the pod's place is taken by a new process."""
        while True:
            for pod in self.pods.all:
                if not pod.alive and pod not in self.ended:
                    self.ended.append(pod)
                    self.pods.start()
            await asyncio.sleep(0.02)

    def executions(self, run_id: str, key: str = "0/burn#0") -> int:
        return Counter((e.run, e.key) for e in self.side_log.executions())[run_id, key]

    async def start_bomb(self, run_id: str) -> Handle[str]:
        return await self.client.start(bomb, Bomb(fuse=0.3, safe=str(self.safe)), run_id=run_id)

    async def until_held(self, run_id: str) -> None:
        await until_status(self.client, run_id, RunStatus.SUSPENDED, deadline=40)


@pytest.mark.req("SL7", "CL5", "SL5")
async def test_a_body_that_ends_its_process_is_held_at_the_limit(
    audited_postgres_url: str, tmp_path: Path
):
    async with client_on(audited_postgres_url, [bomb, worker]) as client:
        site = Site(audited_postgres_url, tmp_path, client)
        with site.pods:
            first = [site.pods.start(), site.pods.start()]
            for pod in first:
                await pod.wait_http("/readyz", deadline=30)
            replacing = asyncio.create_task(site.replace())
            plan = Work(work=0.02, stop=str(site.stop))
            innocent = [await client.start(worker, plan, run_id=f"w-{n}") for n in range(INNOCENT)]
            await check_bomb(site, await site.start_bomb("bomb-1"))
            await check_cancelled_bomb(site, await site.start_bomb("bomb-2"))
            site.stop.touch()
            assert all(await asyncio.gather(*(h.wait(30) for h in innocent)))
            replacing.cancel()
        assert {pod.process.returncode for pod in site.ended} == {EXIT_CODE}
    rows = await read_history(audited_postgres_url)
    assert check_history(rows) == []


async def check_bomb(site: Site, handle: Handle[str]) -> None:
    """It is held when it has cost so many pods, and runs no code until it is resumed, with a new budget."""
    run_id, client = handle.run_id, site.client
    await site.until_held(run_id)
    assert len(site.ended) == LIMIT == site.executions(run_id)
    info = await client.get(run_id)
    assert info is not None
    assert info.reason == Reason.CRASH_LOOP
    [event] = [e for e in await client.events(run_id) if e.type == "run-crashlooped"]
    assert run_id in (event.detail or "")
    assert "resume or cancel" in (await client.why(run_id)).summary
    await two_scans(site)
    assert site.executions(run_id) == LIMIT == site.executions(run_id, "body")
    await client.resume(run_id)
    await until(lambda: len(site.ended) == LIMIT + 1, what="one more pod lost", deadline=20)
    site.safe.touch()
    assert await handle.wait(30) == "defused"
    assert site.executions(run_id) == LIMIT + 2
    site.safe.unlink()


async def check_cancelled_bomb(site: Site, handle: Handle[str]) -> None:
    run_id, client = handle.run_id, site.client
    await site.until_held(run_id)
    before = site.executions(run_id, "body")
    assert before == LIMIT
    await handle.signal("anything")
    await two_scans(site)
    assert await status_of(client, run_id) is RunStatus.SUSPENDED
    await client.cancel(run_id, "it does harm")
    with pytest.raises(WorkflowCancelled, match="it does harm"):
        await handle.wait(10)
    assert site.executions(run_id, "body") == before


async def two_scans(site: Site) -> None:
    """As long as two safety scans take at most, while the pods do execute what is not on hold."""
    for _ in range(2):
        plan = Work(work=0.5, stop=str(site.side_log.path))
        await site.client.run(worker, plan, timeout=20)
