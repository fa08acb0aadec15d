"""A host loop whose tasks begin before anybody knows of them (`asyncio.eager_task_factory`, Python 3.12)."""

from __future__ import annotations

import asyncio
import sys

import pytest

from perdure import Context, step, workflow
from perdure.storage.model import RunStatus
from perdure.testing import running
from tests.harness.waiting import until


@step
async def quick(number: int) -> int:
    return number


@step
async def slower(number: int) -> int:
    await asyncio.sleep(0.01)
    return number


@workflow(name="quick-and-slower")
async def both(ctx: Context) -> list[int]:
    found = [await ctx.step(quick, 1), await ctx.step(slower, 2)]
    await ctx.wait_signal("go")
    return [*found, *await asyncio.gather(ctx.step(quick, 3), ctx.step(slower, 4))]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python below 3.12 has no eager tasks")
@pytest.mark.req("SL1")
async def test_runs_park_and_slots_come_back_where_tasks_are_eager() -> None:
    async def parked() -> bool:
        info = await handle.poll()
        return info is not None and info.status is RunStatus.SUSPENDED

    factory = getattr(asyncio, "eager_task_factory")  # noqa: B009  # not in 3.11
    asyncio.get_running_loop().set_task_factory(factory)
    async with running([both], park_after=0, warm_runs=0, slots=1) as client:
        for _ in range(3):
            handle = await client.start(both)
            await until(parked, what="the wait")
            await handle.signal("go")
            assert await handle.wait(20) == [1, 2, 3, 4]
