"""Strays: runs whose shard is held by a runner that does not know their workflow, and who may have them (R15)."""

from __future__ import annotations

import itertools

import pytest

from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import SLOTS, Reason, RunStatus, Verdict
from tests.contract.world import SHARDS, Runner, World, entry, write

pytestmark = pytest.mark.req("CL13")

FOREIGN = "tests.foreign"


async def lender(world: World) -> Runner:
    """A runner without shards that knows what the holder does not."""
    return await world.runner([])


async def stray(world: World, holder: Runner, *run_ids: str) -> None:
    await world.start(*run_ids, workflow=FOREIGN)
    assert (await holder.claims()).strays == (FOREIGN,)


async def test_what_the_holder_does_not_know_is_marked_and_out_of_its_way(world: World) -> None:
    holder = await world.runner()
    await world.start("mine")
    await world.start("stray", workflow=FOREIGN)
    claims = await holder.claims()
    assert [run.run_id for run in claims.runs] == ["mine"]
    assert (claims.strays, claims.complete) == ((FOREIGN,), True)
    record = await world.record("stray")
    assert (record.stray, record.status, record.claim_id) == (True, RunStatus.PENDING, None)
    assert 25 < (record.wake_at or 0) - await world.now() < 120
    again = await holder.claims(orphans=True)
    assert (again.strays, again.complete) == ((), True)
    assert await holder.claim(workflows=[FOREIGN]) == {}
    assert list(await holder.lend_claim(workflows=[FOREIGN])) == ["stray"]  # it has learnt of it


async def test_a_stray_that_stays_one_is_looked_at_ever_less_often(world: World) -> None:
    holder = await world.runner()
    await stray(world, holder, "r1")
    waits = []
    for _ in range(8):
        before = await world.record("r1")
        wait = (before.wake_at or 0) - await world.now()
        waits.append(wait)
        await world.age_due_times(round(wait) + 1)
        await world.age_strays(round(wait))
        assert (await holder.claims()).strays == (FOREIGN,)
    assert all(later > 0.99 * before for before, later in itertools.pairwise(waits))
    assert 1_800 <= waits[-1] <= 5_400


