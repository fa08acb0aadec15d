"""A body that ends its process is set aside at the limit; until somebody resumes it, it runs no code (SL7)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from perdure import Client
from perdure.runtime.authoring.errors import WorkflowCancelled
from perdure.runtime.handle import Handle
from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.model import Reason, RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import check_history
from tests.harness.pods import Pod, Pods
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.bombs import EXIT_CODE, Bomb, Work, bomb, worker
from tests.integration.in_process import SHARDS, client_on, status_of

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

    def entered(self, run_id: str) -> int:
        """How often the run's body was entered."""
        return Counter(e.run for e in self.side_log.executions() if e.key == "body")[run_id]

    async def until_held(self, run_id: str) -> None:
        async def look() -> bool:
            info = await self.client.get(run_id)
            return info is not None and info.reason == Reason.CRASH_LOOP

        await until(look, what=f"{run_id} on hold", deadline=40)

    async def even(self) -> bool:
        status = await self.client.cluster()
        return sorted(r.shards for r in status.runners if r.alive) == [SHARDS // 2] * 2

    async def start_bomb(self, run_id: str) -> Handle[str]:
        return await self.client.start(bomb, Bomb(fuse=0.3, safe=str(self.safe)), run_id=run_id)


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
            await until(site.even, what="both pods holding half of the shards", deadline=30)
            replacing = asyncio.create_task(site.replace())
            plan = Work(work=0.02, stop=str(site.stop))
            innocent = [await client.start(worker, plan, run_id=f"w-{n}") for n in range(INNOCENT)]
            bombs = [await site.start_bomb(run_id) for run_id in of_one_shard()]
            await check_held(site, bombs)
            await check_cancelled(site, bombs[1])
            await check_resumed(site, bombs[0])
            site.stop.touch()
            assert all(await asyncio.gather(*(h.wait(30) for h in innocent)))
            replacing.cancel()
        assert {pod.process.returncode for pod in site.ended} == {EXIT_CODE}
    rows = await read_history(audited_postgres_url)
    assert check_history(rows) == []


def of_one_shard() -> list[str]:
    """Two run ids of one shard: whatever happens, both bombs are in the same pod."""
    by_shard: dict[int, list[str]] = defaultdict(list)
    for number in itertools.count():
        run_id = f"bomb-{number}"
        found = by_shard[shard_of(slot_of(run_id), SHARDS)]
        found.append(run_id)
        if len(found) == 2:
            return found
    raise AssertionError


async def check_held(site: Site, bombs: list[Handle[str]]) -> None:
    """They are held when they have cost so many pods, and run no code until somebody resumes them."""
    for each in bombs:
        await site.until_held(each.run_id)
        events = [e for e in await site.client.events(each.run_id) if e.type == "run-crashlooped"]
        assert [each.run_id in (e.detail or "") for e in events] == [True]
        assert "resume or cancel" in (await site.client.why(each.run_id)).summary
        await each.signal("anything")
    assert len(site.ended) == LIMIT
    entered = [site.entered(each.run_id) for each in bombs]
    assert min(entered) >= LIMIT
    await two_scans(site)
    assert [site.entered(each.run_id) for each in bombs] == entered
    assert [await status_of(site.client, each.run_id) for each in bombs] == [
        RunStatus.SUSPENDED
    ] * 2


async def check_cancelled(site: Site, bomb: Handle[str]) -> None:
    entered = site.entered(bomb.run_id)
    await bomb.cancel("it does harm")
    with pytest.raises(WorkflowCancelled, match="it does harm"):
        await bomb.wait(10)
    assert site.entered(bomb.run_id) == entered


async def check_resumed(site: Site, bomb: Handle[str]) -> None:
    """It has a new budget: one more pod lost does not set it aside again."""
    entered = site.entered(bomb.run_id)
    await site.client.resume(bomb.run_id)
    await until(lambda: len(site.ended) == LIMIT + 1, what="one more pod lost", deadline=20)
    site.safe.touch()
    assert await bomb.wait(30) == "defused"
    assert site.entered(bomb.run_id) >= entered + 2


async def two_scans(site: Site) -> None:
    """As long as two safety scans take at most, while the pods do execute what is not on hold."""
    for _ in range(2):
        plan = Work(work=0.5, stop=str(site.side_log.path))
        await site.client.run(worker, plan, timeout=20)
