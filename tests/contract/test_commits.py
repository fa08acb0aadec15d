"""Commits: whole or not at all, behind the fence (R1)."""

from __future__ import annotations

import pytest

from perdure.storage.clock import to_instant
from perdure.storage.errors import DataRefused, RunnerDeclaredDead
from perdure.storage.model import (
    Entry,
    EntryKind,
    Finish,
    Park,
    Reason,
    RunEvent,
    RunStatus,
    RunWrite,
    SendStatus,
    Verdict,
)
from tests.contract.world import SHARDS, World, entry, write

ODD = 'it\'s "odd" \\ 🏁 %s\n\t' + '{"a": [1, null]}'


async def test_entries_are_kept_as_written(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    at = run.entered_at
    entries = [
        Entry(
            seq=1,
            kind=EntryKind.STEP,
            key="/charge#0",
            at=to_instant(at + 0.000001),
            attempt=3,
            input_hash=-(1 << 63),
            input=ODD,
            output=ODD,
            started_at=at,
        ),
        Entry(
            seq=2,
            kind=EntryKind.STEP,
            key="/ship#0",
            at=to_instant(at + 1),
            status="error",
            error='{"type": "E"}',
        ),
        Entry(seq=3, kind=EntryKind.TIMER, key="/sleep#0", at=to_instant(at + 2.5)),
        Entry(
            seq=4,
            kind=EntryKind.ATTEMPT,
            key="/x#0",
            at=to_instant(at + 3),
            output="1700000000000000",
        ),
        Entry(
            seq=5, kind=EntryKind.CANCEL, key="", at=to_instant(at + 4), input_hash=(1 << 63) - 1
        ),
    ]
    verdicts = await runner.commit(write(run, entries=entries))
    assert verdicts == {"r1": Verdict.COMMITTED}
    assert list(await world.journal("r1")) == entries
    record = await world.record("r1")
    assert (record.next_seq, record.status, record.claim_id) == (6, RunStatus.RUNNING, run.claim_id)


async def test_writes_of_one_run_follow_each_other(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    for step in range(3):
        verdicts = await runner.commit(
            write(run, revision=run.revision + step, entries=[entry(step + 1)])
        )
        assert verdicts["r1"] is Verdict.COMMITTED
    assert [item.seq for item in await world.journal("r1")] == [1, 2, 3]


async def test_journals_of_several_runs_and_of_none(world: World) -> None:
    runner = await world.runner()
    await world.start("r1", "r2")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)]))
    journals = await world.runs.read_journals(["r1", "r2"])
    assert [list(journals[run_id]) for run_id in ("r1", "r2")] == [[entry(1)], []]
    assert await world.runs.read_journals([]) == {}


