"""The shortcut of advisory mode against the keeper that comes back: whoever has renewed in between is not lost."""

from __future__ import annotations

import pytest

from tests.interleaving.arena import Arena
from tests.interleaving.grounds import pending
from tests.interleaving.scripts import (
    coming_back,
    declaring,
    losing_the_session,
    taking_for_lost,
)

pytestmark = pytest.mark.req("CL3", "CL5")

ROBBED = "declare: dead at 0; lock: held; renew: alive → pending due"
"""It had renewed, was told so, and was taken for lost by a test from before that."""

LATE = "declare: dead at 1; lock: held; renew: alive → pending due"
"""It renewed before the first test and took its lock after the last: 0.4 s between two statements."""


async def test_shortcut_and_return(statements: Arena) -> None:
    await statements.race(
        coming_back(),
        taking_for_lost(),
        prepare=pending,
        waiters={"renew", "declare"},
        outcomes={
            "declare: alive; lock: held; renew: alive → pending due",
            "declare: dead at 0; renew: dead → pending due",
            "declare: spared; lock: held; renew: alive → pending due",
            LATE,
        },
    )


async def test_shortcut_and_lost_session(statements: Arena) -> None:
    await statements.race(
        losing_the_session(),
        taking_for_lost(),
        prepare=pending,
        outcomes={
            "declare: alive → pending due",
            "declare: dead at 0 → pending due",
            "declare: spared → pending due",
        },
    )


@pytest.mark.slow
async def test_shortcut_and_expiry_and_return(statements: Arena) -> None:
    """One observer goes by the lock, another by the lease, which is over."""
    await statements.race(
        coming_back().as_mode("fused"),
        taking_for_lost("one").as_mode("fused"),
        declaring().as_mode("fused"),
        prepare=pending,
        waiters={"renew", "declare", "one"},
        outcomes={
            "declare: alive; lock: held; one: alive; renew: alive → pending due",
            "declare: alive; lock: held; one: dead at 1; renew: alive → pending due",
            "declare: alive; lock: held; one: spared; renew: alive → pending due",
            "declare: dead; lock: held; one: dead at 1; renew: alive → pending due",
            "declare: dead; one: dead already; renew: dead → pending due",
            "declare: dead; one: dead at 0; renew: dead → pending due",
        },
    )


@pytest.mark.parametrize(
    ("statement", "old", "new"),
    [
        ("declare_lost", "and renew_count = $2 and", "and $2::bigint is not null and"),
        ("renew", "renew_count = renew_count + 1", "renew_count = renew_count"),
    ],
)
async def test_a_shortcut_that_does_not_ask_for_heartbeats_is_noticed(
    statements: Arena, statement: str, old: str, new: str
) -> None:
    statements.replace_text(statement, old, new)
    report = await statements.run(coming_back(), taking_for_lost(), prepare=pending, planted=True)
    assert ROBBED in report.outcomes
