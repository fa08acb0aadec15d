"""A slot is held by a turn or a running step, never by a wait: who waits keeps nobody from running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Client, Context, WorkflowDefinition, step, workflow
from perdure.testing import running
from tests.harness.waiting import until

SLOTS = 5
PARENTS = 200
NEVER = 3600.0

waiting: set[str] = set()
clients: list[Client] = []


@step
async def tell(parent: str, number: int) -> None:
    await clients[-1].signal(parent, "child", number)


@workflow
async def child(ctx: Context, number: int) -> None:
    await ctx.step(tell, ctx.run_id.removesuffix("-child"), number)


@step
async def begin(parent: str, number: int) -> None:
    await clients[-1].start(child, number, run_id=f"{parent}-child")


@workflow
async def parent(ctx: Context, number: int) -> int:
    """Starts another run and waits, in memory, until it was told by it."""
    await ctx.step(begin, ctx.run_id, number)
    waiting.add(ctx.run_id)
    return int(await ctx.wait_signal("child", int))


@workflow
async def waits(ctx: Context) -> str:
    waiting.add(ctx.run_id)
    return str(await ctx.wait_signal("go", str))


WORKFLOWS: Sequence[WorkflowDefinition[Any, Any]] = [parent, child, waits]


@pytest.mark.req("SL1", "WF1")
async def test_runs_that_wait_in_memory_starve_nobody() -> None:
    waiting.clear()
    async with running(WORKFLOWS, slots=SLOTS, park_after=NEVER) as client:
        clients.append(client)
        idle = [await client.start(waits) for _ in range(PARENTS)]
        await until(lambda: len(waiting) == PARENTS, what="all waiting at once", deadline=30)
        parents = [await client.start(parent, number) for number in range(PARENTS)]
        async with asyncio.timeout(30):
            assert [await each.wait() for each in parents] == list(range(PARENTS))
        assert (await client.why(idle[0].run_id)).status == "running"
        await asyncio.gather(*(each.signal("go", "on") for each in idle))
        async with asyncio.timeout(30):
            assert {await each.wait() for each in idle} == {"on"}
