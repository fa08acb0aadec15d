"""Runs that are born claimed: granted by the shard's row alone, adopted after a lost answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.storage.model import SLOTS, Birth, NewRun, RunStatus, ShardHold
from tests.contract.world import SHARDS, WORKFLOW, Runner, World, entry, write

pytestmark = pytest.mark.req("CL4")


def born_run(world: World, runner: Runner, run_id: str = "r1") -> NewRun:
    """A start that asks for a birth in the shard its run falls into, as the runner holds it."""
    run = world.new_run(run_id)
    holds = {hold.shard_id: hold for hold in runner.holds}
    hold = holds.get(run.slot * SHARDS // SLOTS, ShardHold(run.slot * SHARDS // SLOTS, 1))
    birth = Birth(runner.runner_id, hold, world.fresh_id())
    return replace(run, birth=birth)


async def test_a_run_is_born_claimed_and_goes_on_as_one_that_was_claimed(world: World) -> None:
    runner = await world.runner()
    new = born_run(world, runner)
    before = await world.now()
    (outcome,) = await world.runs.start_runs([new])
    assert (outcome.created, outcome.workflow, outcome.status) == (
        True,
        WORKFLOW,
        RunStatus.RUNNING,
    )
    claimed = outcome.claimed
    assert claimed is not None
    assert new.birth is not None
    assert (claimed.run_id, claimed.claim_id, claimed.payload) == ("r1", new.birth.claim_id, "{}")
    assert (claimed.epoch, claimed.next_seq, claimed.wake_seq) == (new.birth.hold.epoch, 1, 0)
    assert before <= claimed.entered_at <= await world.now()

    record = await world.record("r1")
    assert (record.claim_id, record.runner_id, record.wake_at) == (
        claimed.claim_id,
        runner.runner_id,
        None,
    )
    assert record.started_at == claimed.entered_at
    assert record.created_at == claimed.created_at
    assert await runner.claim() == {}, "nobody else may take it"

    verdicts = await runner.commit(write(claimed, entries=[entry(1)]))
    assert verdicts == {"r1": "committed"}
    await world.deliver("r1", "m1")
    assert await runner.finish(replace(claimed, revision=claimed.revision + 1)) == "committed"
    assert (await world.record("r1")).started_at == claimed.entered_at


async def test_without_the_shard_a_run_is_born_pending(world: World) -> None:
    runner = await world.runner()
    for name in ("epoch", "runner"):
        new = born_run(world, runner, name)
        assert new.birth is not None
        older = replace(new.birth, hold=replace(new.birth.hold, epoch=77))
        other = replace(new.birth, runner_id=world.fresh_id())
        birth = older if name == "epoch" else other
        (outcome,) = await world.runs.start_runs([replace(new, birth=birth)])
        assert (outcome.created, outcome.status, outcome.claimed) == (
            True,
            RunStatus.PENDING,
            None,
        ), name
    wrong = world.new_run("slot")
    elsewhere = next(h for h in runner.holds if h.shard_id != wrong.slot * SHARDS // SLOTS)
    wrong = replace(wrong, birth=Birth(runner.runner_id, elsewhere, world.fresh_id()))
    (outcome,) = await world.runs.start_runs([wrong])
    assert outcome.claimed is None
    assert sorted(await runner.claim()) == ["epoch", "runner", "slot"]


async def test_a_dead_runner_has_no_births_and_what_it_had_is_taken_over(world: World) -> None:
    dying, heir = await world.runner(), await world.runner(())
    (born,) = await world.runs.start_runs([born_run(world, dying, "before")])
    assert born.claimed is not None
    await world.kill(dying)
    (late,) = await world.runs.start_runs([born_run(world, dying, "after")])
    assert (late.created, late.claimed) == (True, None)

    await heir.take(range(SHARDS), [dying.runner_id])
    claims = await heir.claim(orphans=True)
    assert sorted(claims) == ["after", "before"]
    assert (claims["before"].taken_over, claims["before"].reclaim_count) == (True, 1)
    assert (claims["after"].taken_over, claims["after"].reclaim_count) == (False, 0)
    assert claims["before"].epoch > born.claimed.epoch


async def test_one_statement_makes_born_pending_and_known_runs(world: World) -> None:
    runner = await world.runner()
    await world.start("old")
    starts = [
        born_run(world, runner, "b"),
        world.new_run("p"),
        born_run(world, runner, "old"),
        born_run(world, runner, "b"),
        born_run(world, runner, "a"),
    ]
    outcomes = await world.runs.start_runs(starts)
    assert [(o.run_id, o.created, o.claimed is not None) for o in outcomes] == [
        ("b", True, True),
        ("p", True, False),
        ("old", False, False),
        ("b", False, False),
        ("a", True, True),
    ]
    assert outcomes[3].status is RunStatus.RUNNING
    for outcome, start in zip(outcomes, starts, strict=True):
        if outcome.claimed is not None and start.birth is not None:
            assert outcome.claimed.claim_id == start.birth.claim_id
    assert sorted(await runner.claim()) == ["old", "p"]


@pytest.mark.req("CL11")
async def test_sent_again_a_birth_is_adopted_while_its_claim_stands(world: World) -> None:
    runner = await world.runner()
    new = born_run(world, runner)
    (first,) = await world.runs.start_runs([new])
    (again,) = await world.runs.start_runs([new])
    assert again == first, "the same run under the same claim"

    await world.deliver("r1", "m1")
    (later,) = await world.runs.start_runs([new])
    assert later.claimed is not None
    assert later.claimed.wake_seq == 1, "what has mail is not entered without reading it"

    assert first.claimed is not None
    await runner.commit(write(first.claimed, entries=[entry(1)]))
    (used,) = await world.runs.start_runs([new])
    assert (used.created, used.claimed) == (True, None), "somebody has it in memory already"


@pytest.mark.req("CL11")
async def test_a_birth_that_was_lost_is_an_orphan_of_its_own_runner(world: World) -> None:
    runner = await world.runner()
    new = born_run(world, runner)
    await world.runs.start_runs([new])
    assert new.birth is not None
    assert await runner.claim(orphans=True, in_memory=[new.birth.claim_id]) == {}
    found = await runner.claim_one("r1", orphans=True)
    assert (found.revision, found.reclaim_count, found.taken_over) == (2, 0, False)
    (again,) = await world.runs.start_runs([new])
    assert (again.created, again.claimed) == (True, None), "another claim has it"
