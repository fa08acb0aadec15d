"""Long journals delay nobody, loops of sleeps cost what their turns cost, and many sleeps may end at one instant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.parked import measure
from perdure import Client
from perdure.storage.model import RunStatus
from tests.harness.pods import Pods
from tests.harness.postgres import PrivatePostgres
from tests.integration.apps.ears import sleeper
from tests.integration.apps.histories import WORKFLOWS, alarm, long, ticks
from tests.integration.in_process import (
    client_on,
    milliseconds,
    until_status,
    within,
)

STEPS = 10_000
SLEEPERS = 200
SIGNAL = 0.015
"""Seconds in which a signal reaches the body of a parked run (median), however many others are parked."""

pytestmark = pytest.mark.alone


@asynccontextmanager
async def one_pod(url: str, folder: Path, **env: str) -> AsyncIterator[Client]:
    env["SIDE_LOG_FILE"] = str(folder / "side.log")
    named = {key if key.isupper() else f"PERDURE_{key.upper()}": env[key] for key in env}
    async with client_on(url, WORKFLOWS) as client:
        with Pods("tests.integration.apps.histories:app", url, folder, env=named) as pods:
            await pods.ready()
            await client.run(sleeper, 0.1, timeout=30)
            yield client


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("WF5", "SL1")
async def test_a_run_of_ten_thousand_steps_resumes_soon_and_delays_nobody(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    async with one_pod(migrated_postgres_url, tmp_path, park_after="0.5", warm_runs="0") as client:
        resumed: list[float] = []

        async def sleep(number: int) -> float:
            await asyncio.sleep(number / SLEEPERS)  # spread over the time of the replay
            return (await client.run(sleeper, 1.0, timeout=60)).late

        alone = await asyncio.gather(*(sleep(number) for number in range(SLEEPERS)))
        print(f"sleeps beside nothing are late by: {milliseconds(alone)}")

        async def measure_once() -> list[float]:
            handle = await client.start(long, STEPS)
            await until_status(client, handle.run_id, RunStatus.SUSPENDED, deadline=200)
            sleeping = [asyncio.create_task(sleep(number)) for number in range(SLEEPERS)]
            await asyncio.sleep(1.2)  # the first of them are about to wake
            began = time.monotonic()
            await handle.signal("go")
            resumed.append((await handle.wait(60)).at - began)
            print(f"{STEPS} steps are replayed {resumed[-1]:.2f} s after the signal")
            return await asyncio.gather(*sleeping)

        what = f"sleeps beside a replay of {STEPS} steps are late by"
        await within(
            measure_once, what, p50=0.010, p99=0.050, rounds=2, also=lambda: resumed[-1] <= 2.0
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("WF5", "SL1")
async def test_a_loop_of_sleeps_costs_what_its_turns_cost(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    turns, part = 2_000, 200
    async with one_pod(migrated_postgres_url, tmp_path, park_after="0") as client:
        began = time.monotonic()
        ended = await client.run(ticks, turns, timeout=280)
        first, whole = ended[part - 1] - began, ended[-1] - began
        print(f"{part} turns took {first:.2f} s, {turns} took {whole:.2f} s")
        assert whole <= 3 * first * turns / part


@pytest.mark.timeout(120)
@pytest.mark.req("SL1")
async def test_sleeps_that_end_at_one_instant(migrated_postgres_url: str, tmp_path: Path) -> None:
    async with one_pod(migrated_postgres_url, tmp_path, park_after="0.5") as client:

        async def measure_once() -> list[float]:
            due = time.time() + 4.0
            handles = await asyncio.gather(*(client.start(alarm, due) for _ in range(SLEEPERS)))
            ended = await asyncio.gather(*(handle.wait(30) for handle in handles))
            assert min(each.late for each in ended) >= 0.0
            return [each.late for each in ended]

        await within(measure_once, f"{SLEEPERS} sleeps to one instant are late by", p99=0.300)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.req("SL1")
async def test_what_a_hundred_thousand_parked_runs_cost(
    postgres: PrivatePostgres, migrated_postgres_url: str, tmp_path: Path
) -> None:
    found = await measure(postgres, migrated_postgres_url, tmp_path, 100_000, 60.0)
    print(found)
    assert found.memory < 30 * 2**20
    assert found.pod < 0.02
    assert found.database < 0.01
    assert found.signal <= SIGNAL