async def test_consumed_messages_leave_the_mailbox_and_others_stay(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1", "m2", "m3")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1), entry(2)], consumed=[("m2", 1), ("m3", 2)]))
    assert await world.mailbox("r1") == ["m1"]
    assert (await world.record("r1")).unread == 1
    assert await world.wake_seq("r1") == 3


async def test_events_ride_on_the_write(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    event = RunEvent("timer-set", to_instant(run.entered_at + 1.000001), detail=ODD)
    await runner.commit(write(run, events=[event]))
    assert event in await world.runs.read_events("r1")


# -- parks


async def test_a_park_leaves_memory_with_its_entries(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    wake_at = to_instant(run.entered_at + 3_600.000001)
    outcome = Park(wake_at, 0, Reason.TIMER)
    verdicts = await runner.commit(write(run, entries=[entry(1)], outcome=outcome))
    assert verdicts == {"r1": Verdict.PARKED}
    record = await world.record("r1")
    assert (record.status, record.reason, record.wake_at) == (RunStatus.SUSPENDED, "timer", wake_at)
    assert (record.claim_id, record.runner_id, record.next_seq) == (None, None, 2)


@pytest.mark.req("SL2")
async def test_a_park_is_refused_when_a_message_came_and_its_entries_are_kept(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await world.deliver("r1", "m1")
    park = write(run, entries=[entry(1)], outcome=Park(None, 0, Reason.SIGNAL))
    assert await runner.commit(park) == {"r1": Verdict.PARK_REFUSED}
    record = await world.record("r1")
    assert (record.status, record.claim_id, record.next_seq) == (RunStatus.RUNNING, run.claim_id, 2)
    again = write(run, revision=run.revision + 1, outcome=Park(None, 1, Reason.SIGNAL))
    assert await runner.commit(again) == {"r1": Verdict.PARKED}
    assert (await world.record("r1")).wake_at is None


@pytest.mark.req("SL7")
async def test_a_hold_is_never_refused_and_never_due(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await world.deliver("r1", "m1")
    park = write(run, outcome=Park(run.entered_at, 0, Reason.NONDETERMINISM))
    assert await runner.commit(park) == {"r1": Verdict.PARKED}
    record = await world.record("r1")
    assert (record.status, record.hold, record.wake_at) == (
        RunStatus.SUSPENDED,
        "nondeterminism",
        None,
    )
    assert record.unread == 1
    assert await runner.claim() == {}


# -- finishes


async def test_a_finish_ends_the_run_with_its_last_entries(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    end = Finish(RunStatus.SUCCEEDED, result=ODD)
    assert await runner.commit(write(run, entries=[entry(1)], outcome=end)) == {
        "r1": Verdict.COMMITTED
    }
    record = await world.record("r1")
    assert (record.status, record.result, record.error) == (RunStatus.SUCCEEDED, ODD, None)
    assert record.started_at == run.entered_at
    assert record.finished_at is not None
    assert record.created_at <= run.entered_at <= record.finished_at
    assert (record.hold, record.wake_at, record.claim_id, record.runner_id) == (
        None,
        None,
        None,
        None,
    )
    assert list(await world.journal("r1")) == [entry(1)]
    assert await world.runs.count_runs() == {}
    assert await runner.claim(orphans=True) == {}


async def test_a_failure_and_a_cancel_keep_error_and_reason(world: World) -> None:
    runner = await world.runner()
    await world.start("failed", "cancelled")
    runs = await runner.claim()
    error = '{"type": "ValueError", "message": "no"}'
    await runner.commit(
        write(runs["failed"], outcome=Finish(RunStatus.FAILED, error=error)),
        write(runs["cancelled"], outcome=Finish(RunStatus.CANCELLED, result="1", reason="because")),
    )
    failed, cancelled = await world.record("failed"), await world.record("cancelled")
    assert (failed.status, failed.error, failed.result) == (RunStatus.FAILED, error, None)
    assert (cancelled.status, cancelled.reason, cancelled.result) == (
        RunStatus.CANCELLED,
        "because",
        "1",
    )


async def test_a_finish_takes_unread_mail_with_it(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await world.deliver("r1", "m1")
    assert await runner.finish(run) is Verdict.COMMITTED
    assert (await world.record("r1")).unread == 0
    assert await world.runs.read_mailboxes(["r1"]) == {}
    assert (await world.send("r1", "m2")).status is SendStatus.ENDED


# -- parents


async def test_the_end_of_a_child_is_a_message_to_its_parent(world: World) -> None:
    runner = await world.runner()
    await world.start("parent")
    await runner.park(await runner.claim_one("parent"), wake_at=None, reason=Reason.CHILD)
    await world.start("child", parent_id="parent")
    child = await runner.claim_one("child")
    end = Finish(RunStatus.SUCCEEDED, result='"done"', parent_id="parent")
    assert await runner.commit(write(child, outcome=end)) == {"child": Verdict.COMMITTED}
    (message,) = (await world.runs.read_mailboxes(["parent"]))["parent"].messages
    assert (message.kind.value, message.name, message.body) == ("child", "succeeded", '"done"')
    assert "child" in message.message_id
    assert list(await runner.claim()) == ["parent"]


async def test_children_that_end_together_are_told_one_by_one(world: World) -> None:
    runner = await world.runner()
    await world.start("parent", "c1", "c2", "c3")
    await world.deliver("parent", "m1")
    runs = await runner.claim()
    ends = [
        write(
            runs[run_id],
            outcome=Finish(RunStatus.FAILED, error=f'"{run_id}"', parent_id="parent"),
        )
        for run_id in ("c3", "c1", "c2")
    ]
    await runner.commit(*ends)
    mailbox = (await world.runs.read_mailboxes(["parent"]))["parent"]
    assert mailbox.wake_seq == 4
    assert [(message.wake_seq, message.body) for message in mailbox.messages] == [
        (1, "1"),
        (2, '"c1"'),
        (3, '"c2"'),
        (4, '"c3"'),
    ]


async def test_a_parent_that_parks_in_the_same_batch_is_refused(world: World) -> None:
    runner = await world.runner()
    await world.start("child", "parent")
    runs = await runner.claim()
    verdicts = await runner.commit(
        write(runs["child"], outcome=Finish(RunStatus.SUCCEEDED, result="1", parent_id="parent")),
        write(runs["parent"], entries=[entry(1)], outcome=Park(None, 0, Reason.CHILD)),
    )
    assert verdicts == {"child": Verdict.COMMITTED, "parent": Verdict.PARK_REFUSED}
    assert (await world.record("parent")).next_seq == 2
    assert await world.wake_seq("parent") == 1


async def test_a_parent_held_in_the_same_batch_is_told_and_stays_held(world: World) -> None:
    runner = await world.runner()
    await world.start("child", "parent")
    runs = await runner.claim()
    verdicts = await runner.commit(
        write(runs["child"], outcome=Finish(RunStatus.SUCCEEDED, result="1", parent_id="parent")),
        write(runs["parent"], outcome=Park(None, 0, Reason.FAILURE)),
    )
    assert verdicts == {"child": Verdict.COMMITTED, "parent": Verdict.PARKED}
    record = await world.record("parent")
    assert (record.hold, record.wake_at, record.unread) == ("failure", None, 1)


async def test_a_parent_that_ended_or_ends_is_not_told(world: World) -> None:
    runner = await world.runner()
    await world.start("c1", "c2", "c3", "parent", "gone")
    runs = await runner.claim()
    await runner.finish(runs["gone"])
    verdicts = await runner.commit(
        write(runs["c1"], outcome=Finish(RunStatus.SUCCEEDED, parent_id="parent")),
        write(runs["parent"], outcome=Finish(RunStatus.SUCCEEDED)),
        write(runs["c2"], outcome=Finish(RunStatus.SUCCEEDED, parent_id="gone")),
        write(runs["c3"], outcome=Finish(RunStatus.SUCCEEDED, parent_id="never was")),
    )
    assert set(verdicts.values()) == {Verdict.COMMITTED}
    assert len(verdicts) == 4
    assert await world.runs.read_mailboxes(["parent", "gone", "never was"]) == {}


# -- what the fence refuses


@pytest.mark.req("CL4")
async def test_a_claim_that_is_not_the_holders_writes_nothing(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1")
    old = await runner.claim_one("r1")
    new = await runner.claim_one("r1", orphans=True)
    assert new.claim_id != old.claim_id
    late = write(
        old,
        revision=new.revision,
        entries=[entry(1)],
        consumed=[("m1", 1)],
        events=[RunEvent("never", 1.0)],
        outcome=Finish(RunStatus.FAILED),
    )
    assert await runner.commit(late) == {"r1": Verdict.FENCED}
    assert (await world.record("r1")).status is RunStatus.RUNNING
    assert await world.mailbox("r1") == ["m1"]
    assert list(await world.journal("r1")) == []
    assert "never" not in [event.type for event in await world.runs.read_events("r1")]
    assert await runner.commit(write(new, entries=[entry(1)])) == {"r1": Verdict.COMMITTED}


@pytest.mark.req("CL4")
async def test_parked_ended_and_unknown_runs_are_fenced(world: World) -> None:
    runner = await world.runner()
    await world.start("parked", "ended")
    runs = await runner.claim()
    await runner.park(runs["parked"], wake_at=None)
    await runner.finish(runs["ended"])
    lost = [write(runs[run_id], entries=[entry(1)]) for run_id in ("parked", "ended")]
    stranger = RunWrite("never was", 1, 1, entries=[entry(1)])
    verdicts = await runner.commit(*lost, stranger)
    assert verdicts == dict.fromkeys(["parked", "ended", "never was"], Verdict.FENCED)
    assert list(await world.journal("parked")) == []
    assert (await world.record("ended")).status is RunStatus.SUCCEEDED


@pytest.mark.req("CL4")
async def test_the_neighbours_of_a_fenced_member_commit(world: World) -> None:
    runner = await world.runner()
    await world.start("a", "b", "c")
    runs = await runner.claim()
    await runner.finish(runs["b"])
    verdicts = await runner.commit(*(write(run, entries=[entry(1)]) for run in runs.values()))
    assert verdicts == {"a": Verdict.COMMITTED, "b": Verdict.FENCED, "c": Verdict.COMMITTED}
    assert [len(await world.journal(run_id)) for run_id in ("a", "b", "c")] == [1, 0, 1]


async def test_another_revision_of_my_claim_means_reload(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)]))
    assert await runner.commit(write(run, entries=[entry(1, "other")])) == {"r1": Verdict.RELOAD}
    ahead = write(run, revision=run.revision + 2, entries=[entry(2)])
    assert await runner.commit(ahead) == {"r1": Verdict.RELOAD}
    assert list(await world.journal("r1")) == [entry(1)]


async def test_entries_that_do_not_continue_the_journal_are_not_written(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    assert await runner.commit(write(run, entries=[entry(2)])) == {"r1": Verdict.RELOAD}
    assert list(await world.journal("r1")) == []


@pytest.mark.req("CL4")
async def test_a_runner_declared_dead_commits_nothing(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    await world.kill(runner)
    with pytest.raises(RunnerDeclaredDead, match=str(runner.runner_id)):
        await runner.commit(write(run, entries=[entry(1)]))
    assert list(await world.journal("r1")) == []


@pytest.mark.req("CL4", "CL5")
async def test_the_old_holder_is_fenced_after_a_take_over(world: World) -> None:
    old = await world.runner()
    await world.start("r1")
    first = await old.claim_one("r1")
    await old.commit(write(first, entries=[entry(1)]))
    await world.kill(old)
    new = await world.runner([])
    await new.take(range(SHARDS), dead=[old.runner_id])
    second = await new.claim_one("r1", orphans=True)
    with pytest.raises(RunnerDeclaredDead):
        await old.commit(write(first, revision=first.revision + 1, entries=[entry(2, "old")]))
    late = write(first, revision=second.revision, entries=[entry(2, "old")])
    assert await new.commit(late) == {"r1": Verdict.FENCED}
    assert await new.commit(write(second, entries=[entry(2, "new")])) == {"r1": Verdict.COMMITTED}
    assert list(await world.journal("r1")) == [entry(1), entry(2, "new")]


@pytest.mark.parametrize("output", ["a\0b", "\ud83d"], ids=["nul", "surrogate"])
async def test_data_that_cannot_be_stored_rolls_the_whole_batch_back(
    world: World, output: str
) -> None:
    runner = await world.runner()
    await world.start("good", "bad")
    runs = await runner.claim()
    good, bad = (
        write(runs["good"], entries=[entry(1)]),
        write(runs["bad"], entries=[entry(1, output=output)]),
    )
    with pytest.raises(DataRefused):
        await runner.commit(good, bad)
    journals = await world.runs.read_journals(["good", "bad"])
    assert [len(journals[run_id]) for run_id in ("good", "bad")] == [0, 0]
    assert await runner.commit(good) == {"good": Verdict.COMMITTED}
    with pytest.raises(DataRefused):
        await runner.commit(bad)
    assert (await world.record("bad")).next_seq == 1


async def test_an_empty_batch_is_no_error(world: World) -> None:
    runner = await world.runner()
    assert await runner.commit() == {}


async def test_five_hundred_writes_in_one_batch(world: World) -> None:
    runner = await world.runner()
    names = [f"run-{number:03}" for number in range(500)]
    await world.start(*names)
    runs = await runner.claim()
    verdicts = await runner.commit(
        *(write(run, entries=[entry(1), entry(2)]) for run in runs.values())
    )
    assert verdicts == dict.fromkeys(names, Verdict.COMMITTED)
    ends = [
        write(
            run,
            revision=run.revision + 1,
            entries=[entry(3)],
            outcome=Park(None, 0, Reason.SIGNAL)
            if number % 2
            else Finish(RunStatus.SUCCEEDED, result="1"),
        )
        for number, run in enumerate(runs.values())
    ]
    verdicts = await runner.commit(*ends)
    assert sorted(verdicts.values()) == [Verdict.COMMITTED] * 250 + [Verdict.PARKED] * 250
    journals = await world.runs.read_journals(names)
    assert {len(journal) for journal in journals.values()} == {3}
    assert await world.runs.count_runs() == {"suspended": 250}
