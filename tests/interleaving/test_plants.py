"""The same races with a mistake in them: what checks the others must find each of these."""

from __future__ import annotations

from perdure.storage.model import Reason
from tests.harness.interleave import Report
from tests.interleaving.arena import Arena
from tests.interleaving.grounds import family, nothing, parked, pending, running, running_and_due
from tests.interleaving.scripts import (
    MOMENT,
    birthing,
    cancelling,
    child_finishing,
    claiming,
    claiming_and_parking_for_later,
    declaring,
    due_in_memory,
    finish,
    ghost_write,
    moving,
    park,
    parking_blindly,
    reading_twice,
    renewing,
    sending,
    settling_slowly,
    taking_over,
    writing,
)

NOT_DEAD = "   where exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)"
NO_NEWS = "l.wake_seq = (select w.wake_seq from perdure_wakes w where w.run_id = l.run_id)"
UNTOLD = "l.theirs or not exists (select 1 from perdure_wakes p where p.run_id = l.parent_id)"
COMPARE = "coalesce(o.wake_seq = o.seen and o.run_id not in (select run_id from bumped), false)"

PARK = writing("park", outcome=park())
FINISH = writing("finish", outcome=finish())


def found(report: Report, words: str) -> bool:
    """Whether a violation has these words."""
    return any(words in what for _, what in report.violations)


# ---- claims -----------------------------------------------------------------------------------


async def test_claim_without_the_epoch_and_the_shard_row(statements: Arena) -> None:
    statements.replace_text("claim", "s.epoch = m.epoch and s.runner_id = $1", "true")
    statements.replace_text("claim", "as slot_hi, s.epoch\n", "as slot_hi, m.epoch\n")
    statements.replace_text("claim", "f.epoch <= m.epoch", "true", times=2)
    statements.replace_text("claim", "f.epoch <= c.epoch", "true")
    script = moving(claim="fused", back=True)
    report = await statements.plant(claiming(), script, prepare=pending)
    assert found(report, "epoch went down")


async def test_claim_without_the_epoch_of_the_newest_fence(statements: Arena) -> None:
    statements.replace_text("claim", "f.epoch <= c.epoch", "true")
    script = moving(claim="plain", back=True)
    report = await statements.plant(claiming().as_mode("gated"), script, prepare=pending)
    assert found(report, "epoch went down")


async def test_claim_that_takes_what_another_has_just_got(statements: Arena) -> None:
    statements.replace_text("claim", "f.claim_id is not distinct from c.claim_id", "true")
    pair = [claiming("one").as_mode("gated"), claiming("two")]
    report = await statements.plant(*pair, prepare=pending)
    assert found(report, "was claimed 2 times")


async def test_claim_that_trusts_the_due_time_of_its_snapshot(statements: Arena) -> None:
    due = "wake_at <= now() + $9::float8 * interval '1 second')\n), upd"
    statements.replace_text("claim", due, "true)\n), upd")
    pair = [claiming().as_mode("gated"), claiming_and_parking_for_later()]
    report = await statements.plant(*pair, prepare=pending)
    assert found(report, "before its time")


# ---- the fence --------------------------------------------------------------------------------


async def test_write_without_the_claim(statements: Arena) -> None:
    fence = "and f.claim_id = b.claim_id and f.revision = b.revision\n"
    statements.replace_text("commit", fence, "\n")
    heir = taking_over(claim="plain", brief=True)
    report = await statements.plant(writing().as_mode("gated"), heir, prepare=running)
    assert found(report, "history: run")
    assert found(report, "the journal is not what it read") or found(report, "wrote after it")


async def test_write_of_a_runner_that_is_dead(statements: Arena) -> None:
    statements.replace_text("commit", NOT_DEAD + "\n), fl", "   where true\n), fl")
    report = await statements.plant(writing(), taking_over(brief=True), prepare=running)
    assert found(report, "though it was already dead")


async def test_renewal_of_a_runner_that_is_dead(statements: Arena) -> None:
    statements.replace_text("renew", "runner_id = $1 and not dead", "runner_id = $1")
    report = await statements.plant(renewing(), declaring(), prepare=pending)
    assert found(report, "though it was already dead")


# ---- parks and messages -----------------------------------------------------------------------


async def test_park_without_the_comparison(statements: Arena) -> None:
    statements.replace_text("commit", COMPARE, "true")
    report = await statements.plant(PARK, sending(), prepare=running)
    assert found(report, "suspended without wake_at")


async def test_park_that_compares_inside_the_fence(statements: Arena) -> None:
    alone = "(l.outcome = 'park' and not l.hold)\n"
    fenced = "(l.outcome = 'park' and not l.hold and coalesce(l.wake_seq = l.seen, false))\n"
    statements.replace_text("commit", alone, fenced)
    statements.replace_text("commit", "or (l.mine and", "or (l.outcome = 'finish' and l.mine and")
    report = await statements.plant(PARK, sending(), prepare=running)
    assert found(report, "sending it again never helped")


