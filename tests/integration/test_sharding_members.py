"""Members of a cluster come, go and die; shards follow them. On each engine."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable

import pytest

from perdure.sharding.keeper import FixedKeeper, Keeper
from perdure.sharding.ownership import Ownership
from perdure.sharding.runner_port import RunnerPort
from perdure.sharding.slots import shard_ranges
from perdure.sharding.state import KeeperState
from perdure.storage.clock import SystemClock
from perdure.storage.errors import InUseError, UnknownOutcome
from perdure.storage.interface import ClusterStore, RunnerIdentity
from perdure.storage.model import ShardHold
from tests.harness.waiting import until
from tests.integration.sharding_members import LEASES, Cluster, Member, cluster

pytestmark = pytest.mark.alone

SLACK = 0.4
"""Seconds that a busy machine may add to what the protocol takes."""


@pytest.mark.req("CL1")
async def test_a_runner_alone_takes_everything_within_one_look(migrated_url):
    async with cluster(migrated_url) as c:
        clock = SystemClock()
        (member,) = await c.join(1)
        began = clock.monotonic()
        await c.even(member)
        assert clock.monotonic() - began <= LEASES.look + SLACK
        assert [len(holds) for holds in member.gains] == [256]


@pytest.mark.req("CL1")
async def test_rows_of_shards_have_the_slots_that_are_computed(migrated_url):
    async with cluster(migrated_url, shards=255) as c:
        rows = (await c.topology()).shards
        assert [(row.slot_lo, row.slot_hi) for row in rows] == shard_ranges(255)


@pytest.mark.req("CL1")
async def test_three_share_evenly_and_a_newcomer_moves_only_its_share(migrated_url):
    async with cluster(migrated_url) as c:
        one, two = await c.join(1, 2)
        await c.even(one, two)
        before = await c.owners()
        (three,) = await c.join(3)
        await c.even(one, two, three)
        after = await c.owners()
        moved = [shard for shard in before if before[shard] != after[shard]]
        assert {after[shard][0] for shard in moved} == {3}
        assert len(moved) == three.held <= 1.3 * 256 / 3


@pytest.mark.req("CL1", "CL5")
async def test_who_leaves_cleanly_is_replaced_at_once(migrated_url):
    async with cluster(migrated_url) as c:
        one, two, three = await c.join(1, 2, 3)
        await c.even(one, two, three)
        before = await c.owners()
        began = c.clock.monotonic()
        await three.leave()
        await c.even(one, two)
        assert c.clock.monotonic() - began <= 2 * LEASES.look + SLACK
        assert c.clock.monotonic() - began < LEASES.lease / 2, "nobody waited for the lease"
        after = await c.owners()
        assert all(after[shard] == before[shard] for shard in before if before[shard][0] != 3)
        row = await c.row(3)
        assert row is not None
        assert row.dead
        assert row.draining


@pytest.mark.req("CL5")
async def test_a_shard_is_handed_over_when_its_steps_have_ended_and_not_before(migrated_url):
    async with cluster(migrated_url, shards=8) as c:
        one, two = await c.join(1, 2)
        await c.even(one, two)
        slow = min(two.ownership.holds)
        two.busy[slow] = asyncio.Event()
        leaving = asyncio.create_task(two.leave())
        await until(lambda: one.held == 7, what="all but the busy shard have moved")
        assert (await c.owners())[slow][0] == 2
        assert not leaving.done()
        two.busy[slow].set()
        await leaving
        await c.even(one)


@pytest.mark.req("CL3", "CL5")
async def test_a_killed_runner_is_declared_dead_in_time_and_not_too_early(migrated_url):
    async with cluster(migrated_url) as c:
        one, two, three = await c.join(1, 2, 3)
        await c.even(one, two, three)
        before = await c.owners()
        await three.kill()
        last = await c.row(3)
        assert last is not None
        assert not last.dead

        async def died_at() -> float | None:
            topology = await c.topology()
            dead = any(row.runner_id == 3 and row.dead for row in topology.runners)
            return topology.db_now if dead else None

        dead_at = await until(died_at, what="the killed runner is declared dead")
        assert dead_at is not None
        assert dead_at >= last.expires_at
        assert dead_at <= last.expires_at + 1.5 * LEASES.renewal + LEASES.look + SLACK
        await c.even(one, two)
        assert (await c.topology()).db_now - dead_at <= LEASES.look + SLACK
        after = await c.owners()
        assert all(after[shard] == before[shard] for shard in before if before[shard][0] != 3)
        assert all(after[shard][1] > before[shard][1] for shard in before if before[shard][0] == 3)


@pytest.mark.req("CL3")
async def test_a_silent_runner_is_not_given_up_by_an_observer_that_has_just_come(migrated_url):
    """Its lease is long over by the database's clock; the newcomer waits 1.5 renewals all the same."""
    async with cluster(migrated_url) as c:
        (old,) = await c.join(1)
        await c.even(old)
        await old.kill()

        async def expired() -> bool:
            topology = await c.topology()
            return all(row.expires_at < topology.db_now for row in topology.runners)

        await until(expired, what="the lease is over")
        (new,) = await c.join(2)
        began = c.clock.monotonic()
        await until(lambda: new.held == 256, what="the newcomer has everything")
        waited = c.clock.monotonic() - began
        assert 1.5 * LEASES.renewal - LEASES.look <= waited <= 1.5 * LEASES.renewal + SLACK


