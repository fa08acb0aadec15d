"""An application whose runs wait, and tell when they were woken."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

from perdure import App, Context, workflow
from tests.harness.sidelog import ENVIRONMENT, SideLog


class Listening(BaseModel):
    """signals: how many it hears before it ends."""

    signals: int


_side_logs: list[SideLog] = []


def _side_log() -> SideLog:
    if not _side_logs:
        _side_logs.append(SideLog(Path(os.environ[ENVIRONMENT])))
    return _side_logs[0]


@workflow(name="ear")
async def ear(ctx: Context, plan: Listening) -> int:
    """Hears signals "go", one after the other; on each it leaves a line whose key is the signal's payload,
    and before the first one "listens"."""
    with _side_log().execution(ctx.run_id, "listens"):
        pass
    for _ in range(plan.signals):
        word = await ctx.wait_signal("go", str)
        with _side_log().execution(ctx.run_id, word):
            pass
    return plan.signals


class Woken(BaseModel):
    """late: seconds by this machine's clock, which is the database's too. late_by_run_time: by `ctx.now`.

    entered: how often the body was entered.
    """

    late: float
    late_by_run_time: float
    entered: int


_entered: Counter[str] = Counter()


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> Woken:
    _entered[ctx.run_id] += 1
    due = ctx.now().timestamp() + seconds
    await ctx.sleep(seconds)
    return Woken(
        late=time.time() - due,
        late_by_run_time=ctx.now().timestamp() - due,
        entered=_entered[ctx.run_id],
    )


@workflow(name="spared")
async def spared(ctx: Context, _: None) -> int:
    """How many objects this process leaves out when it looks for garbage."""
    return gc.get_freeze_count()


app = App("ears", workflows=[ear, sleeper, spared])
