"""Durable sleeps end on time: the run has left memory, is claimed just ahead of time, and waits out the rest."""

from __future__ import annotations

import asyncio
import time

import pytest

from perdure import Context, workflow
from perdure.storage.model import Verdict
from tests.integration.in_process import (
    Watched,
    client_on,
    runner_on,
    within,
)

A_SECOND = 50


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> tuple[float, float]:
    """How late it was woken: by this machine's clock, which is the database's too, and by run time."""
    due = ctx.now().timestamp() + seconds
    await ctx.sleep(seconds)
    return time.time() - due, ctx.now().timestamp() - due


@pytest.mark.req("SL1")
@pytest.mark.parametrize(
    ("seconds", "park_after", "count"),
    [
        pytest.param(1.0, 0.2, 4 * A_SECOND, id="1s"),
        pytest.param(
            8.0, 5.0, 20 * A_SECOND, id="8s", marks=[pytest.mark.slow, pytest.mark.timeout(240)]
        ),
    ],
)
async def test_sleeps_started_at_fifty_a_second_end_on_time(
    migrated_postgres_url: str, seconds: float, park_after: float, count: int
):
    url = migrated_postgres_url
    watched = Watched(url)
    async with (
        runner_on(url, [sleeper], database=watched, park_after=park_after),
        client_on(url, [sleeper]) as client,
    ):

        async def measure() -> list[float]:
            began = time.monotonic()
            starts = []
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / A_SECOND - time.monotonic()))
                starts.append(asyncio.create_task(client.start(sleeper, seconds)))
            handles = await asyncio.gather(*starts)
            late = await asyncio.gather(*(h.wait(seconds + 30) for h in handles))
            assert min(by for both in late for by in both) >= 0.0, "one was woken early"
            return [by for by, _ in late]

        await within(measure, f"sleeps of {seconds:g} s are late by", p50=0.010, p99=0.050)
    assert watched.verdicts(Verdict.PARKED) >= count, "some did not leave memory"
