"""Several pods that die at the same time, each at a moment of a run of its own; another pod goes on with the runs.

What takes long about a death is the wait for the lease, so the deaths of a batch share it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.model import RunStatus, Topology
from tests.harness.pods import Pods
from tests.harness.proxy import HangWhere, PostgresProxy
from tests.harness.waiting import until
from tests.integration.apps.crash_actor import LEASE, PARK_AFTER, SCAN, SHARDS, Order
from tests.integration.apps.crossing import crossing
from tests.integration.crash_actors import Actor, Actors
from tests.integration.crash_world import MOMENTS, World

APP = "tests.integration.apps.crossing:app"
Point = tuple[str, HangWhere]

NO_SCAN = 600.0
"""Seconds between the scans of a victim: it claims when it is told of a run, not before the moment is near."""

BATCH = 4
"""Deaths at a time: each victim has to have some of the 16 shards."""


@dataclass(slots=True)
class Victim:
    """A pod that is to die. Its proxy is its only way to the database; the world's client has one of its own."""

    name: str
    actor: Actor
    proxy: PostgresProxy
    client_proxy: PostgresProxy
    world: World


class Campaign:
    """Deaths by points, in batches. A point's outcome is told, or its failure raised, to whoever asks for it."""

    def __init__(
        self,
        url: str,
        server_port: int,
        folder: Path,
        points: Sequence[Point],
        *,
        serve: Sequence[str] = ("-m", "perdure"),
        shard_lock: str = "advisory",
    ) -> None:
        """serve: how the surviving pod is started, behind the interpreter's name. shard_lock: of all pods."""
        self.url = url
        self._shard_lock = shard_lock
        self._server_port = server_port
        self._folder = folder
        self._left = list(points)
        self._outcomes: dict[Point, BaseException | None] = {}
        self._numbers = itertools.count(1)
        self._actors = Actors(folder)
        self._pods = Pods(
            APP,
            url,
            folder,
            env={
                "PERDURE_DB": url,
                "PERDURE_LEASE": f"{LEASE:g}",
                "PERDURE_SCAN": f"{SCAN:g}",
                "PERDURE_PARK_AFTER": f"{PARK_AFTER:g}",
                "PERDURE_WARM_RUNS": "0",
                "PERDURE_SHARDS": f"{SHARDS}",
                "PERDURE_SHARD_LOCK": shard_lock,
            },
            command=[sys.executable, *serve, "serve", APP],
            side_log=folder / "side.log",
        )

    async def __aenter__(self) -> Campaign:
        await self._pods.ready("survivor")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pods.end_all()
        self._actors.__exit__()

    async def result(self, point: Point, *, deadline: float = 20.0) -> None:
        """Raises what went wrong at this point."""
        if point not in self._outcomes:
            batch = [point, *(p for p in self._left if p != point)][:BATCH]
            self._left = [p for p in self._left if p not in batch]
            async with AsyncExitStack() as stack:
                self._outcomes |= await self._deaths(batch, stack, deadline)
        failure = self._outcomes[point]
        if failure is not None:
            raise failure

    async def _deaths(
        self, batch: Sequence[Point], stack: AsyncExitStack, deadline: float
    ) -> Mapping[Point, BaseException | None]:
        victims = await asyncio.gather(*(self._victim(stack) for _ in batch))
        shards = await self._share(victims)
        outcomes = await asyncio.gather(
            *(
                self._death(victim, shards[victim.name], point, deadline)
                for victim, point in zip(victims, batch, strict=True)
            ),
            return_exceptions=True,
        )
        return dict(zip(batch, outcomes, strict=True))

    async def _victim(self, stack: AsyncExitStack) -> Victim:
        name, database = f"victim-{next(self._numbers)}", self.url.rpartition("/")[2]
        proxy = await stack.enter_async_context(PostgresProxy(self._server_port))
        client_proxy = await stack.enter_async_context(PostgresProxy(self._server_port))
        world = World(self.url, self._folder, client_url=client_proxy.url(database))
        await stack.enter_async_context(world)
        order = Order(
            "pod",
            proxy.url(database),
            name=name,
            scan=NO_SCAN,
            shard_lock=self._shard_lock,
            side_log=str(world.side_log.path),
        )
        actor = await self._actors.act(order)
        stack.push_async_callback(actor.kill)  # also one that outlives its death
        return Victim(name, actor, proxy, client_proxy, world)

    async def _share(self, victims: Sequence[Victim]) -> Mapping[str, set[int]]:
        """Wait until every shard is held, evenly, by those who live; name → shards."""
        cluster = connect(DatabaseSettings(self.url), clock=SystemClock()).cluster()
        await cluster.open()
        try:

            async def look() -> Mapping[str, set[int]] | None:
                return evenly(await cluster.read_topology(), len(victims) + 1)

            found = await until(look, what="an even share", deadline=20.0, interval=0.05)
        finally:
            await cluster.close()
        assert found is not None
        return found

    async def _death(self, victim: Victim, shards: set[int], point: Point, deadline: float) -> None:
        event, where = point
        moment, world = MOMENTS[event], victim.world
        ids = ids_in(shards, f"{event}-{where}")
        # One claim is under way at a time: after this run's no earlier one can take the run that matters.
        first, run_id = next(ids), next(ids)
        await world.client.start(crossing, run_id=first)
        await world.reaches(first, RunStatus.SUSPENDED)
        injury = world.injure(
            run_id, moment, where, victim.actor.kill, of=victim.proxy, client=victim.client_proxy
        )
        outcome, death = await asyncio.gather(
            world.cross(run_id, moment.call, deadline=deadline), victim.actor.killed()
        )
        assert injury.found == [moment.state(where)], injury.found
        again = moment.lost if where == "before" else None
        await world.check(run_id, outcome, moment.call, faults=[death], again=again)


def ids_in(shards: Collection[int], prefix: str) -> Iterator[str]:
    """Run ids that belong to one of these shards."""
    for number in itertools.count():
        run_id = f"{prefix}-{number}"
        if shard_of(slot_of(run_id), SHARDS) in shards:
            yield run_id


def evenly(topology: Topology, runners: int) -> Mapping[str, set[int]] | None:
    """The shards of each replica; None while they are not spread evenly over so many live runners."""
    held: dict[str, set[int]] = {
        runner.replica_id: {s.shard_id for s in topology.shards if s.runner_id == runner.runner_id}
        for runner in topology.runners
        if not runner.dead
    }
    sizes = [len(shards) for shards in held.values()]
    even = len(held) == runners and sum(sizes) == SHARDS and max(sizes) - min(sizes) <= 1
    return held if even else None