async def test_park_that_compares_with_its_snapshot(statements: Arena) -> None:
    statements.replace_text(
        "commit",
        COMPARE,
        "coalesce((select w.wake_seq from perdure_wakes w where w.run_id = o.run_id) = o.seen, false)",
    )
    report = await statements.plant(PARK.as_mode("gated"), sending(), prepare=running)
    assert found(report, "suspended without wake_at")


async def test_park_that_waits_for_a_sender(statements: Arena) -> None:
    statements.replace_text("commit", "for no key update skip locked) o", "for no key update) o")
    report = await statements.run(PARK, sending(), prepare=running, planted=True)
    assert report.waits["park"] > 0


async def test_seen_that_moves_without_reading_the_mailbox(statements: Arena) -> None:
    script = PARK.then(parking_blindly())
    report = await statements.plant(script, sending(), prepare=running)
    assert found(report, "suspended without wake_at")


async def test_seen_and_mailbox_from_two_reads(statements: Arena) -> None:
    script = reading_twice().then(PARK)
    report = await statements.plant(script, sending(), prepare=running)
    assert found(report, "suspended without wake_at")


async def test_signal_that_bumps_before_it_knows(statements: Arena) -> None:
    statements.replace_text("signal", "set wake_seq = m.wake_seq", "set wake_seq = l.wake_seq + 1")
    statements.replace_text("signal", "from m where w.run_id", "from l where w.run_id")
    pair = [sending("one"), sending("two")]
    report = await statements.plant(*pair, prepare=parked)
    assert found(report, "wake_seq is 2 after 1 messages")


async def test_housekeeping_that_clears_the_timer_of_a_park(statements: Arena) -> None:
    statements.replace_text("due_in_memory", "w.xmin = m.version and ", "")
    script = writing("park", outcome=park(1, wake_at=MOMENT, reason=Reason.TIMER)).as_mode("fused")
    report = await statements.plant(
        due_in_memory().as_mode("gated"), script, prepare=running_and_due
    )
    assert found(report, "its timer is gone")


# ---- endings ----------------------------------------------------------------------------------


async def test_finish_without_the_wake_row(statements: Arena) -> None:
    statements.replace_text("commit", f"l.mine and (l.hold or {NO_NEWS})", "true")
    report = await statements.plant(FINISH, sending(), prepare=running)
    assert report.waits["finish"] > 0
    assert found(report, "left behind")


async def test_finish_over_mail_it_has_not_seen(statements: Arena) -> None:
    statements.replace_text("commit", NO_NEWS, "true")
    report = await statements.plant(FINISH.as_mode("gated"), sending(), prepare=running)
    assert found(report, "left behind")


async def test_finish_of_a_child_that_tells_nobody(statements: Arena) -> None:
    statements.replace_text("commit", f"(l.parent_id is null or {UNTOLD})", "true")
    report = await statements.plant(child_finishing(), PARK, prepare=family)
    assert found(report, "wake_seq is 0 after 1 messages")


async def test_cancel_that_does_not_wait_first(statements: Arena) -> None:
    statements.texts["lock_unentered"] = "select 1 where $1::text is null"
    report = await statements.plant(cancelling(), sending(), prepare=pending)
    assert found(report, "left behind")


# ---- births -----------------------------------------------------------------------------------


async def test_birth_for_a_runner_that_is_dead(statements: Arena) -> None:
    alive = (
        "exists (select 1 from perdure_runners r where r.runner_id = u.runner_id and not r.dead)"
    )
    statements.replace_text("start", alive, "true")
    statements.replace_text("start", "s.runner_id = u.runner_id and s.epoch = u.epoch", "true")
    report = await statements.plant(birthing("birth"), taking_over(), prepare=nothing)
    assert found(report, "though it was already dead")


async def test_birth_of_a_lost_answer_that_is_not_adopted(statements: Arena) -> None:
    statements.replace_text("find_runs", "f.claim_id, f.revision", "null as claim_id, f.revision")
    pair = [birthing("lost", lost=True), birthing("again", same_call_as="lost")]
    report = await statements.plant(*pair, prepare=nothing)
    assert found(report, "nobody knows of the claim")


# ---- settlement -------------------------------------------------------------------------------


async def test_zero_rows_taken_for_fenced(statements: Arena) -> None:
    report = await statements.plant(ghost_write(), settling_slowly(hasty=True), prepare=running)
    assert found(report, "it still has the run")


async def test_zero_rows_taken_for_fenced_by_who_has_finished(statements: Arena) -> None:
    pair = [ghost_write(finish()), settling_slowly(finish(), hasty=True)]
    report = await statements.plant(*pair, prepare=running)
    assert found(report, "but the run is succeeded")
