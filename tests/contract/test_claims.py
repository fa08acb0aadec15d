"""Claims: who may take what, and what a claim changes."""

from __future__ import annotations

import pytest

from perdure.storage.clock import to_instant
from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import MessageKind, Park, Reason, RunStatus, ShardHold, Verdict
from tests.contract.world import SHARDS, WORKFLOW, World, entry, write


async def test_a_claim_takes_a_due_run_and_tells_all_a_body_needs(world: World) -> None:
    runner = await world.runner()
    new = world.new_run(
        "r1", payload='{"n": 1}', version=2, source="cron", parent_id="p", trace="t", tenant="acme"
    )
    await world.runs.start_runs([new])
    before = await world.now()
    claims = await runner.claims()
    (run,) = claims.runs
    assert (run.run_id, run.slot, run.workflow, run.version) == ("r1", new.slot, WORKFLOW, 2)
    assert (run.payload, run.payload_format, run.seed) == ('{"n": 1}', new.format, new.seed)
    assert (run.source, run.parent_id, run.trace, run.tenant) == ("cron", "p", "t", "acme")
    assert (run.next_seq, run.reclaim_count, run.wake_seq, run.taken_over) == (1, 0, 0, False)
    assert run.epoch == runner.holds[0].epoch == 1
    assert before <= run.entered_at <= claims.db_now <= await world.now()
    assert 0 < run.claim_id < 1 << 63
    assert not claims.more
    record = await world.record("r1")
    assert record.status is RunStatus.RUNNING
    assert (record.claim_id, record.runner_id, record.epoch) == (run.claim_id, runner.runner_id, 1)
    assert (record.started_at, record.wake_at) == (run.entered_at, None)
    assert run.created_at == record.created_at


