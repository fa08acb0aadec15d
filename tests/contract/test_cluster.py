"""Runners, leases and shards (R2)."""

from __future__ import annotations

import asyncio

import pytest

from perdure.storage.errors import DisagreementError, RunnerDeclaredDead
from perdure.storage.interface import RunnerIdentity
from perdure.storage.model import SLOTS, RunnerRow, ShardHold
from tests.contract.world import SHARDS, World
from tests.harness.waiting import until


async def row_of(world: World, runner_id: int) -> RunnerRow:
    rows = {row.runner_id: row for row in (await world.cluster.read_topology()).runners}
    return rows[runner_id]


async def owners(world: World) -> dict[int, tuple[int | None, int]]:
    """shard → (runner, epoch)"""
    shards = (await world.cluster.read_topology()).shards
    return {shard.shard_id: (shard.runner_id, shard.epoch) for shard in shards}


# -- what all agree on


@pytest.mark.req("CL1")
async def test_the_first_boot_decides_and_later_ones_must_agree(url: str) -> None:
    world = await World(url).open(shard_count=None)
    try:
        assert (await world.cluster.open()).shard_count == 0
        meta = await world.cluster.agree(shard_count=8, lock_mode="row")
        assert (meta.shard_count, meta.lock_mode, meta.hash_name) == (8, "row", "xxh3_64")
        assert await world.cluster.agree(shard_count=8, lock_mode="row") == meta
        with pytest.raises(DisagreementError, match="8"):
            await world.cluster.agree(shard_count=16, lock_mode="row")
        with pytest.raises(DisagreementError, match="row"):
            await world.cluster.agree(shard_count=8, lock_mode="advisory")
        assert (await world.runs.open()).shard_count == 8
        assert len(await owners(world)) == 8
    finally:
        await world.close()


@pytest.mark.req("CL1")
async def test_all_sign_their_hints_with_the_key_of_the_first(shared_url: str) -> None:
    worlds = [await World(shared_url).open() for _ in range(4)]
    try:
        told = await asyncio.gather(*(w.cluster.hint_key(f"key-{n}") for n, w in enumerate(worlds)))
        assert len(set(told)) == 1
        assert told[0] in {f"key-{n}" for n in range(4)}
        assert await worlds[0].cluster.hint_key("later") == told[0]
    finally:
        for world in worlds:
            await world.close()


@pytest.mark.req("CL1")
@pytest.mark.parametrize("count", [1, 3, 256, 1_000])
async def test_shards_cover_every_slot_once_and_evenly(url: str, count: int) -> None:
    world = await World(url).open(shard_count=count)
    shards = sorted((await world.cluster.read_topology()).shards, key=lambda shard: shard.shard_id)
    await world.close()
    assert [shard.shard_id for shard in shards] == list(range(count))
    slots = [slot for shard in shards for slot in range(shard.slot_lo, shard.slot_hi + 1)]
    assert slots == list(range(SLOTS))
    sizes = {shard.slot_hi - shard.slot_lo for shard in shards}
    assert max(sizes) - min(sizes) <= 1
    assert {(shard.runner_id, shard.epoch) for shard in shards} == {(None, 0)}


# -- runner rows


async def test_a_registered_runner_is_seen_as_it_described_itself(world: World) -> None:
    me = RunnerIdentity(
        42, "pod-ä'0", "10.0.0.1:34000", ["a", "b'\" 🏁"], {"python": "3.11", "host": "x\ny"}
    )
    await world.cluster.register(me, 10.0)
    topology = await world.cluster.read_topology()
    (row,) = topology.runners
    assert (row.runner_id, row.replica_id, row.address) == (42, me.replica_id, me.address)
    assert (list(row.workflows), dict(row.info)) == (list(me.workflows), dict(me.info))
    assert (row.dead, row.draining, row.renew_count) == (False, False, 0)
    assert row.expires_at == pytest.approx(row.started_at + 10.0, abs=1.0)
    assert row.started_at <= topology.db_now < row.expires_at


async def test_registering_again_after_a_lost_answer_is_the_same_runner(world: World) -> None:
    me = RunnerIdentity(42, "pod", "x:1", [], {})
    await world.cluster.register(me, 0.0)
    await world.cluster.register(me, 30.0)
    row = await row_of(world, 42)
    assert row.expires_at > row.started_at + 10


