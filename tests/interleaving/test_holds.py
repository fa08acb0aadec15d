"""An operator's suspend and resume, against whoever else moves the run at that moment."""

from __future__ import annotations

import pytest

from perdure.storage.model import Reason
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import (
    asked_to_hold,
    on_hold,
    parked,
    parked_and_due,
    pending,
    running,
)
from tests.interleaving.scripts import (
    claiming,
    finish,
    park,
    releasing_hold,
    sending,
    suspending,
    writing,
)

pytestmark = pytest.mark.req("SL5", "SL7")
HOLD = park(1, reason=Reason.OPERATOR)


async def test_suspend_and_park(arena: Arena) -> None:
    await arena.race(
        suspending(),
        writing("park", outcome=park()),
        prepare=running,
        waiters={"suspend"},
        outcomes={
            "park: park-refused; suspend message: delivered; suspend: no → running due",
            "park: parked; suspend message: delivered; suspend: yes → suspended",
            "park: parked; suspend: yes → suspended",
        },
    )


async def test_suspend_and_claim(arena: Arena) -> None:
    await arena.race(
        suspending(),
        claiming(),
        prepare=parked_and_due,
        waiters={"suspend"},
        outcomes={
            "claim: after 0; suspend message: delivered; suspend: no → running due",
            "claim: nothing; suspend: yes → suspended",
        },
    )


@pytest.mark.slow
async def test_suspend_never_entered_and_claim(arena: Arena) -> None:
    await arena.race(
        suspending(),
        claiming(),
        prepare=pending,
        waiters={"suspend"},
        outcomes={
            "claim: after 0; suspend message: delivered; suspend: no → running due",
            "claim: nothing; suspend: yes → suspended",
        },
    )


async def test_suspend_and_finish(arena: Arena) -> None:
    await arena.race(
        suspending(),
        writing("finish", outcome=finish()),
        prepare=running,
        waiters={"suspend"},
        outcomes={
            "finish: committed; suspend message: delivered; suspend: no → succeeded",
            "finish: committed; suspend message: ended; suspend: no → succeeded",
        },
    )


@pytest.mark.slow
async def test_suspend_and_signal(arena: Arena) -> None:
    await arena.race(
        suspending(),
        sending(),
        prepare=parked,
        waiters={"suspend", "signal"},
        outcomes={
            "signal: delivered; suspend: yes → suspended",
        },
    )


@pytest.mark.slow
async def test_suspend_twice(arena: Arena) -> None:
    await arena.race(
        suspending("one"),
        suspending("two"),
        prepare=parked,
        waiters={"one", "two"},
        outcomes={
            "one: yes; two: yes → suspended",
        },
    )


async def test_suspend_and_resume(arena: Arena) -> None:
    await arena.race(
        suspending(),
        releasing_hold(),
        prepare=on_hold,
        waiters={"suspend", "resume"},
        outcomes={
            "resume: yes; suspend: yes → suspended",
            "resume: yes; suspend: yes → suspended due",
        },
    )


# A resume that finds no hold yet and then none to take back asks again as long as the run is on hold.
async def test_hold_that_was_asked_for_and_resume(arena: Arena) -> None:
    await arena.race(
        writing("hold", outcome=HOLD),
        releasing_hold(),
        prepare=asked_to_hold,
        waiters={"resume"},
        outcomes={
            "hold: park-refused; resume: yes → running due",
            "hold: parked; resume: yes → suspended due",
        },
        overlapping={
            "hold: parked; resume: no → suspended",
        },
    )


async def test_hold_that_was_asked_for_and_signal(arena: Arena) -> None:
    await arena.race(
        writing("hold", outcome=HOLD),
        sending(),
        prepare=asked_to_hold,
        waiters={"signal"},
        outcomes={
            "hold: park-refused; signal: delivered → running due",
            "hold: parked; signal: delivered → suspended",
        },
    )
