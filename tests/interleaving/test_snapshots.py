"""A transaction of somebody else falls between a statement's snapshot and its row locks.

That is where one statement is not one moment: what it has read is old, what it locks is new.
"""

from __future__ import annotations

import pytest

from perdure.storage.model import Reason
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import family, pending, running, running_and_due
from tests.interleaving.scripts import (
    MOMENT,
    Draft,
    cancelling,
    claiming,
    claiming_and_parking_for_later,
    declaring_dead,
    due_in_memory,
    finish,
    moving,
    park,
    sending,
    taking,
    taking_over,
    together,
    writing,
)


@pytest.mark.req("SL2")
async def test_park_over_a_signal(statements: Arena) -> None:
    script = writing("park", outcome=park()).as_mode("gated")
    await statements.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "park: park-refused; signal: delivered → running due",
            "park: parked; signal: delivered → suspended due",
        },
    )


@pytest.mark.req("CL4")
async def test_commit_over_a_take_over(statements: Arena) -> None:
    heir = taking_over(claim="plain", brief=True)
    await statements.race(
        writing().as_mode("gated"),
        heir,
        prepare=running,
        outcomes={
            "commit: committed; take-over: after 1 → running",
            "commit: declared dead; take-over: after 0 → running",
            "commit: fenced; take-over: after 0 → running",
        },
    )


@pytest.mark.req("SL2")
async def test_finish_over_a_signal(statements: Arena) -> None:
    script = writing("finish", outcome=finish()).as_mode("gated")
    await statements.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "finish: again, committed; signal: delivered → succeeded",
            "finish: committed; signal: delivered → succeeded",
            "finish: committed; signal: ended → succeeded",
        },
    )


@pytest.mark.req("CL4")
async def test_finish_of_a_child_over_that_of_its_parent(statements: Arena) -> None:
    child = writing("c1", run="c1", outcome=finish(parent=True)).as_mode("gated")
    parent = writing("finish", outcome=finish()).as_mode("fused")
    await statements.race(
        child,
        parent,
        prepare=family,
        outcomes={
            "c1: again, committed; finish: committed → succeeded",
            "c1: committed; finish: committed → succeeded",
        },
    )


@pytest.mark.req("CL4")
async def test_claim_over_a_move_of_the_shard(statements: Arena) -> None:
    script = moving(claim="plain", back=True)
    await statements.race(
        claiming().as_mode("gated"),
        script,
        prepare=pending,
        outcomes={
            "claim: after 0; heir: nothing → running",
            "claim: nothing; give back: parked; heir: after 0 → suspended due",
        },
    )


@pytest.mark.req("CL4")
async def test_claim_over_a_claim(statements: Arena) -> None:
    pair = [claiming("one").as_mode("gated"), claiming("two")]
    await statements.race(
        *pair,
        prepare=pending,
        outcomes={
            "one: after 0; two: nothing → running",
            "one: nothing; two: after 0 → running",
        },
    )


@pytest.mark.req("SL1")
async def test_claim_over_a_park_for_later(statements: Arena) -> None:
    script = claiming_and_parking_for_later()
    await statements.race(
        claiming().as_mode("gated"),
        script,
        prepare=pending,
        outcomes={
            "claim: after 0; other: nothing → running",
            "claim: nothing; give back: parked; other: after 0 → suspended due",
        },
    )


@pytest.mark.req("SL1")
async def test_due_in_memory_over_a_park(statements: Arena) -> None:
    script = writing("park", outcome=park(1, wake_at=MOMENT, reason=Reason.TIMER)).as_mode("fused")
    look = due_in_memory().as_mode("gated")
    await statements.race(
        look,
        script,
        prepare=running_and_due,
        outcomes={
            "look: no news; park: parked → suspended due",
        },
    )


@pytest.mark.req("SL2")
async def test_due_in_memory_over_a_signal(statements: Arena) -> None:
    look = due_in_memory().as_mode("gated")
    await statements.race(
        look,
        sending(),
        prepare=running_and_due,
        waiters={"signal"},
        outcomes={
            "look: news; signal: delivered → running due",
            "look: no news; signal: delivered → running due",
        },
    )


@pytest.mark.req("SL5")
async def test_cancel_over_a_signal(statements: Arena) -> None:
    pair = [cancelling().as_mode("gated"), sending()]
    await statements.race(
        *pair,
        prepare=pending,
        waiters={"cancel", "signal"},
        outcomes={
            "cancel: yes; signal: delivered → cancelled",
            "cancel: yes; signal: ended → cancelled",
        },
    )


@pytest.mark.req("SL5")
async def test_cancel_over_a_claim(statements: Arena) -> None:
    pair = [cancelling().as_mode("gated"), claiming()]
    await statements.race(
        *pair,
        prepare=pending,
        waiters={"cancel"},
        outcomes={
            "cancel message: delivered; cancel: no; claim: after 0 → running due",
            "cancel: yes; claim: nothing → cancelled",
        },
    )


@pytest.mark.req("CL5")
async def test_taking_shards_over_another_taker(statements: Arena) -> None:
    first, second = (
        together(name, *claiming(name, runner=n, orphans=True, load=True).parts)
        for name, n in (("heir b", 2), ("heir c", 3))
    )
    b = Draft("heir b", [declaring_dead(), taking(2, dead=1), first])
    c = Draft("heir c", [declaring_dead(), taking(3, dead=1), second])
    await statements.race(
        b.with_mode("take", "gated"),
        c,
        prepare=running,
        outcomes={
            "heir b: after 0; heir c: nothing → running",
            "heir b: nothing; heir c: after 0 → running",
        },
    )
