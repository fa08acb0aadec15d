"""A run claimed anew while its runner still believes to have it (R1): the older body makes room for the new one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Context, step, workflow
from perdure.sharding.slots import slot_of
from perdure.storage.interface import RunStore
from perdure.storage.model import Verdict
from tests.harness.waiting import until
from tests.integration.in_process import Watched, client_on, runner_on

pytestmark = pytest.mark.req("CL4", "SL3")

executed: list[int] = []


@step
async def noted(number: int) -> int:
    executed.append(number)
    return number


@workflow(name="hears twice")
async def hears_twice(ctx: Context) -> list[int]:
    heard = []
    for number in range(2):
        heard.append(await ctx.wait_signal("go", int))
        await ctx.step(noted, number)
    return heard


class SlowAnswers(Watched):
    """The answer to the first park stays on its way until `arrive` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.parked, self.arrive = asyncio.Event(), asyncio.Event()

    def runs(self) -> RunStore:
        store = super().runs()
        commit = store.commit_writes

        async def commit_writes(*args: Any) -> Any:
            verdicts = await commit(*args)
            if Verdict.PARKED in verdicts.values() and not self.parked.is_set():
                self.parked.set()
                await self.arrive.wait()
            return verdicts

        store.commit_writes = commit_writes  # type: ignore[assignment,method-assign]
        return store


async def test_a_claim_that_overtakes_the_answer_to_a_park(migrated_postgres_url: str) -> None:
    executed.clear()
    url, database = migrated_postgres_url, SlowAnswers(migrated_postgres_url)
    async with (
        runner_on(url, [hears_twice], database=database, park_after=0.05) as runner,
        client_on(url, [hears_twice]) as client,
    ):
        handle = await client.start(hears_twice)
        await database.parked.wait()
        await handle.signal("go", 1)
        runner.session.engine._claimer.hint_slots([slot_of(handle.run_id)])

        def claims() -> int:
            return sum(run.run_id == handle.run_id for runs in database.claims for run in runs)

        await until(lambda: claims() == 2, what="the second claim")
        database.arrive.set()
        await until(lambda: executed == [0], what="the first step")
        await handle.signal("go", 2)
        assert await handle.wait(20) == [1, 2]
    assert executed == [0, 1], "each step once"
    assert claims() <= 3, "nobody took what was held"
