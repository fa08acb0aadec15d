"""A soak whose helpers die has failed, and one with too few kills."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.soak import Load, too_few_kills, with_helpers
from perdure import Client
from perdure.runtime.settings import Settings


@pytest.fixture
def load() -> Load:
    """Starts nothing: none may be in flight."""
    return Load(Client(Settings(db="sqlite:////nowhere.db")), most=0, rate=1000)


async def watch(load: Load) -> None:
    while await load.rest(0.01):
        pass


async def die(load: Load) -> None:
    await load.rest(0.02)
    raise ConnectionError("gone")


async def test_helpers_that_live_until_the_end(load: Load) -> None:
    watching = asyncio.create_task(watch(load), name="watching")
    assert await with_helpers(load, time.monotonic() + 0.1, [watching]) == []


async def test_a_helper_that_dies_ends_the_soak_and_fails_it(load: Load) -> None:
    watching = asyncio.create_task(watch(load), name="watching")
    dying = asyncio.create_task(die(load), name="killing")
    began = time.monotonic()
    found = await with_helpers(load, began + 60, [watching, dying])
    assert found == ["killing ended: ConnectionError('gone')"]
    assert time.monotonic() - began < 30
    assert watching.done()


async def test_a_killer_that_has_no_more_to_kill_is_well(load: Load) -> None:
    resting = asyncio.create_task(asyncio.sleep(0), name="killing")
    assert await with_helpers(load, time.monotonic() + 0.1, [resting]) == []


def test_about_one_kill_a_minute_is_wanted() -> None:
    assert too_few_kills(29, 30) == []
    assert too_few_kills(26, 30) == []
    assert too_few_kills(25, 30) == ["25 pods were killed, not 26"]
    assert too_few_kills(0, 1) == ["0 pods were killed, not 1"]
