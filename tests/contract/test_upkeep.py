"""What an operator does to a whole cluster: another number of shards, and a restored backup."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import upkeep
from perdure.storage.errors import ConfigurationError, InUseError
from perdure.storage.interface import RunnerIdentity
from perdure.storage.model import SLOTS, Reason, RunStatus, ShardRow, Verdict
from perdure.storage.sqlite import SqliteDatabase
from perdure.storage.sqlite.upkeep import SqliteUpkeepStore
from perdure.storage.upkeep import EPOCHS_LOST, UpkeepStore, divided
from tests.contract.world import SHARDS, World, entry, write

pytestmark = pytest.mark.req("OP7")


@pytest.fixture
async def store(world: World) -> AsyncIterator[UpkeepStore]:
    database = world.database
    opened = (
        SqliteUpkeepStore(database)  # a database in memory is its object's
        if isinstance(database, SqliteDatabase)
        else upkeep(world.settings, clock=SystemClock())
    )
    await opened.open()
    yield opened
    await opened.close()


async def shards(world: World) -> list[ShardRow]:
    return list((await world.cluster.read_topology()).shards)


# -- another number of shards


@pytest.mark.parametrize("count", [1, 3, 7, 64])
async def test_resharded_slots_are_covered_once_and_epochs_never_fall(
    world: World, store: UpkeepStore, count: int
) -> None:
    for _ in range(3):
        runner = await world.runner([0, 2])
        await world.cluster.leave(runner.runner_id)
    before = await shards(world)
    done = await store.reshard(count, apply=True)
    after = await shards(world)
    assert (list(done.before), list(done.after)) == (before, after)
    assert [(s.shard_id, s.runner_id) for s in after] == [(n, None) for n in range(count)]
    assert (after[0].slot_lo, after[-1].slot_hi) == (0, SLOTS - 1)
    assert all(one.slot_hi + 1 == two.slot_lo for one, two in pairwise(after))
    for shard in after:
        over = [old.epoch for old in before if _overlap(old, shard)]
        assert shard.epoch == max(over)
    assert (await world.cluster.open()).shard_count == count
    assert (await world.cluster.agree(shard_count=count, lock_mode="row")).shard_count == count


def _overlap(one: ShardRow, two: ShardRow) -> bool:
    return one.slot_lo <= two.slot_hi and two.slot_lo <= one.slot_hi


async def test_runs_go_on_under_another_number_of_shards(world: World, store: UpkeepStore) -> None:
    """Parked ones, and those of a runner that died with its claims."""
    old = await world.runner()
    await world.start("parked", "running", "fresh-before")
    runs = await old.claim()
    await old.park(runs["parked"], wake_at=await world.now() - 1)
    await old.commit(write(runs["running"], entries=[entry(1)]))
    await world.kill(old)
    await store.reshard(9, apply=True)
    heir = await world.runner()
    assert len(heir.holds) == 9
    taken = await heir.claim(orphans=True)
    assert set(taken) == {"parked", "running", "fresh-before"}
    assert (taken["running"].taken_over, taken["running"].next_seq) == (True, 2)
    assert all(run.epoch > runs[run_id].epoch for run_id, run in taken.items())


async def test_a_dry_run_changes_nothing(world: World, store: UpkeepStore) -> None:
    before = await shards(world)
    planned = await store.reshard(5, apply=False)
    assert len(planned.after) == 5
    assert await shards(world) == before
    assert (await world.cluster.open()).shard_count == SHARDS


async def test_no_resharding_and_no_voiding_while_a_runner_lives(
    world: World, store: UpkeepStore
) -> None:
    runner = await world.runner(lease=60.0, replica="pod-7")
    before = await shards(world)
    for change in (store.reshard(5, apply=True), store.void_claims(force=False)):
        with pytest.raises(InUseError, match="pod-7 at 127"):
            await change
    assert len((await store.reshard(5, apply=False)).after) == 5  # only looked at
    assert await shards(world) == before
    assert (await world.cluster.renew(runner.runner_id, 60.0)).alive
    await world.cluster.leave(runner.runner_id)
    assert len((await store.reshard(5, apply=True)).after) == 5


async def test_a_runner_without_a_lease_is_judged_by_its_files_lock_alone(
    world: World, store: UpkeepStore
) -> None:
    me = RunnerIdentity(9, "alone", "127.0.0.1:1", [], {"lease": "none"})
    await world.cluster.register(me, 60.0)
    assert len((await store.reshard(5, apply=True)).after) == 5


@pytest.mark.parametrize("count", [0, -1, SLOTS + 1])
async def test_a_count_that_cannot_be_is_refused(store: UpkeepStore, count: int) -> None:
    with pytest.raises(ConfigurationError, match="65,536"):
        await store.reshard(count, apply=True)


def test_before_the_first_boot_there_is_nothing_to_divide() -> None:
    with pytest.raises(ConfigurationError, match="no pod has booted"):
        divided([], 4)


# -- after a restore


async def test_after_a_restore_nobody_has_anything(world: World, store: UpkeepStore) -> None:
    runner = await world.runner(lease=60.0)
    await world.start("running", "parked", "looped", "fresh")
    runs = await runner.claim()
    await world.start("pending")
    await runner.park(runs["parked"], wake_at=None)
    await runner.park(runs["looped"], reason=Reason.CRASH_LOOP)
    await runner.finish(runs["fresh"])
    cluster_id = (await world.cluster.open()).cluster_id
    done = await store.void_claims(force=True)
    assert [row.runner_id for row in done.runners] == [runner.runner_id]
    assert list(done.runs) == [("running", "tests.flow")]
    assert done.shards == SHARDS
    assert (await world.cluster.open()).cluster_id == done.cluster_id != cluster_id
    assert [(s.runner_id, s.epoch) for s in await shards(world)] == [(None, 1 + EPOCHS_LOST)] * 4
    record = await world.record("running")
    assert (record.status, record.claim_id, record.runner_id) == (RunStatus.SUSPENDED, None, None)
    assert record.wake_at is not None
    assert (await world.record("parked")).wake_at is None
    assert (await world.record("looped")).hold == "crash-loop"
    # Whoever was left over from before writes nothing.
    assert not (await world.cluster.renew(runner.runner_id, 60.0)).alive
    heir = await world.runner()
    taken = await heir.claim(orphans=True)
    assert set(taken) == {"running", "pending"}
    assert (taken["running"].reclaim_count, taken["running"].taken_over) == (0, False)
    settled = await heir.commit(write(runs["running"], entries=[entry(1)]))
    assert settled == {"running": Verdict.FENCED}


async def test_a_second_time_there_is_nothing_to_void(world: World, store: UpkeepStore) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.claim_one("r1")
    first = await store.void_claims(force=False)
    before = await shards(world)
    again = await store.void_claims(force=False)
    assert (first.cluster_id is not None, again.cluster_id) == (True, None)
    assert (list(again.runs), list(again.runners), again.shards) == ([], [], 0)
    assert await shards(world) == before
    assert (await world.cluster.open()).cluster_id == first.cluster_id
