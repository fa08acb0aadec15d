"""What is recorded for people to read, and what `why` makes of it (DB2, ST1)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure import Client, Context, Retry, WorkflowDefinition, step, workflow
from perdure.runtime.engine import activation
from perdure.runtime.engine.start_lines import StartLines
from perdure.runtime.settings import load_settings
from perdure.storage.errors import DatabaseUnavailable
from perdure.testing import running
from tests.harness.waiting import until

gate: asyncio.Event


@step
async def slow(number: int) -> int:
    await gate.wait()
    return number


@step
async def quick(number: int) -> int:
    return number


@step(retry=Retry(max_attempts=3, strategy="fixed", base_delay=60, jitter=False))
async def flaky() -> None:
    raise ConnectionError("not there")


@workflow
async def works(ctx: Context) -> int:
    total = 0
    for number in range(5):
        total += await ctx.step(quick, number)
    return total + await ctx.step(slow, 7)


@workflow
async def hears(ctx: Context) -> str:
    first = asyncio.create_task(ctx.wait_signal("first"))
    second = asyncio.create_task(ctx.wait_signal("second"))
    await ctx.wait_signal("begin", timeout="1 hour")
    first.cancel()
    return str(await second)


@workflow
async def tries(ctx: Context) -> None:
    await ctx.step(flaky)


WORKFLOWS: Sequence[WorkflowDefinition[Any, Any]] = [works, hears, tries]


@pytest.fixture(autouse=True)
async def closed_gate() -> None:
    global gate
    gate = asyncio.Event()


async def until_fact(client: Client, run_id: str, fact: str) -> str:
    async def look() -> bool:
        return fact in (await client.why(run_id)).facts

    await until(look, what=f"why naming {fact}")
    return (await client.why(run_id)).facts[fact]


async def started_lines(client: Client, run_id: str) -> list[str | None]:
    return [e.detail for e in await client.events(run_id) if e.type == "step-started"]


@pytest.mark.req("DB2", "DB1")
async def test_full_names_the_step_that_is_running_and_spares_the_quick_ones() -> None:
    async with running(WORKFLOWS) as client:
        handle = await client.start(works)
        fact = await until_fact(client, handle.run_id, "running steps")
        assert fact.startswith("slow#0 (attempt 1, since ")
        assert "in step slow#0" in (await client.why(handle.run_id)).summary
        assert await started_lines(client, handle.run_id) == ['{"key": "0/slow#0", "attempt": 1}']
        gate.set()
        assert await handle.wait(10) == 17
        journal = await client.journal(handle.run_id)
        assert [entry.input for entry in journal][-1] == '{"number":7}'
        assert "running steps" not in (await client.why(handle.run_id)).facts


@pytest.mark.req("DB2")
async def test_coarse_records_neither_lines_nor_inputs_and_replays_alike() -> None:
    async with running(WORKFLOWS, recording="coarse", park_after=0, warm_runs=0) as client:
        handle = await client.start(works)
        lines = await started_lines(client, handle.run_id)
        gate.set()
        assert await handle.wait(10) == 17
        journal = await client.journal(handle.run_id)
        assert [entry.input for entry in journal] == [None] * 6
        assert await started_lines(client, handle.run_id) == lines == []
        listening = await client.start(hears)
        await listening.signal("begin")
        await listening.signal("second", "2")
        assert await listening.wait(10) == "2"


@pytest.mark.req("DB2")
@pytest.mark.parametrize(
    ("environment", "meant"),
    [
        ({}, "full"),
        ({"PERDURE_RECORDING": "coarse"}, "coarse"),
        ({"PERDURE_RECORDING": "some"}, "full"),
    ],
)
def test_an_unknown_word_means_full(
    environment: dict[str, str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_settings(environ=environment).recording == meant
    warned = "settings.recording-unknown" in capsys.readouterr().out
    assert warned is (environment.get("PERDURE_RECORDING") == "some")


@pytest.mark.req("DB2")
def test_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.perdure]\nrecording = "full"\n')
    found = load_settings(environ={"PERDURE_RECORDING": "coarse"}, folder=tmp_path)
    assert found.recording == "coarse"


@pytest.mark.req("SL7")
async def test_why_names_the_signals_a_parked_run_waits_for() -> None:
    async with running(WORKFLOWS, park_after=0) as client:
        handle = await client.start(hears)
        fact = await until_fact(client, handle.run_id, "signals awaited")
        assert [part.split(" ")[0] for part in fact.split("; ")] == ["begin", "first", "second"]
        assert "it waits for signal begin until " in (await client.why(handle.run_id)).summary
        await handle.signal("begin")

        async def second_alone() -> bool:
            return (await client.why(handle.run_id)).summary == "it waits for signal second"

        await until(second_alone, what="the wait that was given up being forgotten")
        await handle.signal("second", "2")
        assert await handle.wait(10) == "2"


@pytest.mark.req("ST1")
async def test_why_and_the_journal_say_when_a_step_is_tried_again() -> None:
    async with running(WORKFLOWS) as client:
        handle = await client.start(tries)
        fact = await until_fact(client, handle.run_id, "steps to try again")
        assert fact.startswith("flaky#0, which failed 1 times (ConnectionError: not there)")
        [entry] = await client.journal(handle.run_id)
        assert entry.next_retry_at is not None
        assert entry.next_retry_at == pytest.approx(entry.at + 60, abs=1.0)
        why = await client.why(handle.run_id)
        assert why.facts["due"] in why.summary


async def test_a_long_history_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "LONG_HISTORY", 3)
    async with running(WORKFLOWS) as client:
        gate.set()
        handle = await client.start(works)
        await handle.wait(10)
        told = [e for e in await client.events(handle.run_id) if e.type == "long-history"]
        assert len(told) == 1


@pytest.mark.req("DB2")
async def test_lines_are_given_up_while_the_database_is_away() -> None:
    class Away:
        tries = 0

        async def note_events(self, events: object) -> None:
            self.tries += 1
            raise DatabaseUnavailable("away")

    store, now = Away(), 100.0
    lines = StartLines(store, lambda: now)  # type: ignore[arg-type]
    serving = asyncio.create_task(lines.run())
    try:
        lines.started("r1", "0/a#0", 1)
        now += 1
        await until(lambda: store.tries == 1, what="one try")
        lines.started("r1", "0/b#0", 1)
        lines.ended("r1", "0/b#0")
        lines.started("r1", "0/c#0", 1)
        now += 1
        await until(lambda: store.tries == 2, what="the next line's own try")
        assert not serving.done()
    finally:
        serving.cancel()
