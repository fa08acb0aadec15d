"""The database's clock is set while a runner has runs in memory: periods last as long as they should."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from perdure import Context, step, workflow
from perdure.runtime.engine import start_lines
from perdure.runtime.runner import Runner
from perdure.storage.model import RunStatus
from tests.harness.waiting import until
from tests.integration.in_process import runner_on, until_status

pytestmark = [
    pytest.mark.req("CL11", "SL1"),
    pytest.mark.parametrize("seconds", [-3_600.0, 3_600.0]),
]

_begun: Counter[str] = Counter()
_gates: list[asyncio.Event] = []


@step
async def hold_on(run_id: str) -> None:
    _begun[run_id] += 1
    await _gates[-1].wait()


@workflow(name="listens")
async def listens(ctx: Context, number: int) -> str:
    await ctx.step(hold_on, ctx.run_id)
    return str(await ctx.wait_signal("go"))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _begun.clear()
    _gates[:] = [asyncio.Event()]


class Setting:
    """What this runner is told of the database's time from now on is so many seconds off."""

    def __init__(self, runner: Runner) -> None:
        self.seconds = 0.0
        self.seen = asyncio.Event()
        clock = runner.session.database_clock
        self._observe, self._told = clock.observe, clock._moved
        clock.observe = self.observe  # type: ignore[method-assign]
        clock._moved = self.moved

    def observe(self, db_now: float, asked: float) -> None:
        self._observe(db_now + self.seconds, asked)

    def moved(self, seconds: float) -> None:
        assert self._told is not None
        self._told(seconds)
        self.seen.set()

    async def set(self, seconds: float) -> None:
        self.seconds = seconds
        async with asyncio.timeout(10):
            await self.seen.wait()


async def test_an_idle_run_leaves_memory_all_the_same(migrated_url: str, seconds: float) -> None:
    async with runner_on(migrated_url, [listens], park_after=1.0, scan=0.1) as runner:
        setting, client = Setting(runner), runner.client
        _gates[-1].set()
        await client.start(listens, 1, run_id="idle")

        async def waits() -> bool:
            return bool(await client.journal("idle")) and runner.session.engine.at_work == 0

        await until(waits, what="its wait, in memory")
        await setting.set(seconds)
        assert runner.session.engine.in_memory == 1 or seconds > 0
        await until_status(client, "idle", RunStatus.SUSPENDED, deadline=10)


async def test_a_step_that_is_running_gets_its_line_all_the_same(
    migrated_url: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_lines, "PERIOD", 1.0)
    async with runner_on(migrated_url, [listens], scan=0.1) as runner:
        setting, client = Setting(runner), runner.client
        await client.start(listens, 1, run_id="busy")
        await until(lambda: _begun["busy"], what="its step")
        await setting.set(seconds)

        async def told() -> bool:
            return any(line.type == "step-started" for line in await client.events("busy"))

        await until(told, what="the line of its step", deadline=10)
        _gates[-1].set()
