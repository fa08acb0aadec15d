"""Strays: marked by who holds their shard, taken by who knows them, and by one of these only (R15)."""

from __future__ import annotations

import pytest

from perdure.storage.model import Reason
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import lent, pending, stray, stray_with_mail
from tests.interleaving.scripts import (
    MOMENT,
    Draft,
    cancelling,
    claiming,
    declaring_dead,
    giving_back,
    lending,
    marking,
    moving,
    park,
    sending,
    writing,
)

pytestmark = pytest.mark.req("CL13", "CL4")


async def test_mark_and_lend(arena: Arena) -> None:
    await arena.race(
        marking(),
        lending(),
        prepare=pending,
        outcomes={
            "holder: nothing; lender: after 0 → running",
            "holder: nothing; lender: nothing → pending stray",
        },
    )


async def test_mark_again_and_lend(arena: Arena) -> None:
    """Mail has made the stray due for its holder, too."""
    await arena.race(
        marking(),
        lending(),
        prepare=stray_with_mail,
        outcomes={"holder: nothing; lender: after 0 → running"},
        overlapping={"holder: nothing; lender: nothing → pending stray"},
    )


async def test_lend_and_lend(arena: Arena) -> None:
    await arena.race(
        lending("one", runner=2),
        lending("two", runner=3),
        prepare=stray,
        outcomes={
            "one: after 0; two: nothing → running",
            "one: nothing; two: after 0 → running",
        },
    )


async def test_lend_and_signal(arena: Arena) -> None:
    await arena.race(
        lending(),
        sending(),
        prepare=stray,
        waiters={"signal"},
        outcomes={
            "lender: after 0; signal: delivered → running",
            "lender: after 0; signal: delivered → running due",
        },
        overlapping={"lender: nothing; signal: delivered → pending stray"},
    )


async def test_mark_and_signal(arena: Arena) -> None:
    await arena.race(
        marking(),
        sending(),
        prepare=pending,
        waiters={"signal"},
        outcomes={"holder: nothing; signal: delivered → pending stray"},
        overlapping={"holder: nothing; signal: delivered → pending due"},
    )


async def test_lend_and_cancel(arena: Arena) -> None:
    await arena.race(
        lending(),
        cancelling(),
        prepare=stray,
        waiters={"cancel"},
        outcomes={
            "cancel message: delivered; cancel: no; lender: after 0 → running due",
            "cancel: yes; lender: nothing → cancelled",
        },
    )


async def test_lend_and_move_of_the_shard(arena: Arena) -> None:
    """The new holder knows the workflow; the mark stays a lender's until somebody takes it."""
    await arena.race(
        lending("lender", runner=3),
        moving(claim="fused"),
        prepare=stray_with_mail,
        outcomes={
            "heir: after 0; lender: nothing → running",
            "heir: nothing; lender: after 0 → running",
        },
    )


async def test_park_of_a_lent_run_and_mark(arena: Arena) -> None:
    script = writing("park", outcome=park(wake_at=MOMENT, reason=Reason.TIMER))
    await arena.race(
        script,
        marking(runner=2),
        prepare=lent,
        outcomes={
            "holder: nothing; park: parked → suspended due",
            "holder: nothing; park: parked → suspended stray",
        },
    )


async def test_write_of_a_lent_run_and_a_claim_of_its_holder(arena: Arena) -> None:
    """Also a holder that has learnt of the workflow meanwhile leaves it alone."""
    await arena.race(
        writing(),
        claiming("holder", runner=2, orphans=True),
        prepare=lent,
        outcomes={"commit: committed; holder: nothing → running"},
    )


def falling() -> Draft:
    """The borrower is declared dead, the holder finds what it had, another runner takes it."""
    parts = [
        *marking(runner=2, orphans=True).as_mode("plain").parts,
        *lending("heir", runner=3).parts,
    ]
    return Draft("fall", [declaring_dead(), *parts])


async def test_write_of_a_lent_run_and_the_fall_of_its_borrower(arena: Arena) -> None:
    await arena.race(
        writing(),
        falling(),
        prepare=lent,
        outcomes={
            "commit: committed; heir: after 1; holder: nothing → running",
            "commit: declared dead; heir: after 0; holder: nothing → running",
        },
        overlapping={"commit: committed; heir: nothing; holder: nothing → running stray"},
    )


# ---- between a statement's snapshot and its locks -----------------------------------------------


async def test_lend_over_another_lender(statements: Arena) -> None:
    await statements.race(
        lending("one", runner=2).as_mode("gated"),
        lending("two", runner=3),
        prepare=stray,
        outcomes={
            "one: after 0; two: nothing → running",
            "one: nothing; two: after 0 → running",
        },
    )


async def test_mark_over_a_park(statements: Arena) -> None:
    script = writing("park", outcome=park(wake_at=MOMENT, reason=Reason.TIMER))
    await statements.race(
        marking(runner=2).as_mode("gated"),
        script,
        prepare=lent,
        outcomes={
            "holder: nothing; park: parked → suspended due",
            "holder: nothing; park: parked → suspended stray",
        },
    )


async def test_mark_over_a_lender(statements: Arena) -> None:
    await statements.race(
        marking().as_mode("gated"),
        lending(),
        prepare=stray_with_mail,
        outcomes={"holder: nothing; lender: after 0 → running"},
    )


def borrowing_for_a_moment() -> Draft:
    """A lender takes the run and parks it again, due at once."""
    (scan,) = lending().as_mode("fused").parts
    return Draft("lender", [scan, giving_back("lender", runner=2)])


async def test_mark_over_a_lender_that_parks(statements: Arena) -> None:
    await statements.race(
        marking().as_mode("gated"),
        borrowing_for_a_moment(),
        prepare=stray_with_mail,
        outcomes={
            "give back: parked; holder: nothing; lender: after 0 → suspended due",
            "give back: parked; holder: nothing; lender: after 0 → suspended stray",
        },
    )


# ---- mistakes that the checks have to find ------------------------------------------------------

LIVES = "exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead)"


async def test_plant_a_lent_run_is_claimed_by_its_holder_as_well(statements: Arena) -> None:
    statements.replace_text("claim", LIVES, "true", times=3)
    script = claiming("holder", runner=2, orphans=True)
    report = await statements.plant(writing(), script, prepare=lent)
    assert any("claimed" in what or "took" in what for _, what in report.violations), str(report)


async def test_plant_a_lender_takes_what_another_has_got(statements: Arena) -> None:
    statements.replace_text("claim_strays", "f.claim_id is not distinct from c.claim_id", "true")
    statements.replace_text("claim_strays", LIVES, "true", times=2)
    statements.replace_text("claim_strays", "stray_revision = revision or", "true or")
    pair = [lending("one", runner=2).as_mode("gated"), lending("two", runner=3)]
    await statements.plant(*pair, prepare=stray)


async def test_plant_a_mark_is_made_at_a_revision_that_has_passed(statements: Arena) -> None:
    """The fence is not locked: the run is put off though nobody is told of it."""
    lock = "        for no key update of f skip locked) f\n), um as"
    statements.replace_text("claim", lock, "        offset 0) f\n), um as")
    pair = [marking().as_mode("gated"), borrowing_for_a_moment()]
    report = await statements.plant(*pair, prepare=stray_with_mail)
    assert any("is put off" in what for _, what in report.violations), str(report)
