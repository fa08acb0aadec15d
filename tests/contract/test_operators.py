"""What an operator or a client does to a run that nobody holds."""

from __future__ import annotations

import pytest

from perdure.storage.model import MessageKind, Park, Reason, RunStatus, SendStatus, Verdict
from tests.contract.world import World, entry, write


@pytest.mark.req("SL5")
async def test_a_run_nobody_entered_is_cancelled_at_once(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1")
    assert await world.runs.cancel_unentered("r1", batch_id=1, reason="not 'needed' 🏁")
    record = await world.record("r1")
    assert (record.status, record.reason) == (RunStatus.CANCELLED, "not 'needed' 🏁")
    assert (record.started_at, record.unread) == (None, 0)
    assert record.finished_at is not None
    assert await runner.claim() == {}
    assert (await world.send("r1", "m2")).status is SendStatus.ENDED
    assert await world.runs.count_runs() == {}


@pytest.mark.req("SL5")
async def test_a_held_run_is_cancelled_at_once(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)], outcome=Park(None, 0, Reason.FAILURE)))
    assert await world.runs.cancel_unentered("r1", batch_id=2, reason=None)
    record = await world.record("r1")
    assert (record.status, record.started_at) == (RunStatus.CANCELLED, run.entered_at)
    assert (record.hold, record.reason) == (None, None)
    assert len(await world.journal("r1")) == 1


@pytest.mark.req("SL5")
async def test_a_run_that_was_entered_is_not_ended_from_outside(world: World) -> None:
    runner = await world.runner()
    await world.start("running", "parked", "ended")
    runs = await runner.claim()
    await runner.park(runs["parked"], wake_at=None)
    await runner.finish(runs["ended"])
    for run_id in ("running", "parked", "ended", "unknown"):
        assert not await world.runs.cancel_unentered(run_id, batch_id=3, reason=None)
    assert (await world.record("running")).status is RunStatus.RUNNING
    assert (await world.record("parked")).status is RunStatus.SUSPENDED
    assert (await world.record("ended")).status is RunStatus.SUCCEEDED


async def test_the_holder_of_a_run_that_was_cancelled_from_outside_is_fenced(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await runner.park(run, reason=Reason.OPERATOR)
    await world.runs.cancel_unentered("r1", batch_id=4, reason=None)
    assert await runner.finish(run) is Verdict.FENCED
    assert (await world.record("r1")).status is RunStatus.CANCELLED


async def test_a_cancel_sent_again_after_a_lost_answer_is_still_true(world: World) -> None:
    await world.start("r1")
    assert await world.runs.cancel_unentered("r1", batch_id=5, reason="x")
    assert await world.runs.cancel_unentered("r1", batch_id=5, reason="x")
    assert not await world.runs.cancel_unentered("r1", batch_id=6, reason="y")
    assert (await world.record("r1")).reason == "x"


@pytest.mark.req("SL7")
async def test_a_released_run_is_due_with_its_crash_count_gone(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), reason=Reason.CRASH_LOOP)
    await world.deliver("r1", "m1")
    assert await world.runs.release_hold("r1", batch_id=7)
    record = await world.record("r1")
    assert (record.hold, record.reason, record.reclaim_count) == (None, None, 0)
    assert (record.status, record.unread) == (RunStatus.SUSPENDED, 1)
    assert record.wake_at is not None
    assert "run-resumed" in [event.type for event in await world.runs.read_events("r1")]
    run = await runner.claim_one("r1")
    assert (run.reclaim_count, run.wake_seq) == (0, 1)


async def test_only_a_hold_can_be_released(world: World) -> None:
    runner = await world.runner()
    await world.start("pending", "running", "parked", "ended")
    runs = await runner.claim()
    await runner.park(runs["parked"], wake_at=None)
    await runner.finish(runs["ended"])
    await world.start("fresh")
    for run_id in ("fresh", "running", "parked", "ended", "unknown"):
        assert not await world.runs.release_hold(run_id, batch_id=8)
    assert (await world.record("parked")).wake_at is None


