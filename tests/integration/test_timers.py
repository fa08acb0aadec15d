"""Durable sleeps end on time: the run has left memory, is claimed just ahead of time, and waits out the rest."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.harness.pods import Pods
from tests.integration.apps.ears import sleeper, spared
from tests.integration.in_process import client_on, within

pytestmark = pytest.mark.alone

A_SECOND = 50


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
    migrated_postgres_url: str, tmp_path: Path, seconds: float, park_after: float, count: int
):
    app, env = "tests.integration.apps.ears:app", {"PERDURE_PARK_AFTER": f"{park_after:g}"}
    env["PERDURE_WARM_RUNS"] = "0"  # each of them is read and replayed
    url = migrated_postgres_url
    env["SIDE_LOG_FILE"] = str(tmp_path / "side.log")
    async with client_on(url, [sleeper, spared]) as client:
        with Pods(app, url, tmp_path, env=env) as pods:
            await pods.ready()
            await client.run(sleeper, 0.1, timeout=30)
            assert await client.run(spared, None, timeout=30) > 10_000

            async def measure() -> list[float]:
                began = time.monotonic()
                runs = []
                for number in range(count):
                    await asyncio.sleep(max(0.0, began + number / A_SECOND - time.monotonic()))
                    run = client.run(sleeper, seconds, timeout=seconds + 30)
                    runs.append(asyncio.create_task(run))
                woken = await asyncio.gather(*runs)
                assert min(each.late for each in woken) >= 0.0, "one was woken early"
                assert min(each.late_by_run_time for each in woken) >= 0.0
                assert {each.entered for each in woken} == {2}, "one did not leave memory"
                return [each.late for each in woken]

            what = f"sleeps of {seconds:g} s are late by"
            await within(measure, what, p50=0.010, p99=0.050)
