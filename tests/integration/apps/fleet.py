"""An application whose pods differ in the workflows they know: `FLEET_KNOWS` names them.

All of them do the same work, a step, a durable sleep and a step, and may wait for a signal in between.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from perdure import App, Context, current_step, step, workflow
from tests.harness.sidelog import ENVIRONMENT, SideLog

KNOWS = "FLEET_KNOWS"
NAMES = ("common", "novel", "service-b")


class Errand(BaseModel):
    """work: seconds of each step. rest: seconds of durable sleep between them. wait: for a signal, too."""

    work: float = 0.0
    rest: float = 0.0
    wait: bool = False


_side_logs: list[SideLog] = []


def _side_log() -> SideLog:
    if not _side_logs:
        _side_logs.append(SideLog(Path(os.environ[ENVIRONMENT]), runner=os.environ["POD_NAME"]))
    return _side_logs[0]


@step
async def run_errand(number: int, work: float) -> str:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt, input=number):
        await asyncio.sleep(work)
        return os.environ["POD_NAME"]


def _named(name: str) -> Any:
    async def body(ctx: Context, errand: Errand) -> list[str]:
        """The pods that executed the steps."""
        first = await ctx.step(run_errand, 1, errand.work)
        if errand.rest:
            await ctx.sleep(errand.rest)
        if errand.wait:
            await ctx.wait_signal("go", str)
        return [first, await ctx.step(run_errand, 2, errand.work)]

    return workflow(name=name)(body)


common, novel, service_b = ALL = tuple(_named(name) for name in NAMES)
Body = Callable[..., Coroutine[Any, Any, Any]]

_known = os.environ.get(KNOWS, ",".join(NAMES)).split(",")
app = App(
    "fleet", workflows=[each for name, each in zip(NAMES, ALL, strict=True) if name in _known]
)