async def test_what_is_claimed_is_not_claimed_again(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    assert await runner.claim() == {}
    assert await runner.claim(orphans=True, in_memory=[run.claim_id]) == {}


async def test_claim_ids_are_fresh_and_random(world: World) -> None:
    runner = await world.runner()
    await world.start(*(f"r{number}" for number in range(50)))
    claim_ids = [run.claim_id for run in (await runner.claim()).values()]
    assert len(set(claim_ids)) == 50
    assert sorted(claim_ids) != claim_ids
    assert max(claim_ids) > 1 << 32


async def test_a_parked_run_is_claimed_when_due_and_not_before(world: World) -> None:
    runner = await world.runner()
    await world.start("due", "later", "untimed")
    now = await world.now()
    for run_id, run in (await runner.claim()).items():
        wake_at = {"due": now, "later": now + 60, "untimed": None}[run_id]
        assert await runner.park(run, wake_at=wake_at) is Verdict.PARKED
    assert list(await runner.claim()) == ["due"]


async def test_ahead_takes_what_is_due_soon(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    soon = await world.now() + 30
    await runner.park(await runner.claim_one("r1"), wake_at=soon)
    assert await runner.claim(ahead=10.0) == {}
    assert list(await runner.claim(ahead=60.0)) == ["r1"]
    assert (await world.record("r1")).wake_at is None


async def test_below_the_floor_nothing_is_looked_for(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    now = await world.now()
    assert list(await runner.claim(floor=now + 60)) == [
        "r1"
    ]  # no mark counts that is not well in the past
    await runner.park(await runner.claim_one("r1", orphans=True), wake_at=now)
    await world.age_due_times(60)
    assert await runner.claim(floor=now - 30) == {}
    assert list(await runner.claim(floor=now - 90)) == ["r1"]


async def test_a_park_until_an_instant_in_the_past_is_due_now(world: World) -> None:
    """What is due is found above a low-water mark, however long the commit of its park took."""
    runner = await world.runner()
    await world.start("r1")
    now = await world.now()
    assert await runner.park(await runner.claim_one("r1"), wake_at=now - 900) is Verdict.PARKED
    assert ((await world.record("r1")).wake_at or 0) >= now
    assert list(await runner.claim(floor=now - 30)) == ["r1"]


async def test_a_claim_says_whether_anything_was_left(world: World) -> None:
    runner = await world.runner()
    await world.start(*(f"r{number}" for number in range(7)))
    first = await runner.claims(limit=5)
    assert (len(first.runs), first.more, first.complete) == (5, True, False)
    second = await runner.claims(limit=5)
    assert (len(second.runs), second.more, second.complete) == (2, False, True)
    assert (await runner.claims()).complete
    await world.start(*(f"s{number}" for number in range(4)), slot=9)
    assert not (await runner.claims(per_shard=4)).complete  # there may be more in that bucket


async def test_a_workflow_i_do_not_know_is_left(world: World) -> None:
    runner = await world.runner()
    await world.start("mine")
    await world.start("other", workflow="Tests.Flow")
    assert list(await runner.claim()) == ["mine"]
    assert (await world.record("other")).status is RunStatus.PENDING
    assert await runner.claim(workflows=[]) == {}


async def test_a_held_run_is_left_until_it_is_released(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), wake_at=0.0, reason=Reason.CRASH_LOOP)
    await world.deliver("r1", "m1")
    assert await runner.claim(orphans=True) == {}
    record = await world.record("r1")
    assert (record.status, record.hold, record.reason) == (
        RunStatus.SUSPENDED,
        "crash-loop",
        "crash-loop",
    )
    assert (record.wake_at, record.unread) == (None, 1)


async def test_only_shards_that_are_mine_are_looked_into(world: World) -> None:
    runner = await world.runner([0, 1])
    other = await world.runner([2])
    await world.runs.start_runs(
        [world.new_run(f"s{shard}", slot=shard * 65_536 // SHARDS) for shard in range(SHARDS)]
    )
    assert sorted(await runner.claim(holds=[*runner.holds, *other.holds, ShardHold(3, 0)])) == [
        "s0",
        "s1",
    ]
    assert sorted(await other.claim()) == ["s2"]
    assert await runner.claim(holds=[]) == {}


async def test_each_slot_of_a_shard_is_looked_into(world: World) -> None:
    runner = await world.runner([1])
    slots = [16_383, 16_384, 16_639, 16_640, 20_000, 32_767, 32_768]
    await world.runs.start_runs([world.new_run(f"slot-{slot}", slot=slot) for slot in slots])
    claimed = await runner.claim()
    assert sorted(run.slot for run in claimed.values()) == slots[1:-1]


@pytest.mark.req("CL4")
async def test_an_older_epoch_takes_nothing(world: World) -> None:
    runner = await world.runner()
    old = list(runner.holds)
    await world.cluster.release_shards(runner.runner_id, old)
    runner.holds = []
    await runner.take(range(SHARDS))
    await world.start("r1")
    assert await runner.claim(holds=old) == {}
    run = await runner.claim_one("r1")
    assert run.epoch == old[0].epoch + 1


@pytest.mark.req("CL4")
async def test_a_run_claimed_under_a_higher_epoch_is_left(world: World) -> None:
    """As after a restore that brought the shard rows back but not the runs'."""
    runner = await world.runner()
    await world.start("due", "orphan")
    await world.execute("update perdure_fences set epoch = 7")
    assert await runner.claim() == {}
    await world.execute("update perdure_fences set epoch = 1")
    await runner.claim()
    await world.execute("update perdure_fences set epoch = 7")
    assert await runner.claim(orphans=True) == {}
    await world.execute("update perdure_fences set epoch = 1")
    assert sorted(await runner.claim(orphans=True)) == ["due", "orphan"]


@pytest.mark.req("CL4")
async def test_a_runner_declared_dead_claims_nothing(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.kill(runner)
    with pytest.raises(RunnerDeclaredDead, match=str(runner.runner_id)):
        await runner.claim()
    assert (await world.record("r1")).status is RunStatus.PENDING
    with pytest.raises(RunnerDeclaredDead):
        await runner.claim(runner_id=world.fresh_id())


@pytest.mark.req("CL5")
async def test_runs_of_a_dead_runner_are_taken_over_as_orphans(world: World) -> None:
    old = await world.runner()
    await world.start("r1")
    first = await old.claim_one("r1")
    await old.commit(write(first, entries=[entry(1), entry(2)]))
    await world.kill(old)
    new = await world.runner([])
    assert len(await new.take(range(SHARDS), dead=[old.runner_id])) == SHARDS
    assert await new.claim() == {}
    run = await new.claim_one("r1", orphans=True)
    assert run.taken_over
    assert (run.next_seq, run.reclaim_count) == (3, 1)
    assert run.entered_at == first.entered_at
    assert run.claim_id != first.claim_id
    assert run.epoch == first.epoch + 1
    assert run.revision == first.revision + 2
    assert [item.seq for item in await world.journal("r1")] == [1, 2]


async def test_the_crash_count_grows_by_take_overs_and_ends_with_an_entry(world: World) -> None:
    await world.start("r1")
    runner = await world.runner()
    run = await runner.claim_one("r1")
    for crashes in (1, 2):
        await world.kill(runner)
        dead, runner = runner.runner_id, await world.runner([])
        await runner.take(range(SHARDS), dead=[dead])
        run = await runner.claim_one("r1", orphans=True)
        assert run.reclaim_count == crashes
    await runner.commit(write(run))
    assert (await world.record("r1")).reclaim_count == 2
    await runner.commit(write(run, revision=run.revision + 1, entries=[entry(1)]))
    assert (await world.record("r1")).reclaim_count == 0


async def test_my_own_running_run_that_i_do_not_have_is_an_orphan_without_a_crash(
    world: World,
) -> None:
    runner = await world.runner()
    await world.start("r1", "r2")
    first = await runner.claim()
    again = await runner.claim(orphans=True, in_memory=[first["r1"].claim_id])
    assert list(again) == ["r2"]
    assert (again["r2"].reclaim_count, again["r2"].taken_over) == (0, False)
    assert again["r2"].claim_id != first["r2"].claim_id


async def test_a_running_run_of_a_live_runner_is_left(world: World) -> None:
    old = await world.runner()
    await world.start("r1")
    run = await old.claim_one("r1")
    await world.cluster.release_shards(old.runner_id, old.holds)
    new = await world.runner()
    assert await new.claim(orphans=True) == {}
    assert (await old.commit(write(run, entries=[entry(1)])))["r1"] is Verdict.COMMITTED


async def test_the_limit_is_kept_and_more_is_told(world: World) -> None:
    runner = await world.runner()
    await world.start(*(f"r{number}" for number in range(7)))
    first = await runner.claims(limit=5)
    assert len(first.runs) == 5
    assert first.more
    second = await runner.claims(limit=5)
    assert len(second.runs) == 2
    assert not second.more
    assert len({run.run_id for run in (*first.runs, *second.runs)}) == 7


async def test_no_free_slot_takes_nothing(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    assert len((await runner.claims(limit=0)).runs) == 0
    assert list(await runner.claim()) == ["r1"]


async def test_one_crowded_shard_does_not_fill_the_claim(world: World) -> None:
    runner = await world.runner()
    crowd = [world.new_run(f"crowd-{number}", slot=5) for number in range(20)]
    await world.runs.start_runs([*crowd, world.new_run("lone", slot=40_000)])
    claimed = await runner.claim(limit=10, per_shard=5)
    assert "lone" in claimed
    assert len(claimed) == 6


async def test_a_shard_gives_its_longest_due_runs_first(world: World) -> None:
    runner = await world.runner()
    for number in (3, 1, 2):
        await world.start(f"r{number}", slot=9)
    first = await runner.claim(limit=2, per_shard=2)
    assert sorted(first) == ["r1", "r3"]


async def test_orphans_and_due_runs_share_the_limit(world: World) -> None:
    runner = await world.runner()
    await world.start("orphan-1", "orphan-2")
    await runner.claim()
    await world.start("due-1", "due-2")
    assert len(await runner.claim(orphans=True, limit=3)) == 3


async def test_entered_at_is_that_of_the_first_life(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    first = await runner.claim_one("r1")
    await runner.park(first, wake_at=first.entered_at)
    second = await runner.claim_one("r1")
    assert second.entered_at == first.entered_at
    assert (second.taken_over, second.reclaim_count) == (False, 0)


async def test_a_claim_tells_the_wake_seq(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1", "m2")
    assert (await runner.claim_one("r1")).wake_seq == 2


async def test_a_message_makes_a_parked_run_due(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), wake_at=None, reason=Reason.SIGNAL)
    assert (await world.record("r1")).reason == "signal"
    await world.send("r1", kind=MessageKind.CANCEL, name="", body=None)
    assert list(await runner.claim()) == ["r1"]
    assert (await world.record("r1")).reason is None


async def test_five_hundred_runs_are_claimed_at_once(world: World) -> None:
    runner = await world.runner()
    await world.start(*(f"run-{number}" for number in range(500)))
    claimed = await runner.claim(limit=500)
    assert len(claimed) == 500
    assert len({run.claim_id for run in claimed.values()}) == 500


# -- upkeep of runs in memory


async def test_due_in_memory_names_runs_with_unseen_mail(world: World) -> None:
    runner = await world.runner()
    await world.start("quiet", "mail")
    await runner.claim()
    await world.deliver("mail", "m1")
    assert await world.runs.due_in_memory({}) == []
    assert list(await world.runs.due_in_memory({"quiet": 0, "mail": 0, "unknown": 0})) == ["mail"]
    assert list(await world.runs.due_in_memory({"quiet": 0, "mail": 1})) == []


async def test_due_in_memory_clears_what_was_seen(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.claim()
    await world.deliver("r1", "m1")
    await world.runs.due_in_memory({"r1": 0})
    assert (await world.record("r1")).wake_at is not None
    await world.runs.due_in_memory({"r1": 1})
    assert (await world.record("r1")).wake_at is None


async def test_due_in_memory_never_takes_a_parked_runs_timer(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    due = await world.now()
    await runner.park(await runner.claim_one("r1"), wake_at=due)
    await world.runs.due_in_memory({"r1": 0})
    assert ((await world.record("r1")).wake_at or 0) >= due
    assert list(await runner.claim()) == ["r1"]


async def test_upcoming_lists_parked_runs_soonest_first(world: World) -> None:
    runner = await world.runner([0, 1, 2])
    now = await world.now()
    wakes = {
        "b": to_instant(now + 20),
        "a": to_instant(now + 10),
        "late": to_instant(now + 900),
        "untimed": None,
        "held": to_instant(now + 5),
    }
    await world.runs.start_runs(
        [world.new_run(run_id, slot=number) for number, run_id in enumerate(wakes)]
    )
    for run_id, run in (await runner.claim()).items():
        reason = Reason.OPERATOR if run_id == "held" else Reason.TIMER
        await runner.park(run, wake_at=wakes[run_id], reason=reason)
    found = await world.runs.upcoming(runner.runner_id, runner.holds, now + 60, 10)
    assert [tuple(item) for item in found] == [("a", 1, wakes["a"]), ("b", 0, wakes["b"])]
    assert [
        item[0] for item in await world.runs.upcoming(runner.runner_id, runner.holds, now + 60, 1)
    ] == ["a"]
    stale = [ShardHold(hold.shard_id, hold.epoch - 1) for hold in runner.holds]
    assert list(await world.runs.upcoming(runner.runner_id, stale, now + 60, 10)) == []
    assert list(await world.runs.upcoming(runner.runner_id, [], now + 60, 10)) == []


async def test_a_claim_tells_of_the_last_write_before_it(world: World) -> None:
    """Enough to know whether anybody wrote since a park of mine."""
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    assert (run.last_batch, run.revision) == (None, 1)
    now = await world.now()
    park = write(run, entries=[entry(1)], outcome=Park(now, 0, Reason.TIMER))
    assert await runner.commit(park, batch_id=77) == {"r1": Verdict.PARKED}
    again = await runner.claim_one("r1")
    assert (again.last_batch, again.revision, again.next_seq) == (77, run.revision + 2, 2)

    assert await runner.park(again, reason=Reason.CRASH_LOOP) is Verdict.PARKED
    assert await world.runs.release_hold("r1", batch_id=78)
    released = await runner.claim_one("r1")
    assert (released.last_batch, released.revision) == (78, again.revision + 3)