@pytest.mark.req("CL5")
async def test_a_runner_declared_dead_drops_everything_and_never_comes_back(migrated_url):
    async with cluster(migrated_url) as c:
        (member,) = await c.join(1)
        await c.even(member)
        judge = c.database.cluster()
        await judge.open()
        await judge.declare_others_dead(99)
        await judge.close()
        await until(lambda: not member.alive, what="it has read that it is dead")
        await until(lambda: not member.held, what="it holds nothing")
        row = await c.row(1)
        assert row is not None
        assert {owner for owner, _ in (await c.owners()).values()} == {1}, "it wrote nothing"
        await member.ownership.drain()  # returns: there is nothing to drain
        await member.kill()
        assert await c.row(1) == row


@pytest.mark.req("CL3")
async def test_the_later_of_two_live_processes_with_one_replica_id_says_so(migrated_url):
    async with cluster(migrated_url, shards=4) as c:
        one, two = await c.join(1, 2, replica="orders-0")
        failed = await until(lambda: two.keeper.state.failure, what="the newcomer has seen it")
        assert isinstance(failed, InUseError)
        assert "'orders-0'" in str(failed)
        assert "10.0.0.1:34000" in str(failed)
        assert "10.0.0.2:34000" in str(failed)
        assert two.keeper.unready() == str(failed)
        assert one.keeper.state.failure is None
        assert one.keeper.unready() is None


@pytest.mark.req("CL3")
async def test_the_row_of_a_restarted_pods_former_life_ages_out_silently(migrated_url):
    async with cluster(migrated_url) as c:
        (old,) = await c.join(1, replica="orders-0")
        await c.even(old)
        await old.kill()
        (new,) = await c.join(2, replica="orders-0")
        await c.even(new)
        renewed = LEASES.lease / LEASES.renewal + 2

        async def lasted() -> bool:
            row = await c.row(2)
            return row is not None and row.renew_count >= renewed

        await until(lasted, what="the new life has lasted longer than a lease")
        assert new.keeper.state.failure is None
        assert new.alive


def losing_answers(store: ClusterStore, losing: list[str]) -> ClusterStore:
    """A real store that loses the next answer to each call named in ``losing``, after it was carried out."""

    def lossy(name: str) -> Callable[..., Awaitable[object]]:
        real = getattr(store, name)

        async def call(*args: object) -> object:
            answer = await real(*args)
            if name in losing:
                losing.remove(name)
                raise UnknownOutcome(f"the answer to {name} was lost")
            return answer

        return call

    for name in ("take_shards", "release_shards"):
        setattr(store, name, lossy(name))
    return store


@pytest.mark.req("CL11")
async def test_takes_and_releases_of_unknown_outcome_are_settled_by_the_next_look(migrated_url):
    async with cluster(migrated_url, shards=16) as c:
        losing = ["take_shards"]
        one = c.member(1, open_store=lambda: losing_answers(c.database.cluster(), losing))
        await one.start()
        await c.even(one)
        assert not losing
        assert {epoch for _, epoch in (await c.owners()).values()} == {1}, "taken once, adopted"
        losing.append("release_shards")
        (two,) = await c.join(2)
        await c.even(one, two)
        assert not losing


@pytest.mark.req("CL3")
async def test_a_keeper_that_ends_by_a_fault_of_its_own_says_so(migrated_sqlite_url):
    """Here the fault is in what it was given: the runner must not go on believing in its lease."""
    async with cluster(migrated_sqlite_url, shards=4) as c:
        states: list[KeeperState] = []

        def on_state(state: KeeperState) -> None:
            states.append(state)
            if len(states) > 4 and state.alive:
                raise ValueError("cannot take this state")

        identity = RunnerIdentity(1, "pod-1", "10.0.0.1:34000", [], {})
        keeper = Keeper(c.database.cluster, identity, LEASES, c.clock, on_state)
        await asyncio.to_thread(keeper.start)
        await until(lambda: not states[-1].alive, what="it says that it has ended")
        assert "cannot take this state" in str(keeper.unready())
        assert not keeper.state.trusted(c.clock.monotonic())
        await asyncio.to_thread(keeper.stop)