async def test_a_dead_runner_cannot_register_again(world: World) -> None:
    runner = await world.runner()
    await world.kill(runner)
    with pytest.raises(RunnerDeclaredDead):
        await world.cluster.register(RunnerIdentity(runner.runner_id, "pod", "x:1", [], {}), 30.0)
    assert (await row_of(world, runner.runner_id)).dead


@pytest.mark.req("CL3")
async def test_a_renewal_prolongs_the_lease_and_counts(world: World) -> None:
    runner = await world.runner(lease=1.0)
    first = await row_of(world, runner.runner_id)
    renewal = await world.cluster.renew(runner.runner_id, 60.0)
    assert renewal.alive
    second = await row_of(world, runner.runner_id)
    assert second.renew_count == first.renew_count + 1
    assert second.expires_at == pytest.approx(renewal.db_now + 60.0, abs=1.0)
    await world.cluster.renew(runner.runner_id, 40.0)
    third = await row_of(world, runner.runner_id)
    assert (third.renew_count, third.expires_at) == (2, second.expires_at)
    last = await world.cluster.renew(runner.runner_id, 5.0)
    fourth = await row_of(world, runner.runner_id)
    assert fourth.expires_at == pytest.approx(last.db_now + 10.0, abs=1.0), "two leases at most"


@pytest.mark.req("CL3")
async def test_a_renewal_never_revives_the_dead_nor_makes_a_row(world: World) -> None:
    runner = await world.runner()
    await world.kill(runner)
    before = await row_of(world, runner.runner_id)
    assert not (await world.cluster.renew(runner.runner_id, 60.0)).alive
    assert await row_of(world, runner.runner_id) == before
    assert not (await world.cluster.renew(1, 60.0)).alive
    assert len((await world.cluster.read_topology()).runners) == 1


async def test_draining_is_told_to_the_others(world: World) -> None:
    runner, other = await world.runner(), await world.runner([])
    await world.cluster.set_draining(runner.runner_id)
    assert (await row_of(world, runner.runner_id)).draining
    assert not (await row_of(world, other.runner_id)).draining


@pytest.mark.req("CL3")
async def test_only_an_expired_lease_that_was_not_renewed_makes_dead(world: World) -> None:
    living = await world.runner(lease=60.0)
    assert not await world.cluster.declare_dead(living.runner_id, 0)
    expired = await world.runner([], lease=0.0)
    assert not await world.cluster.declare_dead(expired.runner_id, 7)
    await world.cluster.renew(expired.runner_id, 0.0)
    assert not await world.cluster.declare_dead(expired.runner_id, 0)
    assert not (await row_of(world, expired.runner_id)).dead

    async def declared() -> bool:
        return await world.cluster.declare_dead(expired.runner_id, 1)

    await until(declared, what="an expired runner declared dead", deadline=5.0)
    assert (await row_of(world, expired.runner_id)).dead
    assert not (await row_of(world, living.runner_id)).dead
    # Whoever asks later learns the same.
    assert await world.cluster.declare_dead(expired.runner_id, 99)


@pytest.mark.req("CL6")
async def test_the_only_user_of_a_database_declares_everybody_else_dead(world: World) -> None:
    old, older = await world.runner(lease=60.0), await world.runner([], lease=60.0)
    me = await world.runner([], lease=60.0)
    assert sorted(await world.cluster.declare_others_dead(me.runner_id)) == sorted(
        [old.runner_id, older.runner_id]
    )
    assert await world.cluster.declare_others_dead(me.runner_id) == []
    assert [
        row.dead
        for row in (await world.cluster.read_topology()).runners
        if row.runner_id == me.runner_id
    ] == [False]


# -- shards


@pytest.mark.req("CL1")
async def test_free_shards_are_taken_with_a_higher_epoch(world: World) -> None:
    runner = await world.runner([])
    assert list(await runner.take([2, 0])) == [ShardHold(0, 1), ShardHold(2, 1)]
    assert await owners(world) == {
        0: (runner.runner_id, 1),
        1: (None, 0),
        2: (runner.runner_id, 1),
        3: (None, 0),
    }
    assert list(await runner.take([], [])) == []


