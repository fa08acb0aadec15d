"""Whoever keeps the lease connects first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.errors import DatabaseUnavailable
from perdure.storage.postgres.precedence import STALE, Precedence

pytestmark = pytest.mark.req("CL11")


class HandClock(SystemClock):
    at = 1_000.0

    def monotonic(self) -> float:
        return self.at


async def test_nobody_waits_while_the_keeper_is_there_or_there_is_none() -> None:
    precedence = Precedence(SystemClock())
    await precedence.wait(0.0)
    precedence.away()
    precedence.back("first")
    await precedence.wait(0.0)
    precedence.lost("one from before")
    await precedence.wait(0.0)
    precedence.ended("one from before")
    precedence.lost("first")
    with pytest.raises(DatabaseUnavailable):
        await precedence.wait(0.0)
    precedence.back("second")
    precedence.ended("second")
    precedence.lost("second")
    await precedence.wait(0.0)


async def test_the_others_wait_and_go_on_when_it_is_back_in_its_thread() -> None:
    precedence = Precedence(SystemClock())
    precedence.away()
    waiting = [asyncio.create_task(precedence.wait(10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    thread = threading.Thread(target=precedence.back, args=["again"])
    thread.start()
    await asyncio.gather(*waiting)
    thread.join()


async def test_waiting_has_an_end_and_says_why_it_waited() -> None:
    precedence = Precedence(SystemClock())
    precedence.away()
    with pytest.raises(DatabaseUnavailable, match="lease has one again"):
        await precedence.wait(0.01)


async def test_a_keeper_that_tries_no_more_is_not_waited_for() -> None:
    clock = HandClock()
    precedence = Precedence(clock)
    precedence.away()
    clock.at += STALE + 1
    await precedence.wait(0.0)
