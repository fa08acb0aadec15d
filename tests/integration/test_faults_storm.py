"""One fault after the other, some of them at once, chosen by a seed: in the end nothing is wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.pods import Pod
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import CutWhere, HangWhere, PostgresProxy
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import LEASE, World

pytestmark = pytest.mark.alone

PODS = 4
ROUNDS = 8
CUTS: Sequence[CutWhere] = ("before", "after_commit")
CALLS: Sequence[HangWhere] = ("before", "answer")


class Storm:
    """Four pods, each behind a proxy of its own, and the faults that may befall them."""

    def __init__(self, w: World, server: PrivatePostgres, seed: int) -> None:
        self.w, self.server, self.chance = w, server, random.Random(seed)
        self.faults: list[Fault] = []
        self.places: list[tuple[Pod, PostgresProxy]] = []
        self.told: list[str] = []

    async def begin(self) -> None:
        for _ in range(PODS):
            proxy = PostgresProxy(self.server.port)
            await proxy.start()
            self.places.append((self.w.start_pod(proxy.url(self.w.database)), proxy))
        for pod, _ in self.places:
            await pod.wait_http("/readyz", deadline=60)
        await self.w.even(PODS)

    async def end(self) -> None:
        for _, proxy in self.places:
            await proxy.close()

    async def round(self) -> None:
        """One or two different pods are struck at once, or the database is."""
        if self.chance.random() < 0.25:
            await self._database()
            return
        kinds = (self._kill, self._freeze, self._stop, self._cut_off, self._lose_connections)
        chosen = self.chance.sample(range(PODS), self.chance.choice((1, 1, 2)))
        struck: list[Callable[[int], Awaitable[None]]] = [self.chance.choice(kinds) for _ in chosen]
        await asyncio.gather(*(strike(place) for strike, place in zip(struck, chosen, strict=True)))

    def _tell(self, what: str, place: int | None = None) -> None:
        self.told.append(what if place is None else f"{what} {self.places[place][0].name}")

    async def _database(self) -> None:
        self._tell("restart of the database")
        at = time.monotonic()
        await asyncio.to_thread(self.server.restart, "immediate")
        self.faults.append(Fault("restart", at=at, until=time.monotonic()))

    async def _kill(self, place: int) -> None:
        self._tell("kill", place)
        pod, proxy = self.places[place]
        await self._at_a_statement(proxy, pod.kill)
        self.faults.append(pod.faults[-1])
        await self._replace(place)

    async def _stop(self, place: int) -> None:
        self._tell("stop", place)
        pod, _ = self.places[place]
        pod.terminate()
        assert await pod.wait_end() == 0
        await self._replace(place)

    async def _freeze(self, place: int) -> None:
        seconds = self.chance.uniform(0.2, 2.5) * LEASE
        self._tell(f"freeze for {seconds:.1f} s", place)
        pod, proxy = self.places[place]
        await self._at_a_statement(proxy, pod.freeze)
        await passed(seconds)
        self.faults.append(pod.thaw())

    async def _cut_off(self, place: int) -> None:
        seconds = self.chance.uniform(0.2, 2.5) * LEASE
        self._tell(f"no answers for {seconds:.1f} s", place)
        pod, proxy = self.places[place]
        at = time.monotonic()
        proxy.hang_all()
        await passed(seconds)
        proxy.resume()
        self.faults.append(Fault("cut off", at=at, until=time.monotonic(), pid=pod.pid))

    async def _lose_connections(self, place: int) -> None:
        where = self.chance.choice(CUTS)
        name = self.chance.choice(("commit", "commit", "claim", "renew"))
        self._tell(f"lose {name} {where}", place)
        _, proxy = self.places[place]
        rule = proxy.cut(name=name, where=where, times=self.chance.choice((1, 3)))
        try:
            await until(rule.happened.is_set, what=f"cut at {name}", deadline=2 * LEASE)
        except AssertionError:
            rule.disarm()  # a pod that claims nothing just now

    async def _at_a_statement(self, proxy: PostgresProxy, do: Callable[[], object]) -> None:
        where = self.chance.choice(CALLS)
        name = self.chance.choice(("commit", "commit", "claim", "renew", "topology"))
        rule = proxy.call(lambda _: do(), name=name, where=where)
        try:
            await until(rule.happened.is_set, what=f"call at {name}", deadline=LEASE)
        except AssertionError:
            rule.disarm()
            do()

    async def _replace(self, place: int) -> None:
        _, proxy = self.places[place]
        pod = self.w.start_pod(proxy.url(self.w.database))
        await pod.wait_http("/readyz", deadline=60)
        self.places[place] = (pod, proxy)


async def passed(seconds: float) -> None:
    ends = time.monotonic() + seconds
    await until(
        lambda: time.monotonic() >= ends, what="the time of the fault", deadline=2 * seconds
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.req("CL3", "CL4", "CL5", "CL11")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_a_storm(
    postgres: PrivatePostgres, audited_postgres_url: str, tmp_path: Path, seed: int, shard_lock: str
):
    async with World(audited_postgres_url, tmp_path, park_after="0.4", shard_lock=shard_lock) as w:
        storm = Storm(w, postgres, seed)
        try:
            await storm.begin()
            run_ids = await w.start_runs(40, Beats(work=0.1, spread=1.0))
            run_ids += await w.start_runs(40, Beats(work=0.02, spread=1.0, rest=0.2))
            run_ids += await w.start_runs(40, Beats(work=0.02, spread=1.0, rest=0.8))  # they park
            await w.beating(run_ids, steps=1)
            for _ in range(ROUNDS):
                await storm.round()
                await w.beating(run_ids, since=time.monotonic(), steps=1)
            await w.finish()
            beyond = await w.check(storm.faults)
            print(f"executions beyond commits: {beyond} of {len(w.executions)}")
        finally:
            print(f"seed {seed}: {'; '.join(storm.told)}")
            await storm.end()