@pytest.mark.req("CL3", "CL11")
async def test_a_blocked_main_loop_keeps_its_lease_and_is_not_ready(migrated_url):
    clock = SystemClock()
    port = RunnerPort(host="127.0.0.1", port=0, status=lambda: {"shards": 3})
    async with cluster(migrated_url, shards=8) as c:
        (member,) = await c.join(1, port=port)
        await c.even(member)
        row = await c.row(1)
        assert row is not None
        assert row.address == port.address, "the real port went into the address"
        assert get(port, "/readyz") == (200, "ok\n")
        answers = asyncio.create_task(asyncio.to_thread(watch, port, clock, 2.5))
        await asyncio.sleep(0)
        until_then = clock.monotonic() + 2.6
        while clock.monotonic() < until_then:  # user code that never awaits
            pass
        seen = await answers
        assert (503, True) in seen
        assert {status for status, lagging in seen if not lagging} == {200}
        assert member.trusted
        later = await c.row(1)
        assert later is not None
        assert not later.dead
        assert later.renew_count >= row.renew_count + 4
        await until(lambda: get(port, "/readyz")[0] == 200, what="ready again")


def get(port: RunnerPort, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{port.address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def watch(port: RunnerPort, clock: SystemClock, seconds: float) -> set[tuple[int, bool]]:
    """What /readyz says while another thread blocks: status, and whether the main loop is the reason."""
    seen, end = set(), clock.monotonic() + seconds
    while clock.monotonic() < end:
        assert get(port, "/livez")[0] == 200
        status, text = get(port, "/readyz")
        seen.add((status, "main loop" in text))
    return seen


@pytest.mark.req("CL7")
async def test_a_taken_port_is_named_before_the_runner_registers(migrated_url):
    async with cluster(migrated_url, shards=4) as c:
        first = RunnerPort(host="127.0.0.1", port=0, status=dict)
        number = first.bind().rpartition(":")[2]
        taken = RunnerPort(host="127.0.0.1", port=int(number), status=dict)
        with pytest.raises(
            InUseError, match=rf"port {number} on 127\.0\.0\.1.*PERDURE_RUNNER_PORT"
        ):
            await c.member(1, port=taken).start()
        await first.close()
        assert await c.row(1) is None


@pytest.mark.req("CL6")
async def test_memory_runner_storage_takes_everything_at_once_and_renews_nothing(
    migrated_sqlite_url,
):
    async with cluster(migrated_sqlite_url) as c:
        (before,) = await c.join(1)
        await c.even(before)
        await before.kill()
        port = RunnerPort(host="127.0.0.1", port=0, status=lambda: {"held": 256})
        member = await fixed(c, 2, port)
        await until(lambda: len(member.holds) == 256, what="all shards are taken", deadline=1.0)
        row = await c.row(2)
        assert row is not None
        assert row.renew_count == 0
        assert get(port, "/readyz") == (200, "ok\n")
        assert get(port, "/status") == (200, '{"held": 256}')
        await member.close()
        row = await c.row(2)
        assert row is not None
        assert row.dead
        assert {owner for owner, _ in (await c.owners()).values()} == {None}


class Fixed:
    """A process with runner storage `memory`."""

    def __init__(self, keeper: FixedKeeper, ownership: Ownership) -> None:
        self._keeper, self._ownership = keeper, ownership
        ownership.update(keeper.state)
        self._task = asyncio.create_task(ownership.run())

    @property
    def holds(self) -> dict[int, ShardHold]:
        return self._ownership.holds

    async def close(self) -> None:
        await self._ownership.drain()
        await self._task
        await asyncio.to_thread(self._keeper.stop)


async def fixed(c: Cluster, number: int, port: RunnerPort) -> Fixed:
    identity = RunnerIdentity(number, "dev", "", [], {})
    keeper = FixedKeeper(
        c.database.cluster, identity, LEASES, c.clock, lambda state: None, port=port
    )
    await asyncio.to_thread(keeper.start)
    user = Member(number, c.database)  # only its `gained` and `vacate`
    ownership = Ownership(
        number, c.database.cluster, user, LEASES, c.clock, shards_changed=keeper.look_now
    )
    return Fixed(keeper, ownership)