async def test_a_runner_that_knows_it_takes_it_wherever_it_is(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1")
    assert await other.lend_claim() == {}
    claims = await other.lend_claims(workflows=[FOREIGN, "tests.unused"])
    (run,) = claims.runs
    assert (run.run_id, run.workflow, run.epoch) == ("r1", FOREIGN, holder.holds[0].epoch)
    assert (run.taken_over, run.reclaim_count, claims.more) == (False, 0, False)
    record = await world.record("r1")
    assert (record.status, record.runner_id) == (RunStatus.RUNNING, other.runner_id)
    assert (record.stray, record.wake_at) == (False, None)
    assert await other.lend_claim(workflows=[FOREIGN]) == {}


async def test_a_lent_run_is_left_alone_by_its_holder_and_parks_like_any_other(
    world: World,
) -> None:
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1")
    run = (await other.lend_claim(workflows=[FOREIGN]))["r1"]
    for workflows in ([FOREIGN], ["tests.flow"]):
        claims = await holder.claims(orphans=True, workflows=workflows)
        assert (list(claims.runs), claims.strays) == ([], ())
    assert (await other.commit(write(run, entries=[entry(1)])))["r1"] is Verdict.COMMITTED
    later = await world.now() + 900
    parked = write(run, revision=run.revision + 1)
    assert await other.park_as(parked, wake_at=later) is Verdict.PARKED
    assert ((await world.record("r1")).wake_at, (await world.record("r1")).stray) == (later, False)
    assert await other.lend_claim(workflows=[FOREIGN]) == {}
    assert (await holder.claims()).strays == ()
    await world.deliver("r1", "m1")
    assert (await holder.claims()).strays == (FOREIGN,)
    assert (await other.lend_claim(workflows=[FOREIGN]))["r1"].next_seq == 2


@pytest.mark.req("CL5")
async def test_when_the_borrower_dies_another_one_gets_it(world: World) -> None:
    holder, first, second = await world.runner(), await lender(world), await lender(world)
    await stray(world, holder, "r1")
    await first.lend_claim(workflows=[FOREIGN])
    await world.kill(first)
    assert await second.lend_claim(workflows=[FOREIGN]) == {}  # nobody has seen it yet
    assert (await holder.claims(orphans=True)).strays == (FOREIGN,)
    assert (await holder.claims(orphans=True)).strays == ()
    run = (await second.lend_claim(workflows=[FOREIGN]))["r1"]
    assert (run.taken_over, run.reclaim_count) == (True, 1)


async def test_mail_for_a_stray_reaches_whoever_takes_it(world: World) -> None:
    """R6: whether it comes before the mark, after it or between two looks."""
    holder, other = await world.runner(), await lender(world)
    await world.start("r1", workflow=FOREIGN)
    await world.deliver("r1", "before")
    await holder.claims()
    await world.deliver("r1", "after")
    assert ((await world.record("r1")).wake_at or 0) <= await world.now()
    assert (await holder.claims()).strays == (FOREIGN,)
    await world.deliver("r1", "last")
    run = (await other.lend_claim(workflows=[FOREIGN]))["r1"]
    assert run.wake_seq == 3
    assert await world.mailbox("r1") == ["before", "after", "last"]
    await world.deliver("r1", "while lent")
    assert await other.park(run, seen=3) is Verdict.PARK_REFUSED


async def test_a_mark_counts_only_while_nobody_has_had_the_run_since(world: World) -> None:
    """As a runner of the first release leaves it, which knows nothing of marks."""
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1", "r2")
    await world.execute("update perdure_fences set revision = revision + 2 where run_id = 'r1'")
    assert not (await world.record("r1")).stray
    assert list(await other.lend_claim(workflows=[FOREIGN])) == ["r2"]
    await world.age_due_times(600)
    assert (await holder.claims()).strays == (FOREIGN,)
    assert list(await other.lend_claim(workflows=[FOREIGN])) == ["r1"]


async def test_a_held_run_is_neither_marked_nor_lent(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1")
    run = (await other.lend_claim(workflows=[FOREIGN]))["r1"]
    await other.park(run, reason=Reason.OPERATOR)
    await world.deliver("r1", "m1")
    assert (await holder.claims(orphans=True)).strays == ()
    assert await other.lend_claim(workflows=[FOREIGN]) == {}


async def test_without_a_free_slot_strays_are_marked_all_the_same(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    await world.start("mine")
    await world.start("stray", workflow=FOREIGN)
    claims = await holder.claims(limit=0)
    assert (list(claims.runs), claims.strays, claims.complete) == ([], (FOREIGN,), True)
    assert list(await other.lend_claim(workflows=[FOREIGN])) == ["stray"]
    assert list(await holder.claim()) == ["mine"]


async def test_without_a_free_slot_no_backlog_hides_a_stray(world: World) -> None:
    """Not in the buckets before the stray's, nor before it in its own."""
    holder, other = await world.runner(), await lender(world)
    last = SLOTS - 1
    backlog = [world.new_run(f"{slot}-{n}", slot=slot) for slot in (0, last) for n in range(60)]
    await world.runs.start_runs(backlog)
    await world.runs.start_runs([world.new_run("stray", slot=last, workflow=FOREIGN)])
    claims = await holder.claims(limit=0, per_shard=50)
    assert (list(claims.runs), claims.strays) == ([], (FOREIGN,))
    assert (claims.complete, claims.more) == (True, False)
    assert list(await other.lend_claim(workflows=[FOREIGN])) == ["stray"]
    assert len(await holder.claim()) == len(backlog)


async def test_without_a_free_slot_more_strays_than_one_look_marks_are_marked_by_the_next(
    world: World,
) -> None:
    holder, other = await world.runner(), await lender(world)
    many = [world.new_run(f"r{n}", slot=n, workflow=FOREIGN) for n in range(120)]
    await world.runs.start_runs(many)
    looks = [await holder.claims(limit=0, per_shard=50) for _ in range(4)]
    assert [(look.more, look.complete) for look in looks] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert len(await other.lend_claim(workflows=[FOREIGN])) == len(many)


async def test_strays_are_offered_from_a_slot_on_and_round(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    quarter = SLOTS // SHARDS
    runs = [world.new_run(f"r{n}", slot=n * quarter, workflow=FOREIGN) for n in range(SHARDS)]
    await world.runs.start_runs(runs)
    await holder.claims()
    claims = await other.lend_claims(workflows=[FOREIGN], limit=2, from_slot=3 * quarter)
    assert sorted(run.run_id for run in claims.runs) == ["r0", "r3"]
    assert claims.more
    assert {run.epoch for run in claims.runs} == {1}


async def test_a_runs_shard_may_have_moved_since_it_was_marked(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1")
    await world.cluster.release_shards(holder.runner_id, holder.holds)
    holder.holds = []
    new = await world.runner()
    run = (await other.lend_claim(workflows=[FOREIGN]))["r1"]
    assert run.epoch == 2
    assert await new.claim(orphans=True, workflows=[FOREIGN]) == {}
    assert (await other.commit(write(run, entries=[entry(1)])))["r1"] is Verdict.COMMITTED


async def test_what_runs_under_me_unknown_to_me_is_found_in_any_shard(world: World) -> None:
    """After a claim of unknown outcome whose shard has gone, and after one of a stray."""
    holder = await world.runner()
    await world.start("r1", "r2")
    known = (await holder.claim())["r1"]
    await world.cluster.release_shards(holder.runner_id, holder.holds)
    found = await holder.lend_claim(lost=True, in_memory=[known.claim_id])
    assert list(found) == ["r2"]
    assert (found["r2"].taken_over, found["r2"].reclaim_count) == (False, 0)
    other = await world.runner()
    assert await other.lend_claim(lost=True) == {}


@pytest.mark.req("CL4")
async def test_a_runner_declared_dead_borrows_nothing(world: World) -> None:
    holder, other = await world.runner(), await lender(world)
    await stray(world, holder, "r1")
    await world.kill(other)
    with pytest.raises(RunnerDeclaredDead):
        await other.lend_claim(workflows=[FOREIGN])
    assert (await world.record("r1")).status is RunStatus.PENDING


# ---- suspects: runs that fell with a runner before and have written nothing since ---------------


async def suspects(world: World, *run_ids: str) -> Runner:
    """These runs fell with two runners; who holds the shards now."""
    await world.start(*run_ids)
    runner = await world.runner()
    await runner.claim()
    for _ in range(2):
        await world.kill(runner)
        dead, runner = runner.runner_id, await world.runner([])
        await runner.take(range(SHARDS), dead=[dead])
        await runner.claim(orphans=True)
    await world.kill(runner)
    new = await world.runner([])
    await new.take(range(SHARDS), dead=[runner.runner_id])
    return new


@pytest.mark.req("CL9")
async def test_of_suspects_no_more_are_taken_than_have_a_place(world: World) -> None:
    runner = await suspects(world, "s1", "s2", "s3")
    await world.start("innocent-1", "innocent-2")
    claims = await runner.claims(orphans=True, suspects=1)
    taken = {run.run_id: run.reclaim_count for run in claims.runs}
    assert len(taken) == 3
    assert sorted(taken.values()) == [0, 0, 3]
    assert claims.suspects_left
    await world.start("innocent-3")
    claims = await runner.claims(
        orphans=True, suspects=0, in_memory=[run.claim_id for run in claims.runs]
    )
    assert [run.run_id for run in claims.runs] == ["innocent-3"]
    assert (claims.suspects_left, claims.complete) == (False, True)


@pytest.mark.req("CL9")
async def test_whoever_falls_with_a_runner_for_the_first_time_is_no_suspect(world: World) -> None:
    await world.start(*(f"r{number}" for number in range(5)))
    first = await world.runner()
    await first.claim()
    await world.kill(first)
    second = await world.runner([])
    await second.take(range(SHARDS), dead=[first.runner_id])
    assert len(await second.claim(orphans=True, suspects=0)) == 5


@pytest.mark.req("CL9")
async def test_a_parked_suspect_is_one_until_it_writes(world: World) -> None:
    runner = await suspects(world, "s1")
    run = await runner.claim_one("s1", orphans=True)
    await runner.park(run, wake_at=await world.now())
    assert await runner.claim(suspects=0) == {}
    run = await runner.claim_one("s1", suspects=1)
    await runner.commit(write(run, entries=[entry(1)]))
    parked = write(run, revision=run.revision + 1)
    await runner.park_as(parked, wake_at=await world.now())
    assert list(await runner.claim(suspects=0)) == ["s1"]
