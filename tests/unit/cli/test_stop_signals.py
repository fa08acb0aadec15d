"""Counting SIGTERM and SIGINT while something is awaited."""

import asyncio
import ctypes
import os
import select
import signal
import threading
import time
from typing import Any

import pytest

from perdure.runtime.cli import stop_signals
from perdure.runtime.cli.stop_signals import CUT_SHORT, NUMBERS, TOGETHER, StopSignals, parent_gone
from perdure.storage.clock import SystemClock
from tests.harness.waiting import until, until_blocking


@pytest.fixture
def signals():
    """Makes `StopSignals` that end nobody's process, and stops them; puts the handlers back."""
    made: list[StopSignals] = []
    before = [signal.getsignal(number) for number in NUMBERS]

    def make(**arguments: Any) -> StopSignals:
        made.append(StopSignals(**{"exit_now": lambda code: None} | arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()
    signal.set_wakeup_fd(-1)
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait_and_cancels_the_work(signals, number):
    stop = signals()
    ended: list[str] = []
    asyncio.get_running_loop().call_soon(tell, number)
    assert await stop.unless(1, forever(ended)) == (False, None)
    assert ended == ["cancelled"]


async def test_work_that_ends_first_wins_and_its_error_is_raised(signals):
    stop = signals()
    assert await stop.unless(1, asyncio.sleep(0, "done")) == (True, "done")

    async def fail() -> None:
        raise LookupError("why")

    with pytest.raises(LookupError, match="why"):
        await stop.unless(1, fail())


class Ahead(SystemClock):
    """A clock that can be set forward."""

    by = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.by


async def test_the_second_wait_ends_at_the_second_signal_only(signals):
    clock = Ahead()
    stop = signals(clock=clock)
    ended: list[str] = []
    tell(signal.SIGTERM)
    assert await stop.unless(1, forever(ended)) == (False, None)
    second = asyncio.ensure_future(stop.unless(2, forever(ended)))
    done, _ = await asyncio.wait((second,), timeout=0.05)
    assert not done
    clock.by = TOGETHER
    tell(signal.SIGINT)
    assert await second == (False, None)
    assert ended == ["cancelled", "cancelled"]


async def test_signals_that_come_together_are_one(signals):
    """As from ``timeout``, which signals its child and then the child's whole group."""
    clock = Ahead()
    clock.monotonic = lambda: 100.0 + clock.by  # type: ignore[method-assign]
    stop = signals(clock=clock)
    tell(signal.SIGTERM)
    tell(signal.SIGINT)
    await until(lambda: stop.count == 1, what="the first", deadline=5)
    clock.by = TOGETHER / 2
    tell(signal.SIGTERM)
    # All three were written to one socket: once it is empty, they were heard.
    await until(lambda: not select.select([stop._mine], [], [], 0)[0], what="all", deadline=5)
    assert stop.count == 1
    clock.by = 2 * TOGETHER
    tell(signal.SIGTERM)
    await until(lambda: stop.count == 2, what="the second", deadline=5)


async def test_a_blocked_main_thread_delays_no_signal(signals):
    """Asleep in C, the main thread runs no signal handler; what a signal begins does not wait for it."""
    begun: list[float] = []
    signals(begin=lambda: begun.append(time.monotonic()))
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        tell(signal.SIGTERM)

    threading.Timer(0.2, send).start()
    until_monotonic = time.monotonic() + 1.0
    while (
        time.monotonic() < until_monotonic
    ):  # nanosleep by hand: a signal does not end it for Python
        _sleep_in_c(until_monotonic - time.monotonic())
    assert begun, "the signal was not heard while the main thread slept"
    assert begun[0] - sent[0] < 0.5


def _sleep_in_c(seconds: float) -> None:
    libc = ctypes.CDLL(None)
    libc.usleep(int(seconds * 1_000_000))


async def test_a_main_loop_that_never_ends_is_cut_when_the_grace_is_over(signals):
    ended: list[object] = []
    stop = signals(grace=0.0, leave=lambda: ended.append("left"), exit_now=ended.append)
    tell(signal.SIGTERM)
    await until(lambda: CUT_SHORT in ended, what="the cut", deadline=10)
    assert ended == ["left", CUT_SHORT]
    stop.close()


async def test_one_that_ended_in_order_is_not_cut(signals):
    ended: list[object] = []
    stop = signals(grace=0.0, exit_now=ended.append)
    tell(signal.SIGTERM)
    assert await stop.unless(1, forever([])) == (False, None)
    stop.close()
    until_blocking(
        lambda: "perdure-signals" not in {thread.name for thread in threading.enumerate()},
        what="the end of the thread that listens",
        deadline=10,
    )
    assert ended == []


async def test_a_loop_that_took_the_signals_for_itself_loses_them_again(signals):
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop = signals(begin=lambda: loop.call_soon_threadsafe(begun.set))
    signal.set_wakeup_fd(-1)
    tell(signal.SIGTERM)
    await asyncio.wait_for(begun.wait(), 5)
    assert stop.count == 1


async def test_the_end_of_the_parent_is_the_first_signal_and_never_a_second(signals):
    clock = Ahead()
    stop = signals(clock=clock)
    ended: list[str] = []
    asyncio.get_running_loop().call_soon(parent_gone)
    assert await stop.unless(1, forever(ended)) == (False, None)
    for _ in range(2):
        clock.by += 2 * TOGETHER
        parent_gone()
    assert stop.count == 1
    clock.by += 2 * TOGETHER
    asyncio.get_running_loop().call_soon(tell, signal.SIGTERM)
    assert await stop.unless(2, forever(ended)) == (False, None)
    assert stop.count == 2


async def test_before_anybody_listens_the_end_of_the_parent_is_a_signal(monkeypatch):
    """A pod that is still importing its application ends at once."""
    monkeypatch.setattr(stop_signals, "_listening", set())
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        parent_gone()
        await until(lambda: heard, what="the signal")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
