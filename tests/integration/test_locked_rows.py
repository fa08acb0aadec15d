"""Rows that a foreign session keeps locked stop nobody but their own run (R1)."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from perdure import Context, step, workflow
from perdure.storage.errors import ConflictError
from tests.harness.waiting import until
from tests.integration.in_process import Watched, client_on, rows_held, runner_on

pytestmark = pytest.mark.req("CL4")

LOCK_TIMEOUT = 0.5


@step
async def same(number: int) -> int:
    return number


@workflow(name="ends")
async def ends(ctx: Context) -> int:
    return await ctx.step(same, await ctx.wait_signal("go", int))


async def test_a_locked_cold_row_keeps_nobody_else_from_ending(migrated_postgres_url: str) -> None:
    url = migrated_postgres_url
    database = Watched(url, lock_timeout=LOCK_TIMEOUT)

    def conflicts() -> int:
        return sum(isinstance(batch.error, ConflictError) for batch in database.batches)

    async with (
        runner_on(url, [ends], database=database, park_after=60.0),
        client_on(url, [ends]) as client,
    ):
        kept = await client.start(ends)
        others = [await client.start(ends) for _ in range(12)]
        first, second = others[:6], others[6:]
        async with rows_held(url, kept.run_id, "runs"):
            await asyncio.gather(*(handle.signal("go", 1) for handle in (kept, *first)))
            assert [await handle.wait(20) for handle in first] == [1] * 6
            await until(
                lambda: sum(kept.run_id in batch.run_ids for batch in database.batches) > 4,
                what="the end of the locked one, tried again and again",
            )
            await asyncio.gather(*(handle.signal("go", 2) for handle in second))
            assert [await handle.wait(20) for handle in second] == [2] * 6
            assert conflicts() == 1, "one wait of one lock time-out, and none after it"
        assert await kept.wait(20) == 1
        assert conflicts() == 1


INSERTED = """
    insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload, payload_format, version, source)
    values ('c', 1, 'ends', 1, 1, 'null', 1, 1, 'app')"""


@pytest.mark.req("ST12")
async def test_a_start_that_meets_an_unfinished_insert_keeps_no_other_waiting(
    migrated_postgres_url: str,
) -> None:
    url = migrated_postgres_url
    database = Watched(url, lock_timeout=LOCK_TIMEOUT)
    async with runner_on(url, [ends], database=database) as runner:
        foreign = await asyncpg.connect(url)
        try:
            await foreign.execute("begin")
            await foreign.execute(INSERTED)
            calls = {
                run_id: asyncio.create_task(runner.client.start(ends, run_id=run_id))
                for run_id in "abcdefgh"
            }
            kept = calls.pop("c")
            for handle in await asyncio.gather(*calls.values()):
                await handle.signal("go", 1)
                assert await handle.wait(20) == 1
            assert not kept.done()
            await foreign.execute("rollback")
            handle = await kept
            await handle.signal("go", 2)
            assert await handle.wait(20) == 2
        finally:
            foreign.terminate()
