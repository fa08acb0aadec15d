"""Pods come and go under load: shards move one by one, a long step stays where it runs, nothing runs twice (OP2)."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.audit import read_history
from tests.harness.checkers import claim_chains
from tests.harness.pods import Pod
from tests.harness.sidelog import Execution
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import SHARDS, World, of_runs

pytestmark = pytest.mark.req("OP2", "CL8")

BALANCE = 5.0
"""Seconds from a change of the pods to an even share for each."""


async def epochs(world: World) -> dict[int, int]:
    return {row.shard_id: row.epoch for row in (await world.topology()).shards}


async def resized(
    world: World, pods: int, *, since: float, ideal: int, before: dict[int, int]
) -> None:
    """Wait until the shards are even, and compare the time and the moves with what they may be."""

    async def balanced() -> bool:
        """Among those that stay: who still has a long step to end is alive, but holds nothing."""
        held = Counter(row.runner_id for row in (await world.topology()).shards)
        spread = max(held.values()) - min(held.values())
        return None not in held and len(held) == pods and spread <= 1

    await until(balanced, what=f"an even share for {pods} pods", deadline=30.0, interval=0.05)
    took = time.monotonic() - since
    after = await epochs(world)
    moves = sum(after[shard] - before[shard] for shard in after)
    print(f"{pods} pods: even after {took:.2f} s, {moves} moves where {ideal} are ideal")
    assert took <= BALANCE
    assert moves <= 1.3 * ideal


async def stopped(world: World, *pods: Pod) -> float:
    """Ask these to stop; when that was."""
    for pod in pods:
        pod.terminate()
    return time.monotonic()


async def long_step(world: World, seconds: float) -> str:
    """A run in its only step, in a shard that the first pod will not keep."""
    (run_id,) = await world.start_runs(1, Beats(work=seconds, most=1))
    await world.beating([run_id])
    return run_id


async def test_a_shard_moves_while_a_long_step_of_it_runs(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with World(audited_postgres_url, tmp_path, lease=3.0) as world:
        (first,) = await world.start_pods(world.url)
        runs = await world.start_runs(60, Beats(work=0.05))
        let_go = tmp_path / "let-go"
        pinned = await world.start_runs(20, Beats(most=1, until=str(let_go)))
        await world.beating([*runs, *pinned])
        before = await epochs(world)
        second = world.start_pod()
        await second.wait_http("/readyz", deadline=30)
        await resized(world, 2, since=time.monotonic(), ideal=SHARDS // 2, before=before)
        moved = [
            run_id for run_id in pinned if "pinned" in (await world.client.why(run_id)).summary
        ]
        assert 3 <= len(moved) <= 17
        assert (await world.cluster()).runs["running elsewhere"] == len(moved)
        before, asked = await epochs(world), await stopped(world, first)
        await resized(world, 1, since=asked, ideal=SHARDS // 2, before=before)
        assert first.alive  # its long steps are not cut off
        let_go.touch()
        assert await first.wait_end() == 0
        assert {e.pid for e in world.executions if e.run in pinned} == {first.pid}
        await world.finish()
        assert await world.check() == 0
        chains = claim_chains(await read_history(world.url))
        assert {len(chains[run_id]) for run_id in pinned} <= {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_one_pod_four_pods_two_pods_under_load(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    async with World(audited_postgres_url, tmp_path, lease=5.0, grace="90") as world:
        (first,) = await world.start_pods(world.url)
        runs = await world.start_runs(200, Beats(work=0.2, rest=0.5))
        await world.beating(runs)
        long = await long_step(world, 60.0)
        before = await epochs(world)
        more = [world.start_pod() for _ in range(3)]
        for pod in more:
            await pod.wait_http("/readyz", deadline=60)
        since = time.monotonic()
        await resized(world, 4, since=since, ideal=SHARDS * 3 // 4, before=before)
        await world.beating(runs, since=time.monotonic(), steps=2)
        before, asked = await epochs(world), await stopped(world, first, more[0])
        await resized(world, 2, since=asked, ideal=SHARDS // 2, before=before)
        await world.beating(runs, since=time.monotonic(), steps=2)
        assert first.alive
        assert await first.wait_end(deadline=90) == 0
        assert world.first_step(long).how == "returned"
        await world.finish()
        assert await world.check() == 0


def waits(executions: list[Execution], rest: float) -> list[float]:
    """Seconds that runs waited for their next step beyond the rest they had asked for."""
    found = []
    for mine in of_runs(executions).values():
        for before, after in itertools.pairwise(mine):
            if before.ended is not None:
                found.append(after.started - before.ended - rest)
    return found


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_a_rolling_restart_keeps_no_due_run_waiting(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    rest = 6.0
    async with World(audited_postgres_url, tmp_path, lease=5.0) as world:
        pods = await world.start_pods(*[world.url] * 4)
        runs = await world.start_runs(1000, Beats(work=0.2, rest=rest, spread=1.0))
        await world.beating(runs, steps=2)
        for pod in pods:
            world.start_pod()
            await world.even(5, deadline=60)
            pod.terminate()
            assert await pod.wait_end() == 0
            await world.even(4)
            await world.beating(runs, since=time.monotonic())
        await world.finish(deadline=120)
        assert await world.check() == 0
        found = sorted(waits(world.executions, rest))
        print(f"{len(found)} waits: p50 {found[len(found) // 2]:.3f} s, most {found[-1]:.3f} s")
        assert found[-1] <= 1.0 + 0.3
