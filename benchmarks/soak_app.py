"""The application of the soak, and who drives its runs: steps, sleeps, signals, retries, cancels, large results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from perdure import (
    App,
    Client,
    Context,
    Retry,
    WorkflowCancelled,
    WorkflowDefinition,
    current_step,
    step,
    workflow,
)
from tests.harness.sidelog import Execution, SideLog

_side_logs: list[SideLog] = []


def _execution(number: int) -> AbstractContextManager[None]:
    if not _side_logs:
        _side_logs.append(SideLog.from_environment())
    me = current_step()
    return _side_logs[0].execution(me.run_id, me.key, attempt=me.attempt, input=number)


@step
async def add(number: int) -> int:
    with _execution(number):
        await asyncio.sleep(random.uniform(0, 0.05))
        return number + 1


@step
def block(number: int) -> int:
    with _execution(number):
        return number + 1


@step
async def large(number: int) -> str:
    with _execution(number):
        return "x" * number


@step(retry=Retry(max_attempts=5, base_delay=0.1, max_delay=0.5))
async def flaky(number: int) -> int:
    with _execution(number):
        if current_step().attempt < 3:
            raise ConnectionError("not yet")
        return number + 1


@workflow(name="soak.steps")
async def steps(ctx: Context, number: int) -> int:
    for _ in range(4):
        number = await ctx.step(add, number)
    return await ctx.step(block, number)


@workflow(name="soak.naps")
async def naps(ctx: Context, number: int) -> int:
    for _ in range(3):
        number = await ctx.step(add, number)
        await ctx.sleep(0.5 + 4 * ctx.random())
    return number


@workflow(name="soak.hears")
async def hears(ctx: Context, number: int) -> int:
    for _ in range(2):
        number += await ctx.wait_signal("more", int)
        number = await ctx.step(add, number)
    return number


@workflow(name="soak.retries")
async def retries(ctx: Context, number: int) -> int:
    both = await asyncio.gather(ctx.step(flaky, number), ctx.step(add, number))
    return sum(both)


@workflow(name="soak.large")
async def weighs(ctx: Context, number: int) -> int:
    return len(await ctx.step(large, number))


@workflow(name="soak.ends")
async def ends(ctx: Context, number: int) -> int:
    try:
        await ctx.step(add, number)
        await ctx.sleep("1 hour")
    except asyncio.CancelledError:
        await ctx.step(add, -number)
        raise
    return number


WORKFLOWS: Sequence[WorkflowDefinition[Any, Any]] = [steps, naps, hears, retries, weighs, ends]
app = App("soak", workflows=WORKFLOWS)


async def _steps(client: Client, run_id: str) -> str | None:
    return _expect(await client.run(steps, 1, run_id=run_id), 6)


async def _naps(client: Client, run_id: str) -> str | None:
    return _expect(await client.run(naps, 1, run_id=run_id), 4)


async def _hears(client: Client, run_id: str) -> str | None:
    handle = await client.start(hears, 0, run_id=run_id)
    for _ in range(2):
        await asyncio.sleep(random.uniform(0, 3))
        await handle.signal("more", 10)
    return _expect(await handle.wait(), 22)


async def _retries(client: Client, run_id: str) -> str | None:
    return _expect(await client.run(retries, 1, run_id=run_id), 4)


async def _large(client: Client, run_id: str) -> str | None:
    size = random.randrange(200_000)
    return _expect(await client.run(weighs, size, run_id=run_id), size)


async def _ends(client: Client, run_id: str) -> str | None:
    handle = await client.start(ends, 1, run_id=run_id)
    await asyncio.sleep(random.uniform(0, 4))
    await handle.cancel("enough")
    try:
        await handle.wait()
    except WorkflowCancelled:
        return None
    return "it was not cancelled"


def is_tried_again(execution: Execution) -> bool:
    return execution.key.rpartition("/")[2].startswith("flaky#")


def _expect(found: int, wanted: int) -> str | None:
    return None if found == wanted else f"its result is {found}, not {wanted}"


KINDS: Mapping[str, Callable[[Client, str], Awaitable[str | None]]] = {
    "steps": _steps,
    "naps": _naps,
    "hears": _hears,
    "retries": _retries,
    "large": _large,
    "ends": _ends,
}
