"""A connection that is lost during a write: settle, and send again (R9)."""

from __future__ import annotations

import pytest

from tests.interleaving.arena import Arena
from tests.interleaving.grounds import nothing, on_hold, parked, pending, running
from tests.interleaving.scripts import (
    birthing,
    cancelling,
    finish,
    ghost_write,
    park,
    releasing_hold,
    sending,
    settling,
    settling_slowly,
    starting,
    suspending,
    taking_over,
)

pytestmark = pytest.mark.req("CL11")
WRITES = {
    "commit": (None, "committed → running"),
    "park": (park(), "parked → suspended"),
    "finish": (finish(), "committed → succeeded"),
}


@pytest.mark.parametrize("what", WRITES)
async def test_lost_write_and_settlement(arena: Arena, what: str) -> None:
    outcome, end = WRITES[what]
    await arena.race(
        ghost_write(outcome),
        settling(outcome),
        prepare=running,
        waiters={"settle"},
        title=f"lost {what}|settle+resend",
        outcomes={f"lost: {end}", f"lost: again, {end}"},
        overlapping={f"lost: again, again, {end}"},
    )


@pytest.mark.parametrize(
    "what", ["commit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("park", "finish"))]
)
async def test_lost_write_and_settlement_by_statements(statements: Arena, what: str) -> None:
    outcome, end = WRITES[what]
    await statements.race(
        ghost_write(outcome),
        settling_slowly(outcome),
        prepare=running,
        waiters={"settle"},
        title=f"lost {what}|settle slowly+resend",
        outcomes={f"lost: {end}", f"lost: again, {end}", f"lost: again, again, {end}"},
    )


@pytest.mark.req("WF2")
async def test_start_and_start_of_one_id(arena: Arena) -> None:
    await arena.race(
        starting("one"),
        starting("two"),
        prepare=nothing,
        waiters={"one", "two"},
        outcomes={
            "one: created; two: found → pending due",
            "one: found; two: created → pending due",
        },
    )


@pytest.mark.req("WF2")
async def test_lost_start_and_the_same_start(arena: Arena) -> None:
    pair = [starting("lost"), starting("again", same_call_as="lost")]
    await arena.race(
        *pair,
        prepare=nothing,
        waiters={"lost", "again"},
        outcomes={
            "again: created; lost: created → pending due",
        },
    )


@pytest.mark.req("WF2", "CL4")
async def test_lost_birth_and_the_same_birth(arena: Arena) -> None:
    pair = [birthing("lost", lost=True), birthing("again", same_call_as="lost")]
    await arena.race(
        *pair,
        prepare=nothing,
        waiters={"lost", "again"},
        outcomes={"again: born → running"},
    )


@pytest.mark.slow
@pytest.mark.req("WF2", "CL4")
async def test_lost_birth_the_same_birth_and_take_over(arena: Arena) -> None:
    trio = [
        birthing("lost", lost=True).as_mode("fused"),
        birthing("again", same_call_as="lost").as_mode("fused"),
        taking_over(claim="plain", brief=True),
    ]
    await arena.race(
        *trio,
        prepare=nothing,
        waiters={"lost", "again"},
        outcomes={
            "again: born; take-over: after 0 → running",
            "again: created; take-over: after 0 → running",
            "again: created; take-over: later after 0 → running",
        },
        overlapping={"again: born; take-over: later after 0 → running"},
    )


@pytest.mark.slow
async def test_lost_cancel_and_the_same_cancel(arena: Arena) -> None:
    pair = [cancelling("cancel"), cancelling("again", same_call_as="cancel")]
    await arena.race(
        *pair,
        prepare=pending,
        waiters={"cancel", "again"},
        outcomes={
            "again: yes; cancel: yes → cancelled",
        },
    )


async def test_lost_release_and_the_same_release(arena: Arena) -> None:
    pair = [releasing_hold("resume"), releasing_hold("again", same_call_as="resume")]
    await arena.race(
        *pair,
        prepare=on_hold,
        waiters={"resume", "again"},
        outcomes={
            "again: yes; resume: yes → suspended due",
        },
    )


async def test_lost_suspend_and_the_same_suspend(arena: Arena) -> None:
    pair = [suspending("suspend"), suspending("again", same_call_as="suspend")]
    await arena.race(
        *pair,
        prepare=parked,
        waiters={"suspend", "again"},
        outcomes={
            "again: yes; suspend: yes → suspended",
        },
    )


async def test_lost_signal_and_the_same_signal(arena: Arena) -> None:
    pair = [sending("lost"), sending("again")]
    await arena.race(
        *pair,
        prepare=parked,
        waiters={"lost", "again"},
        outcomes={
            "again: delivered; lost: duplicate → suspended due",
            "again: duplicate; lost: delivered → suspended due",
        },
    )
