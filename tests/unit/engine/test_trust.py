"""A step begins only while its runner's lease is trusted, each attempt of it (R2)."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.runtime.authoring.retry import Retry
from perdure.runtime.authoring.step import StepDefinition, StepTarget, step
from perdure.runtime.body import StepCall
from perdure.runtime.engine.activation import Activation
from perdure.runtime.engine.executor import RunningStep, StepExecutor
from perdure.storage.clock import SystemRandomness
from tests.harness.waiting import until


class Lease:
    """Trusted or not, as the test says."""

    def __init__(self, *, trusted: bool) -> None:
        self._event = asyncio.Event()
        self.set(trusted)

    def set(self, trusted: bool) -> None:
        if trusted:
            self._event.set()
        else:
            self._event.clear()

    async def may_start(self) -> None:
        await self._event.wait()


class Run:
    """Takes the place of an activation: keeps what the executor reports."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(run_id="run-1")
        self.record_attempts = False
        self.done: list[tuple[int, str | None]] = []

    def step_done(
        self, key: str, attempt: int, output: str | None, error: str | None, started_at: float
    ) -> None:
        self.done.append((attempt, output))


def start(definition: StepDefinition[Any, Any], lease: Lease, run: Run) -> RunningStep:
    loop = asyncio.get_running_loop()
    executor = StepExecutor(
        loop,
        loop.time,
        SystemRandomness(),
        park_after=5.0,
        result_limit=1000,
        may_start=lease.may_start,
    )
    text, digest = definition.encode_input((), {})
    target = StepTarget(definition, (), {})
    call = StepCall(definition.name, text, digest, lambda _: None, lambda _: Exception(), target)
    activation = cast("Activation", run)
    return executor.start(activation, "0/x#0", call, 1, contextvars.copy_context())


@pytest.mark.req("CL4", "CL11")
async def test_a_step_waits_for_trust_and_is_never_begun_if_it_is_lost():
    calls = []

    @step
    async def call() -> int:
        calls.append(1)
        return 7

    lease, first, second = Lease(trusted=False), Run(), Run()
    start(call, lease, first)
    lost = start(call, lease, second)
    for _ in range(5):
        await asyncio.sleep(0)
    assert calls == []
    lost.stop(lost_ownership=True)
    lease.set(True)
    await until(lambda: first.done, what="the step is done")
    assert first.done == [(1, "7")]
    assert (calls, second.done) == ([1], [])


@pytest.mark.req("CL4", "ST1")
async def test_so_does_each_further_attempt():
    attempts = []
    lease, run = Lease(trusted=True), Run()

    @step(retry=Retry(max_attempts=2, base_delay=0.001))
    async def call() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            lease.set(False)
            raise OSError("once")
        return 7

    running = start(call, lease, run)
    await until(lambda: running.info.attempt == 2, what="the second attempt is due")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (len(attempts), run.done) == (1, [])
    lease.set(True)
    await until(lambda: run.done, what="the step is done")
    assert run.done == [(2, "7")]
