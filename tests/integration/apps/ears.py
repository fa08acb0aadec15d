"""An application whose runs wait, and note in the side log when they are woken."""

from __future__ import annotations

import os
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


app = App("ears", workflows=[ear])
