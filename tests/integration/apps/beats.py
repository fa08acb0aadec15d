"""An application for pods that are killed, frozen and stopped: runs of many short steps, all in the side log.

A run beats until it is told to stop, so that a test never guesses how long its runs have to last:
`Beats.file` exists from then on, beside the side log.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pydantic import BaseModel

from perdure import App, Context, current_step, step, workflow
from tests.harness import waiting
from tests.harness.sidelog import ENVIRONMENT, SideLog

STOP = ".stop"


class Beats(BaseModel):
    """work: seconds a step takes. spread: by which part of it that differs from step to step and run to run.
    rest: seconds of durable sleep between two steps. most: steps at most.
    until: each step lasts until this file exists."""

    work: float = 0.0
    spread: float = 0.0
    rest: float = 0.0
    most: int = 10_000
    until: str = ""


class Beat(BaseModel):
    """number: as the step was given it. last: somebody has said stop."""

    number: int
    last: bool


def stop_file(side_log: Path) -> Path:
    """Its existence ends every run after the step it is in."""
    return side_log.with_name(side_log.name + STOP)


def _told_to_stop() -> bool:
    return stop_file(Path(os.environ[ENVIRONMENT])).exists()


_side_logs: list[SideLog] = []


def _side_log() -> SideLog:
    if not _side_logs:
        _side_logs.append(SideLog.from_environment())
    return _side_logs[0]


@step
async def beat(number: int, work: float, until: str = "") -> Beat:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt, input=number):
        await asyncio.sleep(work)
        if until:
            await waiting.until(Path(until).exists, what=f"{until}", deadline=300, interval=0.05)
        return Beat(number=number, last=_told_to_stop())


@workflow(name="beats")
async def beats(ctx: Context, plan: Beats) -> int:
    """The number of steps. A result that belongs to another step fails the run."""
    for number in range(plan.most):
        if number and plan.rest:
            await ctx.sleep(plan.rest)
        work = plan.work * (1 + plan.spread * (ctx.random() - 0.5)) if plan.spread else plan.work
        done = await ctx.step(beat, number, work, plan.until)
        if done.number != number:
            raise AssertionError(f"step {number} was given the result of step {done.number}")
        if done.last:
            return number + 1
    return plan.most


app = App("beats", workflows=[beats])
