"""An application of runs with long journals, and of sleeps that end at one instant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from perdure import App, Context, WorkflowDefinition, step, workflow
from tests.integration.apps.ears import sleeper


class Ended(BaseModel):
    """at: this machine's monotonic clock. late: seconds after the instant, by this machine's clock."""

    at: float
    late: float = 0.0


@step
async def count(number: int) -> int:
    return number + 1


@workflow(name="long")
async def long(ctx: Context, steps: int) -> Ended:
    """So many steps, then a wait; ended: when that was over."""
    number = 0
    while number < steps:
        number = await ctx.step(count, number)
    await ctx.wait_signal("go")
    return Ended(at=time.monotonic())


@workflow(name="ticks")
async def ticks(ctx: Context, turns: int) -> list[float]:
    """Each turn is a step and a sleep in which the run is parked. When each of them ended, by the monotonic clock."""
    ended = []
    for number in range(turns):
        await ctx.step(count, number)
        await ctx.sleep(0.001)
        ended.append(time.monotonic())
    return ended


@workflow(name="alarm")
async def alarm(ctx: Context, due: float) -> Ended:
    await ctx.sleep_until(datetime.fromtimestamp(due, UTC))
    return Ended(at=time.monotonic(), late=time.time() - due)


WORKFLOWS: Sequence[WorkflowDefinition[Any, Any]] = [long, ticks, alarm, sleeper]
app = App("histories", workflows=WORKFLOWS)
