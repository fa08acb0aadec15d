"""`ctx.log` while bodies leave memory: what is thrown away writes no line, what happens writes one."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from structlog.testing import LogCapture

from perdure import Context, workflow
from perdure.storage.model import RunStatus
from perdure.testing import running
from tests.harness.waiting import until

pytestmark = pytest.mark.req("WF5")


@workflow(name="leaves-with-words")
async def leaves_with_words(ctx: Context) -> str:
    async def beside() -> None:
        try:
            await ctx.sleep("1 day")
        finally:
            ctx.log.warning("beside is over")

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(beside())
        try:
            found: str = await ctx.wait_signal("go")
        except BaseException as error:
            ctx.log.error("compensating", error=repr(error))
            raise
        finally:
            ctx.log.info("leaving")
        task.cancel()
    ctx.log.debug("done")
    return found


@pytest.mark.parametrize("warm_runs", [0, 10])
async def test_a_line_is_written_where_it_happens_and_not_at_each_park(warm_runs: int) -> None:
    lines = LogCapture()

    async def parked() -> bool:
        info = await handle.poll()
        return info is not None and info.status is RunStatus.SUSPENDED

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[lines])
    try:
        async with running([leaves_with_words], park_after=0, warm_runs=warm_runs) as client:
            handle = await client.start(leaves_with_words)
            await until(parked, what="the wait")
            await handle.signal("stray")
            await until(parked, what="the wait, again")
            await handle.signal("go", "x")
            assert await handle.wait(20) == "x"
    finally:
        structlog.configure(processors=before)
    of_body = [line for line in lines.entries if line.get("workflow") == leaves_with_words.name]
    said = [line["event"] for line in of_body]
    assert said == ["leaving", "beside is over", "done"]