@pytest.mark.req("CL4")
async def test_a_shard_of_a_live_runner_is_not_taken(world: World) -> None:
    holder, other = await world.runner([0, 1]), await world.runner([])
    assert list(await other.take(range(SHARDS))) == [ShardHold(2, 1), ShardHold(3, 1)]
    assert list(await holder.take([0])) == []
    assert (await owners(world))[0] == (holder.runner_id, 1)


@pytest.mark.req("CL5")
async def test_shards_of_a_dead_runner_are_taken(world: World) -> None:
    dead, other, heir = await world.runner([0, 1]), await world.runner([2]), await world.runner([])
    await world.kill(dead)
    assert list(await heir.take(range(SHARDS))) == [ShardHold(3, 1)]
    taken = await heir.take(range(SHARDS), dead=[dead.runner_id])
    assert list(taken) == [ShardHold(0, 2), ShardHold(1, 2)]
    assert (await owners(world))[2] == (other.runner_id, 1)


@pytest.mark.req("CL4")
async def test_a_runner_that_is_dead_or_unknown_takes_nothing(world: World) -> None:
    dead = await world.runner([0])
    await world.kill(dead)
    assert list(await dead.take(range(SHARDS))) == []
    assert list(await world.cluster.take_shards(4711, [0, 1], [dead.runner_id])) == []
    assert (await owners(world))[1] == (None, 0)


async def test_a_released_shard_is_free_and_keeps_its_epoch(world: World) -> None:
    runner, other = await world.runner(), await world.runner([])
    await world.cluster.release_shards(runner.runner_id, [ShardHold(0, 1), ShardHold(3, 1)])
    assert (await owners(world))[0] == (None, 1)
    assert (await owners(world))[1] == (runner.runner_id, 1)
    assert list(await other.take(range(SHARDS))) == [ShardHold(0, 2), ShardHold(3, 2)]
    await world.cluster.release_shards(runner.runner_id, [])


@pytest.mark.req("CL4")
async def test_a_release_of_what_is_not_mine_is_ignored(world: World) -> None:
    runner, other = await world.runner(), await world.runner([])
    await world.cluster.release_shards(other.runner_id, [ShardHold(0, 1)])
    await world.cluster.release_shards(runner.runner_id, [ShardHold(1, 0), ShardHold(2, 7)])
    assert {owner for owner, _ in (await owners(world)).values()} == {runner.runner_id}


async def test_who_leaves_gives_everything_up_and_is_dead(world: World) -> None:
    runner, other = await world.runner([0, 1]), await world.runner([2])
    await world.cluster.leave(runner.runner_id)
    assert await owners(world) == {
        0: (None, 1),
        1: (None, 1),
        2: (other.runner_id, 1),
        3: (None, 0),
    }
    assert (await row_of(world, runner.runner_id)).dead
    assert not (await row_of(world, other.runner_id)).dead
    await world.cluster.leave(runner.runner_id)


async def test_dead_rows_are_deleted_once_nothing_names_them(world: World) -> None:
    gone, holding, running, living = (
        await world.runner([]),
        await world.runner([0]),
        await world.runner([1]),
        await world.runner([2]),
    )
    await world.runs.start_runs([world.new_run("r1", slot=SLOTS // SHARDS)])
    await running.claim_one("r1")
    await world.cluster.release_shards(running.runner_id, running.holds)
    for runner in (gone, holding, running):
        await world.kill(runner)
    long_ago = await world.now() - 3_600
    assert await world.cluster.delete_dead_runners(long_ago) == 0
    assert await world.cluster.delete_dead_runners(await world.now() + 1) == 1
    left = {row.runner_id for row in (await world.cluster.read_topology()).runners}
    assert left == {holding.runner_id, running.runner_id, living.runner_id}
    await living.take([0, 1], dead=[holding.runner_id])
    await living.claim_one("r1", orphans=True)
    assert await world.cluster.delete_dead_runners(await world.now() + 1) == 2


@pytest.mark.req("CL11")
async def test_a_keeper_that_wants_no_connection_any_more_says_its_last_words_on_the_one_it_has(
    world: World,
) -> None:
    runner = await world.runner()
    world.database.keeper().forgo()  # also without ever having been opened
    keeper = world.database.keeper()
    await keeper.open()
    keeper.forgo()
    await keeper.leave(runner.runner_id)
    await keeper.close()
    assert (await row_of(world, runner.runner_id)).dead
