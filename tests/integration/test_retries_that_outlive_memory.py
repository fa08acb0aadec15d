"""Attempts of a step whose run leaves memory, or its process, between them: count and budget go on (ST1)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from perdure import App, Context, Retry, Runner, Settings, current_step, step, workflow
from perdure.storage.connect import DatabaseSettings, migrate
from perdure.testing import running
from tests.harness.waiting import until

pytestmark = pytest.mark.req("ST1")

BUDGET = 1.0
PAUSE = 0.3

executed: list[tuple[int, float]] = []


@step(
    retry=Retry(
        max_attempts=None, max_elapsed=BUDGET, strategy="fixed", base_delay=PAUSE, jitter=False
    )
)
async def fails() -> None:
    executed.append((current_step().attempt, time.monotonic()))
    raise ConnectionError("never there")


@workflow
async def hopeless(ctx: Context) -> None:
    await ctx.step(fails)


@pytest.fixture(autouse=True)
def nothing_executed() -> None:
    executed.clear()


@pytest.mark.parametrize("park_after", [5.0, 0.1], ids=["in memory", "recorded"])
async def test_the_budget_is_one_for_all_attempts(park_after: float) -> None:
    async with running([hopeless], park_after=park_after) as client:
        with pytest.raises(ConnectionError):
            await client.run(hopeless, timeout=10)
    began = executed[0][1]
    assert [number for number, _ in executed] == list(range(1, len(executed) + 1))
    assert len(executed) in (3, 4)  # a slow machine makes fewer
    assert executed[-1][1] - began <= BUDGET + 0.1


async def test_neither_count_nor_budget_begin_anew_in_another_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'perdure.db'}"
    migrate(DatabaseSettings(url))
    settings = Settings(db=url, park_after=0.1)
    app = App("retries", workflows=[hopeless])

    first = Runner(app, settings, port=False)
    await first.start()
    try:
        run_id = (await first.client.start(hopeless)).run_id

        async def recorded() -> bool:
            return len(await first.client.journal(run_id)) >= 1

        await until(recorded, what="a failed attempt that is an entry")
    finally:
        await first.stop()
    before = len(executed)
    began = executed[0][1]
    await until(lambda: time.monotonic() > began + BUDGET, what="the end of the budget")

    second = Runner(app, settings, port=False)
    await second.start()
    try:
        with pytest.raises(ConnectionError):
            await second.client.wait(run_id, timeout=10)
        kinds = [entry.kind for entry in await second.client.journal(run_id)]
    finally:
        await second.stop()
    recorded_attempts = len(kinds) - 1
    assert kinds == ["attempt"] * recorded_attempts + ["step"]
    # The first process may have ended before its last attempt was an entry.
    assert [number for number, _ in executed[:before]] == list(range(1, before + 1))
    assert [number for number, _ in executed[before:]] == [recorded_attempts + 1]


class Busy(Exception):
    """Says itself when to come again."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"again in {retry_after} s")
        self.retry_after = retry_after


@step(retry=Retry(max_attempts=4))
async def asks_for_time() -> int:
    attempt = current_step().attempt
    executed.append((attempt, time.monotonic()))
    if attempt < 4:
        raise Busy({1: 0.01, 2: 0.3, 3: 0.01}[attempt])
    return attempt


@workflow
async def patient(ctx: Context) -> int:
    return await ctx.step(asks_for_time)


async def test_after_one_attempt_on_record_every_later_one_is() -> None:
    """Else a lost process would try again under a number that was used."""
    async with running([patient], park_after=0.1) as client:
        handle = await client.start(patient)
        assert await handle.wait(10) == 4
        journal = await client.journal(handle.run_id)
    assert [(entry.kind, entry.attempt) for entry in journal] == [
        ("attempt", 2),  # the first came again so soon that it was not written down
        ("attempt", 3),
        ("step", 4),
    ]
