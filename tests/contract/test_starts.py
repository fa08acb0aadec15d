"""Starts: one row set per id, answered truly whatever was there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.storage.errors import DataRefused
from perdure.storage.model import RunStatus, StartOutcome
from tests.contract.world import WORKFLOW, World, write

ODD_IDS = [
    "a",
    "A",
    "a ",
    " a",
    "ä",
    "a\u0308",
    "naïve 🏃‍♀️",
    "quote ' and \" and \\ and %s",
    "line\nbreak\ttab",
    '{"json": [1]}',
    "null",
    "0",
    "00",
    "0.0",
]


async def test_a_new_run_is_pending_and_complete(world: World) -> None:
    new = world.new_run(
        "r1",
        payload='{"a": "\'\\"\\n🏁"}',
        version=3,
        source="http",
        tenant="t",
        parent_id="p",
        trace="00-abc",
        subject="me",
        tags='["x"]',
    )
    before = await world.now()
    (outcome,) = await world.runs.start_runs([new])
    assert outcome == StartOutcome("r1", True, WORKFLOW, RunStatus.PENDING)
    record = await world.record("r1")
    assert record.status is RunStatus.PENDING
    assert (record.payload, record.version, record.source, record.slot) == (
        new.payload,
        3,
        "http",
        new.slot,
    )
    assert (record.tenant, record.parent_id, record.trace) == ("t", "p", "00-abc")
    assert (record.subject, record.tags) == ("me", '["x"]')
    assert before <= record.created_at <= await world.now()
    assert (record.started_at, record.finished_at, record.claim_id, record.unread) == (
        None,
        None,
        None,
        0,
    )
    assert (record.next_seq, record.hold, record.result, record.error) == (1, None, None, None)


async def test_an_id_that_exists_is_answered_and_not_changed(world: World) -> None:
    await world.start("r1", payload="1")
    (outcome,) = await world.start("r1", payload="2", workflow="other")
    assert outcome == StartOutcome("r1", False, WORKFLOW, RunStatus.PENDING)
    assert (await world.record("r1")).payload == "1"


async def test_old_and_new_ids_in_one_call_keep_their_order(world: World) -> None:
    await world.start("b")
    outcomes = await world.start("c", "b", "a")
    assert [(outcome.run_id, outcome.created) for outcome in outcomes] == [
        ("c", True),
        ("b", False),
        ("a", True),
    ]


async def test_one_id_twice_in_a_call_is_created_by_the_first(world: World) -> None:
    first, second = (
        world.new_run("r1", payload="1"),
        world.new_run("r1", payload="2", workflow="other"),
    )
    outcomes = await world.runs.start_runs([first, second])
    assert [(outcome.created, outcome.workflow) for outcome in outcomes] == [
        (True, WORKFLOW),
        (False, WORKFLOW),
    ]
    assert (await world.record("r1")).payload == "1"


async def test_the_same_start_sent_again_is_still_created(world: World) -> None:
    new = world.new_run("r1")
    await world.runs.start_runs([new])
    (again,) = await world.runs.start_runs([new])
    assert again.created
    runner = await world.runner()
    await runner.finish(await runner.claim_one("r1"))
    (late,) = await world.runs.start_runs([new])
    assert late == StartOutcome("r1", True, WORKFLOW, RunStatus.SUCCEEDED)
    (other,) = await world.runs.start_runs([replace(new, start_token=world.fresh_id())])
    assert other == StartOutcome("r1", False, WORKFLOW, RunStatus.SUCCEEDED)


async def test_fresh_ids_make_the_same_rows(world: World) -> None:
    facts: dict[str, Any] = {
        "payload": '{"a": "\'\\"\\n🏁"}',
        "version": 3,
        "source": "http",
        "tenant": "t",
        "parent_id": "p",
        "trace": "00-abc",
        "subject": "me",
        "tags": '["x"]',
    }
    asked, fresh = world.new_run("asked", **facts), world.new_run("fresh", **facts, fresh=True)
    bare, bare_fresh = world.new_run("bare"), world.new_run("bare-fresh", fresh=True)
    await world.runs.start_runs([asked, bare])
    outcomes = await world.runs.start_runs([fresh, bare_fresh])
    assert list(outcomes) == [
        StartOutcome(run_id, True, WORKFLOW, RunStatus.PENDING)
        for run_id in ("fresh", "bare-fresh")
    ]
    for one, other in ((asked, fresh), (bare, bare_fresh)):
        record = await world.record(one.run_id)
        same = replace(
            await world.record(other.run_id),
            run_id=one.run_id,
            slot=one.slot,
            created_at=record.created_at,
            wake_at=record.wake_at,
        )
        assert same == record
    runner = await world.runner()
    assert sorted(await runner.claim()) == ["asked", "bare", "bare-fresh", "fresh"]


async def test_a_fresh_id_that_exists_all_the_same_is_answered_and_not_changed(
    world: World,
) -> None:
    new = [world.new_run(run_id, payload="1", fresh=True) for run_id in ("r1", "r2")]
    await world.runs.start_runs(new)
    assert [o.created for o in await world.runs.start_runs(new)] == [True, True], "the same start"
    other = world.new_run("r2", payload="2", workflow="other", fresh=True)
    outcomes = await world.runs.start_runs([world.new_run("r3", fresh=True), other])
    assert list(outcomes) == [
        StartOutcome("r3", True, WORKFLOW, RunStatus.PENDING),
        StartOutcome("r2", False, WORKFLOW, RunStatus.PENDING),
    ]
    twice = [world.new_run("r4", payload=payload, fresh=True) for payload in ("1", "2")]
    assert [o.created for o in await world.runs.start_runs(twice)] == [True, False]
    assert [(await world.record(r)).payload for r in ("r2", "r4")] == ["1", "1"]


async def test_a_running_and_a_parked_run_are_answered_with_their_status(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    assert (await world.start("r1"))[0].status is RunStatus.RUNNING
    await runner.park(run, wake_at=None)
    assert (await world.start("r1"))[0].status is RunStatus.SUSPENDED


async def test_no_runs_is_no_error(world: World) -> None:
    assert list(await world.runs.start_runs([])) == []


async def test_ids_are_compared_byte_for_byte(world: World) -> None:
    outcomes = await world.start(*ODD_IDS)
    assert [outcome.run_id for outcome in outcomes] == ODD_IDS
    assert all(outcome.created for outcome in outcomes)
    for run_id in ODD_IDS:
        assert (await world.record(run_id)).run_id == run_id
    runner = await world.runner()
    claimed = await runner.claim()
    assert sorted(claimed) == sorted(ODD_IDS)
    verdicts = await runner.commit(*(write(claimed[run_id]) for run_id in ODD_IDS))
    assert sorted(verdicts) == sorted(ODD_IDS)
    mailboxes = await world.runs.read_mailboxes(ODD_IDS)
    assert sorted(mailboxes) == sorted(ODD_IDS)
    await world.deliver("a ", "m")
    assert await world.mailbox("a") == []
    assert await world.mailbox("a ") == ["m"]


@pytest.mark.parametrize("payload", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
async def test_a_payload_that_cannot_be_stored_is_refused_whole(world: World, payload: str) -> None:
    with pytest.raises(DataRefused):
        await world.runs.start_runs([world.new_run("ok"), world.new_run("bad", payload=payload)])
    assert await world.runs.read_run("ok") is None
    assert await world.runs.read_run("bad") is None
    assert (await world.start("ok"))[0].created


async def test_five_hundred_runs_in_one_call(world: World) -> None:
    names = [f"run-{number:03}" for number in range(500)]
    outcomes = await world.start(*names, payload="x" * 2_000)
    assert [outcome.run_id for outcome in outcomes if outcome.created] == names
    assert await world.runs.count_runs() == {"pending": 500}
