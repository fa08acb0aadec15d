"""An application whose runs can end their process, beside runs that do their work."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

from pydantic import BaseModel

from perdure import App, Context, current_step, step, workflow
from tests.harness.sidelog import ENVIRONMENT, SideLog

EXIT_CODE = 43


class Bomb(BaseModel):
    """fuse: seconds a step takes before it ends its process, unless the file ``safe`` exists."""

    fuse: float
    safe: str


class Work(BaseModel):
    """stop: the run goes on, step by step of ``work`` seconds, until this file exists."""

    work: float
    stop: str


_side_logs: list[SideLog] = []


def _side_log() -> SideLog:
    if not _side_logs:
        _side_logs.append(SideLog(Path(os.environ[ENVIRONMENT])))
    return _side_logs[0]


@step
async def burn(bomb: Bomb) -> str:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt):
        await asyncio.sleep(bomb.fuse)
        if not Path(bomb.safe).exists():
            os._exit(EXIT_CODE)
        return "defused"


@workflow(name="bomb")
async def bomb(ctx: Context, plan: Bomb) -> str:
    with _side_log().execution(ctx.run_id, "body"):
        return await ctx.step(burn, plan)


@step
async def toil(number: int, work: Work) -> bool:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt, input=number):
        await asyncio.sleep(work.work)
        return Path(work.stop).exists()


@workflow(name="worker")
async def worker(ctx: Context, plan: Work) -> int:
    steps = 0
    while not await ctx.step(toil, steps, plan):
        steps += 1
    return steps


class Stall(BaseModel):
    """letters: of a text on which a regular expression backtracks, twice as long for each more; it keeps the GIL.
    sleep: seconds for which the event loop is blocked in Python instead."""

    letters: int = 0
    sleep: float = 0.0


@step
async def stall(plan: Stall) -> str:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt):
        if plan.letters:
            re.match(r"(a+)+$", "a" * plan.letters + "b")
        time.sleep(plan.sleep)
        return "done"


@workflow(name="staller")
async def staller(ctx: Context, plan: Stall) -> str:
    return await ctx.step(stall, plan)


app = App("bombs", workflows=[bomb, worker, staller])
