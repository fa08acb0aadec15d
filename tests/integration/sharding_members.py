"""Members of a cluster in this process: a keeper, its ownership, and a user of shards that is told when to let go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from perdure.sharding.keeper import Keeper
from perdure.sharding.ownership import Ownership
from perdure.sharding.runner_port import RunnerPort
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.storage.clock import Clock, SystemClock
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.interface import ClusterStore, RunnerIdentity
from perdure.storage.model import RunnerRow, ShardHold, Topology
from tests.harness.waiting import until

LEASES = LeaseConfig(lease=1.6, renewal=0.4, look=0.1)


class Member:
    """One runner. hints: whether it tells the other members of ``crowd`` about changes of shards."""

    def __init__(
        self,
        number: int,
        database: Database,
        *,
        clock: Clock | None = None,
        leases: LeaseConfig = LEASES,
        replica: str | None = None,
        port: RunnerPort | None = None,
        crowd: list[Member] | None = None,
        open_store: Callable[[], ClusterStore] | None = None,
    ) -> None:
        self.number = number
        self.states: list[KeeperState] = []
        self.gains: list[Sequence[ShardHold]] = []
        self.busy: dict[int, asyncio.Event] = {}
        self.vacated: list[int] = []
        self._clock = clock or SystemClock()
        self._loop = asyncio.get_running_loop()
        self._crowd = [] if crowd is None else crowd
        self._crowd.append(self)
        self.keeper = Keeper(
            database.keeper,
            RunnerIdentity(number, replica or f"pod-{number}", f"10.0.0.{number}:34000", [], {}),
            leases,
            self._clock,
            self._on_state,
            port=port,
            main_loop=self._loop,
        )
        self.ownership = Ownership(
            number,
            open_store or database.cluster,
            self,
            leases,
            self._clock,
            shards_changed=self._shards_changed,
        )
        self._task: asyncio.Task[None] | None = None

    # ---- the user of shards -------------------------------------------------------------------

    def gained(self, holds: Sequence[ShardHold]) -> None:
        self.gains.append(holds)

    async def vacate(self, shard_id: int) -> None:
        assert shard_id not in self.ownership.holds
        if shard_id in self.busy:
            await self.busy[shard_id].wait()
        self.vacated.append(shard_id)

    # ---- life ---------------------------------------------------------------------------------

    async def start(self) -> Member:
        await asyncio.to_thread(self.keeper.start)
        self.ownership.update(self.keeper.state)
        self._task = asyncio.create_task(self.ownership.run(), name=f"ownership-{self.number}")
        return self

    async def leave(self) -> None:
        await self.ownership.drain()
        await self._end(leave=True)

    async def kill(self) -> None:
        """Go without a word, as a process that is killed."""
        await self._end(leave=False)

    async def _end(self, *, leave: bool) -> None:
        if self in self._crowd:
            self._crowd.remove(self)
        await asyncio.to_thread(self.keeper.stop, leave=leave)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def held(self) -> int:
        return len(self.ownership.holds)

    @property
    def alive(self) -> bool:
        return self.keeper.state.alive

    @property
    def trusted(self) -> bool:
        return self.keeper.state.trusted(self._clock.monotonic())

    def _on_state(self, state: KeeperState) -> None:
        self._loop.call_soon_threadsafe(self._adopt, state)

    def _adopt(self, state: KeeperState) -> None:
        self.states.append(state)
        self.ownership.update(state)

    def _shards_changed(self) -> None:
        for member in self._crowd:
            member.keeper.look_now()


class Cluster:
    """A database with 256 shards, members, and an observer of its own."""

    def __init__(
        self,
        url: str,
        *,
        shards: int = 256,
        clock: Clock | None = None,
        leases: LeaseConfig = LEASES,
        lock: str = "row",
    ) -> None:
        self.leases = replace(leases, advisory=lock == "advisory")
        self.clock = clock or SystemClock()
        self.settings = DatabaseSettings(url)
        self.database = connect(self.settings, clock=self.clock)
        self.shards = shards
        self.members: list[Member] = []
        self.everyone: list[Member] = []
        self.observer = self.database.cluster()

    async def open(self) -> Cluster:
        await self.observer.open()
        await self.observer.agree(shard_count=self.shards, lock_mode=self.leases.mode)
        return self

    async def close(self) -> None:
        for member in self.everyone:
            await member.kill()
        await self.observer.close()

    def member(self, number: int, *, url: str | None = None, **options: object) -> Member:
        """A new member, not started yet, with a database object of its own, as a process has.

        url: of the same database by another way."""
        settings = self.settings if url is None else DatabaseSettings(url)
        database = connect(settings, clock=self.clock)
        options = {"leases": self.leases, **options}
        member = Member(number, database, clock=self.clock, crowd=self.members, **options)  # type: ignore[arg-type]
        self.everyone.append(member)
        return member

    async def join(self, *numbers: int, url: str | None = None, **options: object) -> list[Member]:
        return [await self.member(number, url=url, **options).start() for number in numbers]

    async def topology(self) -> Topology:
        return await self.observer.read_topology()

    async def row(self, number: int) -> RunnerRow | None:
        rows = (await self.topology()).runners
        return next((row for row in rows if row.runner_id == number), None)

    async def owners(self) -> dict[int, tuple[int | None, int]]:
        """Shard id → (runner, epoch)."""
        rows = (await self.topology()).shards
        return {row.shard_id: (row.runner_id, row.epoch) for row in rows}

    async def even(self, *members: Member, deadline: float = 5.0) -> None:
        """Wait until these members hold every shard, sizes differ by one at most, and rows say the same."""

        async def settled() -> bool:
            sizes = [member.held for member in members]
            if sum(sizes) != self.shards or max(sizes) - min(sizes) > 1:
                return False
            owners = await self.owners()
            return all(
                owners[shard] == (member.number, hold.epoch)
                for member in members
                for shard, hold in member.ownership.holds.items()
            )

        await until(settled, what="shards are even", deadline=deadline)


@contextlib.asynccontextmanager
async def cluster(url: str, **options: object) -> AsyncIterator[Cluster]:
    opened = await Cluster(url, **options).open()  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        await opened.close()
