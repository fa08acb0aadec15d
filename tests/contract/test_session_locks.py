"""Locks that end with a session, where an engine has them, and the lock mode of a cluster everywhere."""

from __future__ import annotations

import pytest

from perdure.storage.errors import DisagreementError
from tests.contract.world import World
from tests.harness.waiting import until

pytestmark = pytest.mark.req("CL2")


def locking(world: World) -> bool:
    return world.cluster.capabilities.session_locks


async def is_dead(world: World, runner_id: int) -> bool:
    rows = {row.runner_id: row for row in (await world.cluster.read_topology()).runners}
    return rows[runner_id].dead


async def test_a_database_says_what_its_locks_are_worth(world: World) -> None:
    facts = await world.cluster.read_lock_facts()
    assert facts.session_locks == locking(world)
    assert facts.rotated is None
    assert facts.several_writers is None


async def test_a_lock_is_seen_while_its_connection_lives_and_by_its_own_session(
    worlds: tuple[World, World],
) -> None:
    mine, other = worlds
    runner, bystander = await mine.runner([], lease=60.0), await mine.runner([], lease=60.0)
    ids = [runner.runner_id, bystander.runner_id]
    session = await mine.cluster.hold_lock(runner.runner_id)
    assert (session is not None) == locking(mine)
    assert session == (await mine.cluster.renew(runner.runner_id, 60.0)).session
    free = {bystander.runner_id} if locking(mine) else set()
    assert set(await other.cluster.free_locks(ids)) == free
    assert set(await mine.cluster.free_locks(ids)) == free
    assert await mine.cluster.hold_lock(runner.runner_id) == session, "twice does no harm"
    assert await other.cluster.hold_lock(runner.runner_id) is None
    assert set(await other.cluster.free_locks([])) == set()


async def test_who_is_lost_may_be_declared_dead_before_the_lease_is_over(
    worlds: tuple[World, World],
) -> None:
    """Only while nobody holds the lock, and only if there was no newer heartbeat."""
    mine, other = worlds
    runner = await mine.runner([], lease=60.0)
    await mine.cluster.hold_lock(runner.runner_id)
    assert not await other.cluster.declare_lost(runner.runner_id, 0)
    await mine.cluster.close()

    async def released() -> bool:
        return not locking(other) or bool(await other.cluster.free_locks([runner.runner_id]))

    await until(released, what="the lock is free")
    assert not await other.cluster.declare_lost(runner.runner_id, 1)
    assert not await is_dead(other, runner.runner_id)
    assert await other.cluster.declare_lost(runner.runner_id, 0) == locking(other)
    assert await is_dead(other, runner.runner_id) == locking(other)
    assert await other.cluster.declare_lost(runner.runner_id, 9) == locking(other)


async def test_a_session_that_holds_somebodys_lock_can_be_ended(
    worlds: tuple[World, World],
) -> None:
    mine, other = worlds
    runner = await mine.runner([], lease=60.0)
    lost: list[bool] = []
    mine.cluster.on_lost(lambda: lost.append(True))
    await mine.cluster.hold_lock(runner.runner_id)
    await other.cluster.end_lock_holder(runner.runner_id)
    if not locking(mine):
        assert await other.cluster.hold_lock(runner.runner_id) is None
        return

    async def taken() -> bool:
        return await other.cluster.hold_lock(runner.runner_id) is not None

    await until(taken, what="the lock changes hands")
    await other.cluster.end_lock_holder(runner.runner_id)
    assert (await other.cluster.renew(runner.runner_id, 60.0)).alive, "nobody ends itself"
    await until(lambda: lost == [True], what="its owner is told that the connection is gone")


async def test_a_cluster_that_stands_still_can_change_its_mode(world: World) -> None:
    living = await world.runner(lease=60.0, replica="orders-0")
    with pytest.raises(DisagreementError, match=r"orders-0.*127\.0\.0\.1:1.*stop all pods"):
        await world.cluster.change_lock_mode("advisory")
    assert (await world.cluster.agree(shard_count=4, lock_mode="row")).lock_mode == "row"
    await world.cluster.leave(living.runner_id)
    stopped = await world.runner(lease=0.0)

    async def changed() -> bool:
        try:
            await world.cluster.change_lock_mode("advisory")
        except DisagreementError:
            return False
        return True

    await until(changed, what="the last lease is over")
    assert await is_dead(world, stopped.runner_id), "it comes back as another, if at all"
    agreed = await world.cluster.agree(shard_count=4, lock_mode="advisory")
    assert agreed.lock_mode == "advisory"
    with pytest.raises(DisagreementError, match="PERDURE_SHARD_LOCK=advisory"):
        await world.cluster.agree(shard_count=4, lock_mode="row")


async def test_the_server_is_written_down_and_has_not_changed(world: World) -> None:
    await world.cluster.record_server()
    await world.cluster.record_server()
    meta = await world.runs.open()
    assert (meta.server is not None) == locking(world)
    assert meta.server_change is None
    assert world.cluster.history == 0
