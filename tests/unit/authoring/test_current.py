"""What a step knows about itself."""

import asyncio
import contextvars
import threading

import pytest

from perdure.runtime.authoring.current import (
    StepInfo,
    current_step,
    entering_step,
    step_or_none,
)
from perdure.runtime.authoring.errors import OutsideStepError


@pytest.mark.req("ST13")
def test_the_idempotency_key_is_the_same_on_every_attempt_and_nobody_elses():
    first = StepInfo("run-1", "0/charge#0", "charge", attempt=1)
    again = StepInfo("run-1", "0/charge#0", "charge", attempt=2)
    assert first.idempotency_key == again.idempotency_key == "run-1:0/charge#0"
    others = [
        StepInfo("run-1", "0/charge#1", "charge"),
        StepInfo("run-1", "1/charge#0", "charge"),
        StepInfo("run-2", "0/charge#0", "charge"),
    ]
    assert len({info.idempotency_key for info in (first, *others)}) == 4


@pytest.mark.req("ST13")
def test_outside_of_a_step_there_is_none():
    with pytest.raises(OutsideStepError, match=r"inside the function given to ctx\.step"):
        current_step()
    assert step_or_none() is None


@pytest.mark.req("ST13", "WF12")
async def test_tasks_and_threads_of_a_step_know_it():
    seen: list[StepInfo] = []
    with entering_step(StepInfo("run-1", "0/charge#0", "charge", attempt=3)) as info:
        assert current_step() is info
        await asyncio.create_task(note(seen))
        await asyncio.to_thread(lambda: seen.append(current_step()))
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(lambda: seen.append(current_step()),)
        )
        thread.start()
        thread.join()
    assert seen == [info] * 3
    assert seen[0].attempt == 3
    assert step_or_none() is None


async def note(seen: list[StepInfo]) -> None:
    seen.append(current_step())


@pytest.mark.req("ST13")
async def test_two_steps_at_once_see_each_its_own():
    async def one(key: str) -> str:
        with entering_step(StepInfo("run-1", key, "charge")):
            await asyncio.sleep(0)
            return current_step().key

    assert list(await asyncio.gather(one("a"), one("b"))) == ["a", "b"]


def test_losing_the_run_is_seen_by_the_running_code():
    info = StepInfo("run-1", "0/charge#0", "charge")
    with entering_step(info):
        assert not current_step().lost_ownership
        info.lost_ownership = True
        assert current_step().lost_ownership
