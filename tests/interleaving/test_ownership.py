"""Claims, take-overs and the fence that decides who may write."""

from __future__ import annotations

import pytest

from perdure.storage.model import Reason
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import nothing, pending, running
from tests.interleaving.scripts import (
    MOMENT,
    birthing,
    claiming,
    declaring,
    finish,
    moving,
    park,
    renewing,
    sending,
    taking_over,
    writing,
)

pytestmark = pytest.mark.req("CL4", "CL5")


async def test_commit_and_take_over(arena: Arena) -> None:
    await arena.race(
        writing(),
        taking_over(brief=True),
        prepare=running,
        outcomes={
            "commit: committed; take-over: after 1 → running",
            "commit: declared dead; take-over: after 0 → running",
        },
        overlapping={
            "commit: committed; take-over: later after 1 → running",
        },
    )


async def test_finish_and_take_over(arena: Arena) -> None:
    script = writing("finish", outcome=finish())
    await arena.race(
        script,
        taking_over(claim="plain"),
        prepare=running,
        outcomes={
            "finish: committed; take-over: nothing → succeeded",
            "finish: declared dead; take-over: after 0 → running",
        },
    )


async def test_claim_and_take_over(arena: Arena) -> None:
    await arena.race(
        claiming(),
        taking_over(claim="fused", brief=True),
        prepare=pending,
        outcomes={
            "claim: after 0; take-over: after 0 → running",
            "claim: nothing; take-over: after 0 → running",
        },
        overlapping={
            "claim: after 0; take-over: later after 0 → running",
        },
    )


async def test_birth_and_take_over(arena: Arena) -> None:
    await arena.race(
        birthing("birth"),
        taking_over(claim="fused"),
        prepare=nothing,
        waiters={"birth"},
        outcomes={
            "birth: born; take-over: after 0 → running",
            "birth: created; take-over: after 0 → running",
            "birth: created; take-over: later after 0 → running",
        },
        overlapping={"birth: born; take-over: later after 0 → running"},
    )


async def test_birth_and_move_of_the_shard(arena: Arena) -> None:
    await arena.race(
        birthing("birth"),
        moving(claim="fused"),
        prepare=nothing,
        outcomes={
            "birth: born; heir: nothing → running",
            "birth: created; heir: after 0 → running",
            "birth: created; heir: nothing → pending due",
        },
    )


async def test_claim_and_move_of_the_shard(arena: Arena) -> None:
    await arena.race(
        claiming(),
        moving(claim="fused", back=True),
        prepare=pending,
        outcomes={
            "claim: after 0; heir: nothing → running",
            "claim: nothing; give back: parked; heir: after 0 → suspended due",
        },
    )


async def test_claim_and_claim_of_one_runner(arena: Arena) -> None:
    await arena.race(
        claiming("one"),
        claiming("two"),
        prepare=pending,
        outcomes={
            "one: after 0; two: nothing → running",
            "one: nothing; two: after 0 → running",
        },
    )


async def test_take_over_and_take_over(arena: Arena) -> None:
    pair = [
        taking_over(name, runner=n, claim="plain") for name, n in (("heir b", 2), ("heir c", 3))
    ]
    await arena.race(
        *pair,
        prepare=running,
        outcomes={
            "heir b: after 0; heir c: nothing → running",
            "heir b: nothing; heir c: after 0 → running",
        },
    )


async def test_commit_and_park_signal_and_take_over(arena: Arena) -> None:
    work = writing().then(writing("park", outcome=park(), after="commit")).as_mode("fused")
    heir = taking_over(claim="plain", brief=True)
    trio = [work, sending().as_mode("fused"), heir]
    await arena.race(
        *trio,
        prepare=running,
        waiters={"signal"},
        outcomes={
            "commit: committed; park: declared dead; signal: delivered; take-over: after 1 → running",
            "commit: committed; park: declared dead; signal: delivered; take-over: after 1 → running due",
            "commit: committed; park: park-refused; signal: delivered; take-over: after 2 → running",
            "commit: committed; park: parked; signal: delivered; take-over: after 2 → running",
            "commit: committed; park: parked; signal: delivered; take-over: later after 2 → running",
            "commit: declared dead; signal: delivered; take-over: after 0 → running",
            "commit: declared dead; signal: delivered; take-over: after 0 → running due",
        },
        overlapping={
            "commit: committed; park: declared dead; signal: delivered; take-over: later after 1 → running",
            "commit: committed; park: park-refused; signal: delivered; take-over: later after 2 → running",
            "commit: declared dead; signal: delivered; take-over: later after 0 → running",
        },
    )


@pytest.mark.req("CL3")
async def test_renew_and_declare_dead(arena: Arena) -> None:
    pair = [renewing(), declaring()]
    await arena.race(
        *pair,
        prepare=pending,
        waiters={"renew", "declare"},
        outcomes={
            "declare: alive; renew: alive → pending due",
            "declare: dead; renew: dead → pending due",
        },
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_commit_and_park_signal_and_take_over_in_all_detail(statements: Arena) -> None:
    work = writing().then(writing("park", outcome=park(), after="commit")).as_mode("fused")
    trio = [work, sending().as_mode("fused"), taking_over(claim="fused", brief=True)]
    await statements.race(
        *trio,
        prepare=running,
        waiters={"signal"},
        outcomes={
            "commit: committed; park: declared dead; signal: delivered; take-over: after 1 → running",
            "commit: committed; park: declared dead; signal: delivered; take-over: after 1 → running due",
            "commit: committed; park: declared dead; signal: delivered; take-over: later after 1 → running",
            "commit: committed; park: park-refused; signal: delivered; take-over: after 2 → running",
            "commit: committed; park: park-refused; signal: delivered; take-over: later after 2 → running",
            "commit: committed; park: parked; signal: delivered; take-over: after 2 → running",
            "commit: committed; park: parked; signal: delivered; take-over: later after 2 → running",
            "commit: declared dead; signal: delivered; take-over: after 0 → running",
            "commit: declared dead; signal: delivered; take-over: after 0 → running due",
            "commit: declared dead; signal: delivered; take-over: later after 0 → running",
        },
    )


@pytest.mark.slow
async def test_park_and_take_over(arena: Arena) -> None:
    script = writing("park", outcome=park(wake_at=MOMENT, reason=Reason.TIMER))
    await arena.race(
        script,
        taking_over(),
        prepare=running,
        outcomes={
            "park: declared dead; take-over: after 0 → running",
            "park: parked; take-over: after 1 → running",
        },
        overlapping={
            "park: parked; take-over: later after 1 → running",
        },
    )
