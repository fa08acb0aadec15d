"""An application whose runs pass every station of a run's life once: start, step, park, wake, step, finish.

`crossing` takes a step, waits for the signal "go" as long as it takes, and takes another step. Cancelled while it
waits, it takes a step back instead. No pod knows `unknown`, so its runs stay pending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure import App, Context, current_step, step, workflow
from tests.harness.sidelog import SideLog

_side_logs: list[SideLog] = []


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Where the steps of this process write within the block; pods are told by their environment."""
    before = list(_side_logs)
    _side_logs[:] = [SideLog(path, runner="in process")]
    try:
        yield
    finally:
        _side_logs[:] = before


def _side_log() -> SideLog:
    if not _side_logs:
        _side_logs.append(SideLog.from_environment())
    return _side_logs[0]


@step
async def mark(word: str) -> str:
    me = current_step()
    with _side_log().execution(me.run_id, me.key, attempt=me.attempt, input=word):
        return word


@workflow(name="crossing")
async def crossing(ctx: Context) -> list[str]:
    crossed = [await ctx.step(mark, "here")]
    try:
        crossed.append(await ctx.wait_signal("go", str))
    except asyncio.CancelledError:
        await ctx.step(mark, "back")
        raise
    crossed.append(await ctx.step(mark, "there"))
    return crossed


@workflow(name="unknown")
async def unknown(ctx: Context) -> None:
    await ctx.step(mark, "never")


app = App("crossing", workflows=[crossing])