async def test_a_release_sent_again_after_a_lost_answer_is_still_true(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), reason=Reason.OPERATOR)
    assert await world.runs.release_hold("r1", batch_id=9)
    assert await world.runs.release_hold("r1", batch_id=9)
    assert not await world.runs.release_hold("r1", batch_id=10)


# -- suspend and resume


@pytest.mark.req("SL5", "SL7")
async def test_a_run_nobody_entered_is_held_at_once_and_pending_again_when_released(
    world: World,
) -> None:
    runner = await world.runner()
    await world.start("r1")
    assert await world.runs.hold_run("r1", batch_id=11, reason="wait for 'them' 🏁")
    record = await world.record("r1")
    assert (record.status, record.reason) == (RunStatus.SUSPENDED, "operator")
    assert (record.hold, record.wake_at) == ("operator", None)
    await world.deliver("r1", "m1")
    assert (await world.record("r1")).wake_at is None
    assert await runner.claim() == {}
    assert await world.runs.release_hold("r1", batch_id=12)
    record = await world.record("r1")
    assert (record.status, record.reason, record.unread) == (RunStatus.PENDING, None, 1)
    events = [(event.type, event.detail) for event in await world.runs.read_events("r1")]
    assert ("run-suspended", "wait for 'them' 🏁") in events
    assert ("run-resumed", None) in events
    assert list(await runner.claim()) == ["r1"]


@pytest.mark.req("SL5", "SL7")
async def test_a_parked_run_is_held_whatever_its_timer_says(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), wake_at=await world.now() - 1)
    assert await world.runs.hold_run("r1", batch_id=13, reason=None)
    assert await runner.claim() == {}
    await world.runs.release_hold("r1", batch_id=14)
    run = await runner.claim_one("r1")
    assert (run.reclaim_count, run.taken_over) == (0, False)


async def test_only_a_run_nobody_has_is_held_from_outside(world: World) -> None:
    runner = await world.runner()
    await world.start("running", "ended")
    await runner.finish((await runner.claim())["ended"])
    for run_id in ("running", "ended", "unknown"):
        assert not await world.runs.hold_run(run_id, batch_id=15, reason=None)
    assert (await world.record("running")).status is RunStatus.RUNNING


@pytest.mark.req("SL5")
async def test_a_hold_is_kept_as_it_is_and_a_call_sent_again_is_still_true(world: World) -> None:
    runner = await world.runner()
    await world.start("looped", "r1")
    await runner.park((await runner.claim())["looped"], reason=Reason.CRASH_LOOP)
    assert await world.runs.hold_run("looped", batch_id=16, reason="x")
    assert (await world.record("looped")).hold == "crash-loop"
    assert [e.type for e in await world.runs.read_events("looped")].count("run-suspended") == 0
    await world.start("r2")
    for _ in range(2):
        assert await world.runs.hold_run("r2", batch_id=17, reason="x")
    assert [e.type for e in await world.runs.read_events("r2")].count("run-suspended") == 1


@pytest.mark.req("SL5", "SL7")
async def test_a_suspend_in_the_mailbox_is_taken_back_by_the_resume(world: World) -> None:
    """Before the hold, and with it: either way the run is not held a second time."""
    runner = await world.runner()
    await world.start("before", "held")
    runs = await runner.claim()
    for run_id in runs:
        await world.send(run_id, "ask", kind=MessageKind.SUSPEND)
    hold = Park(None, 1, Reason.OPERATOR)
    assert await world.runs.release_hold("before", batch_id=18)
    assert await world.mailbox("before") == []
    assert not await world.runs.release_hold("before", batch_id=19)
    refused = await runner.commit(write(runs["before"], outcome=hold))
    assert refused == {"before": Verdict.PARK_REFUSED}
    assert await runner.commit(write(runs["held"], outcome=hold)) == {"held": Verdict.PARKED}
    record = await world.record("held")
    assert (record.hold, record.wake_at, record.unread) == ("operator", None, 0)
    assert await world.mailbox("held") == ["ask"]
    await world.deliver("held", "mail")
    assert (await world.record("held")).unread == 1
    assert await world.runs.release_hold("held", batch_id=20)
    assert await world.mailbox("held") == ["mail"]
    assert (await world.record("held")).hold is None
