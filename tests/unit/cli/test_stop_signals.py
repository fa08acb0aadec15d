"""Counting SIGTERM and SIGINT while something is awaited."""

import asyncio
import os
import signal

import pytest

from perdure.runtime.cli.pods import StopSignals


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_wait_and_cancels_the_work(number):
    stop = StopSignals()
    ended: list[str] = []
    asyncio.get_running_loop().call_soon(tell, number)
    assert not await stop.unless(1, forever(ended))
    assert ended == ["cancelled"]


async def test_work_that_ends_first_wins_and_its_error_is_raised():
    stop = StopSignals()
    assert await stop.unless(1, asyncio.sleep(0))

    async def fail() -> None:
        raise LookupError("why")

    with pytest.raises(LookupError, match="why"):
        await stop.unless(1, fail())


async def test_the_second_wait_ends_at_the_second_signal_only():
    stop = StopSignals()
    ended: list[str] = []
    tell(signal.SIGTERM)
    assert not await stop.unless(1, forever(ended))
    second = asyncio.ensure_future(stop.unless(2, forever(ended)))
    done, _ = await asyncio.wait((second,), timeout=0.05)
    assert not done
    tell(signal.SIGINT)
    assert not await second
    assert ended == ["cancelled", "cancelled"]
