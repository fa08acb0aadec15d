"""Parks, and the wake-ups that must not be lost to them."""

from __future__ import annotations

import pytest

from perdure.storage.model import Reason
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import parked, running, running_and_due
from tests.interleaving.scripts import (
    MOMENT,
    claiming,
    due_in_memory,
    park,
    parking_again,
    reading,
    sending,
    writing,
)

pytestmark = pytest.mark.req("SL2")
DUE_PARK = park(1, wake_at=MOMENT, reason=Reason.TIMER)


async def test_park_and_signal(arena: Arena) -> None:
    script = writing("park", outcome=park())
    await arena.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "park: park-refused; signal: delivered → running due",
            "park: parked; signal: delivered → suspended due",
        },
    )


async def test_read_park_read_again_and_signal(arena: Arena) -> None:
    script = reading().then(writing("park", outcome=park())).then(parking_again())
    await arena.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "park again: parked; park: park-refused; signal: delivered → suspended",
            "park: parked; read: m1; signal: delivered → suspended",
            "park: parked; signal: delivered → suspended due",
        },
        overlapping={
            "park again: park-refused; park: park-refused; signal: delivered → running due",
        },
    )


@pytest.mark.req("SL7")
async def test_hold_and_signal(arena: Arena) -> None:
    script = writing("park", outcome=park(reason=Reason.CRASH_LOOP))
    await arena.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "park: parked; signal: delivered → suspended",
        },
        overlapping={
            "park: again, parked; signal: delivered → suspended",
        },
    )


async def test_commit_and_signal(arena: Arena) -> None:
    await arena.race(
        writing(),
        sending(),
        prepare=running,
        outcomes={
            "commit: committed; signal: delivered → running due",
        },
    )


@pytest.mark.req("SL1")
async def test_due_in_memory_and_park(arena: Arena) -> None:
    await arena.race(
        due_in_memory(),
        writing("park", outcome=DUE_PARK),
        prepare=running_and_due,
        outcomes={
            "look: no news; park: parked → suspended due",
        },
        overlapping={
            "look: no news; park: park-refused → running",
        },
    )


async def test_due_in_memory_and_signal(arena: Arena) -> None:
    await arena.race(
        due_in_memory(),
        sending(),
        prepare=running_and_due,
        waiters={"signal"},
        outcomes={
            "look: news; signal: delivered → running due",
            "look: no news; signal: delivered → running due",
        },
    )


async def test_park_that_is_due_and_claim(arena: Arena) -> None:
    script = writing("park", outcome=park(wake_at=MOMENT, reason=Reason.TIMER))
    await arena.race(
        script,
        claiming(),
        prepare=running,
        outcomes={
            "claim: after 1; park: parked → running",
            "claim: nothing; park: parked → suspended due",
        },
    )


async def test_signal_and_claim(arena: Arena) -> None:
    await arena.race(
        sending(),
        claiming(),
        prepare=parked,
        waiters={"signal"},
        outcomes={
            "claim: after 0; signal: delivered → running",
            "claim: nothing; signal: delivered → suspended due",
        },
    )


async def test_signal_and_signal_of_one_id(arena: Arena) -> None:
    pair = [sending("one"), sending("two")]
    await arena.race(
        *pair,
        prepare=parked,
        waiters={"one", "two"},
        outcomes={
            "one: delivered; two: duplicate → suspended due",
            "one: duplicate; two: delivered → suspended due",
        },
    )


async def test_signal_and_signal_of_two_ids(arena: Arena) -> None:
    pair = [sending("one"), sending("two", message="m2")]
    await arena.race(
        *pair,
        prepare=parked,
        waiters={"one", "two"},
        outcomes={
            "one: delivered; two: delivered → suspended due",
        },
    )


@pytest.mark.slow
async def test_due_in_memory_park_and_signal(arena: Arena) -> None:
    script = writing("park", outcome=DUE_PARK).as_mode("fused")
    trio = [due_in_memory().as_mode("fused"), script, sending().as_mode("fused")]
    await arena.race(
        *trio,
        prepare=running_and_due,
        waiters={"signal"},
        outcomes={
            "look: news; park: park-refused; signal: delivered → running due",
            "look: news; park: parked; signal: delivered → suspended due",
            "look: no news; park: park-refused; signal: delivered → running due",
            "look: no news; park: parked; signal: delivered → suspended due",
        },
    )
