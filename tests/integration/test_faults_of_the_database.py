"""The database goes away under hundreds of runs, and comes back: nobody touches anything, all of them finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.harness.pods import Pod
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.harness.watch import terminate_sessions
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import LEASE, World, both_modes, claimed_by, taken_from

pytestmark = pytest.mark.alone

KEEPERS = ("renew", "topology")
COMMITTERS = ("commit",)


class Readiness:
    """Asks each pod's ``/readyz`` all the time. ``seen``: (moment, status) by name of the pod."""

    def __init__(self, pods: Sequence[Pod]) -> None:
        self._pods = pods
        self.seen: dict[str, list[tuple[float, int]]] = {pod.name: [] for pod in pods}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._watch(pod)) for pod in self._pods]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, pod: Pod) -> None:
        while True:
            answer = await pod.http("/readyz")
            if answer is not None:
                self.seen[pod.name].append((time.monotonic(), answer[0]))
            await asyncio.sleep(0.03)

    def unready(self, fault: Fault) -> set[str]:
        """The pods that said 503 while this lasted, or within a second of its end."""
        assert fault.until is not None
        return {
            name
            for name, seen in self.seen.items()
            if any(status == 503 and fault.at <= at <= fault.until + 1.0 for at, status in seen)
        }

    async def all_ready(self) -> None:
        """Wait until every pod says 200 from now on."""
        since = time.monotonic()

        def look() -> bool:
            return all(
                any(status == 200 and at > since for at, status in seen)
                for seen in self.seen.values()
            )

        await until(look, what="every pod ready again", deadline=20)


async def away(postgres: PrivatePostgres, *, longer_than: float = 0.0) -> Fault:
    """Restart the server as if it had crashed; it stays away for so many seconds at least."""
    at = time.monotonic()
    await asyncio.to_thread(postgres.stop, "immediate")
    await until(
        lambda: time.monotonic() >= at + longer_than, what="the outage", deadline=longer_than + 5
    )
    await asyncio.to_thread(postgres.start)
    return Fault("restart", at=at, until=time.monotonic())


async def cut_off(w: World, statements: Collection[str]) -> Fault:
    """End the sessions that run, or ran last, one of these statements."""
    at = time.monotonic()

    async def look() -> list[int]:
        ended = []
        for statement in statements:
            ended += await terminate_sessions(w.url, statement=statement)
        return ended

    assert await until(look, what=f"sessions in {statements}", deadline=10)
    return Fault("terminate", at=at, until=time.monotonic())


async def runners_dead(w: World) -> int:
    return sum(row.dead for row in (await w.topology()).runners)


@pytest.mark.req("CL11", "CL4")
@pytest.mark.parametrize(
    ("runs", "cuts", "outage"),
    [
        (100, 2, LEASE / 2),
        pytest.param(500, 10, LEASE / 2, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(200, 0, 3 * LEASE, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
@both_modes
async def test_the_database_goes_away_and_everything_goes_on_by_itself(
    postgres: PrivatePostgres,
    audited_postgres_url: str,
    tmp_path: Path,
    runs: int,
    cuts: int,
    outage: float,
    shard_lock: str,
):
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        pods = await w.three()
        run_ids = await w.start_runs(runs, Beats(work=0.02, rest=runs / 1000))
        await w.beating(run_ids, steps=2)
        before = [(await w.runner_of(pod)).runner_id for pod in pods]
        async with Readiness(pods) as readiness:
            restart = await away(postgres, longer_than=outage)
            await w.beating(run_ids, since=time.monotonic(), steps=2)
            await readiness.all_ready()
            assert readiness.unready(restart) == {pod.name for pod in pods}
            # Whoever was back first has robbed nobody, though every lease had run out after the longer outage.
            assert await runners_dead(w) == 0
            assert [(await w.runner_of(pod)).runner_id for pod in pods] == before
            faults = [restart]
            for _ in range(cuts):
                faults.append(await cut_off(w, KEEPERS))
                faults.append(await cut_off(w, COMMITTERS))
                await w.beating(run_ids, since=time.monotonic(), steps=1)
            await w.finish()
            await readiness.all_ready()
        assert all(pod.alive for pod in pods)
        beyond = await w.check(faults)
        print(
            f"away for {(restart.until or 0) - restart.at:.2f} s; executions beyond commits: {beyond} of "
            f"{len(w.executions)}; runners declared dead: {await runners_dead(w)}"
        )


@pytest.mark.slow
@pytest.mark.req("CL5", "CL11")
@both_modes
async def test_a_pod_that_is_told_to_stop_while_the_database_is_away_does_stop(
    postgres: PrivatePostgres,
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    """Within its grace and the keeper's four renewals; its runs go on elsewhere when the database is back."""
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock, grace="2") as w:
        (pod,) = await w.start_pods(w.url)
        run_ids = await w.start_runs(30, Beats(work=0.1))
        await w.beating(run_ids, steps=2)
        at = time.monotonic()
        await asyncio.to_thread(postgres.stop, "immediate")
        pod.terminate()
        assert await pod.wait_end(deadline=2 + LEASE + 5) == 4
        assert "Traceback" not in pod.log
        await asyncio.to_thread(postgres.start)
        back = time.monotonic()
        await w.start_pods(w.url)
        await w.beating(run_ids, since=back, steps=2)
        await w.finish()
        await w.check([Fault("stop without the database", at=at, until=back)])


# ---- away for one pod alone -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("CL3", "CL4", "CL11")
@pytest.mark.parametrize("runs", [60, 200])
@both_modes
async def test_a_pod_cut_off_from_the_database_begins_nothing_and_comes_back_as_a_new_runner(
    postgres: PrivatePostgres,
    audited_postgres_url: str,
    tmp_path: Path,
    runs: int,
    shard_lock: str,
):
    """Its connections stay open and nothing passes, for three leases; what it had sent arrives after that."""
    async with (
        PostgresProxy(postgres.port) as proxy,
        World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w,
    ):
        alone, _, _ = pods = await w.start_pods(proxy.url(w.database), w.url, w.url)
        run_ids = await w.start_runs(runs, Beats(work=0.2))
        await w.beating(run_ids, steps=2)
        old = (await w.runner_of(alone)).runner_id
        async with Readiness(pods) as readiness:
            at = time.monotonic()
            proxy.hang_all()
            ends = at + 3 * LEASE
            await until(lambda: time.monotonic() >= ends, what="three leases", deadline=4 * LEASE)
            assert proxy.connections, "connections were held, not closed"
            resumed = time.monotonic()
            proxy.resume()
            fault = Fault("cut off", at=at, until=resumed, pid=alone.pid)
            assert readiness.unready(fault) == {alone.name}
            new = await w.goes_on_anew(alone, old)
            await w.even(3)
            await w.beating(run_ids, since=time.monotonic(), steps=2)
        await w.finish()
        assert taken_from(await w.history(), old)
        beyond = await w.check([fault])
        untrusted = at + LEASE
        begun = [e for e in w.executions if e.pid == alone.pid and untrusted < e.started < resumed]
        assert begun == [], "begun without a lease"
        assert claimed_by(await w.history(), new)
        print(f"executions beyond commits: {beyond} of {len(w.executions)}")
