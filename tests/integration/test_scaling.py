"""Pods come and go under load: shards move one by one, a long step stays where it runs, nothing runs twice (OP2)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.processes import processor_seconds
from tests.harness.audit import read_history
from tests.harness.checkers import claim_chains
from tests.harness.pods import Pod
from tests.harness.sidelog import Execution
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import SHARDS, World, both_modes, of_runs

pytestmark = [pytest.mark.alone, pytest.mark.req("OP2", "CL8")]

BALANCE = 5.0
"""Seconds from a change of the pods, their processes' start or the wish that they stop, to an even share for each."""
LONG_STEPS = 8


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
    status = await world.cluster()
    newest = status.db_now - max(runner.started_at for runner in status.runners)
    after = await epochs(world)
    moves = sum(after[shard] - before[shard] for shard in after)
    print(
        f"{pods} pods: even after {took:.2f} s, {newest:.2f} s after the newest registered; {moves} moves where "
        f"{ideal} are ideal"
    )
    assert took <= BALANCE
    assert moves <= 1.3 * ideal


async def stopped(world: World, *pods: Pod) -> float:
    """Ask these to stop; when that was."""
    for pod in pods:
        pod.terminate()
    return time.monotonic()


async def pinned_among(world: World, run_ids: Collection[str]) -> list[str]:
    """Those that stay where they run while their shards are another pod's."""
    said = {run_id: (await world.client.why(run_id)).summary for run_id in run_ids}
    return [run_id for run_id, summary in said.items() if "pinned" in summary]


@both_modes
async def test_a_shard_moves_while_a_long_step_of_it_runs(
    audited_postgres_url: str, tmp_path: Path, shard_lock: str
) -> None:
    async with World(audited_postgres_url, tmp_path, lease=3.0, shard_lock=shard_lock) as world:
        (first,) = await world.start_pods(world.url)
        runs = await world.start_runs(60, Beats(work=0.05))
        let_go = tmp_path / "let-go"
        pinned = await world.start_runs(20, Beats(most=1, until=str(let_go)))
        await world.beating([*runs, *pinned])
        before, since = await epochs(world), time.monotonic()
        second = world.start_pod()
        await resized(world, 2, since=since, ideal=SHARDS // 2, before=before)
        await second.wait_http("/readyz", deadline=5)
        moved = await pinned_among(world, pinned)
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
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_one_pod_four_pods_two_pods_under_load(
    audited_postgres_url: str, tmp_path: Path, shard_lock: str
) -> None:
    async with World(
        audited_postgres_url, tmp_path, lease=5.0, grace="90", shard_lock=shard_lock
    ) as world:
        (first,) = await world.start_pods(world.url)
        runs = await world.start_runs(200, Beats(work=0.2, rest=0.5))
        await world.beating(runs)
        long = await world.start_runs(LONG_STEPS, Beats(work=60.0, most=1))
        await world.beating(long)
        before, since = await epochs(world), time.monotonic()
        more = [world.start_pod() for _ in range(3)]
        await resized(world, 4, since=since, ideal=SHARDS * 3 // 4, before=before)
        pinned = await pinned_among(world, long)
        print(f"{len(pinned)} of {len(long)} long steps are in shards that have moved")
        assert pinned
        await world.beating(runs, since=time.monotonic(), steps=2)
        before, asked = await epochs(world), await stopped(world, first, more[0])
        await resized(world, 2, since=asked, ideal=SHARDS // 2, before=before)
        await world.beating(runs, since=time.monotonic(), steps=2)
        assert first.alive
        assert await first.wait_end(deadline=90) == 0
        steps = [e for e in world.executions if e.run in long]
        assert {(e.pid, e.how) for e in steps} == {(first.pid, "returned")}
        assert len(steps) == len(long)
        await world.finish()
        assert await world.check() == 0


def waits(executions: list[Execution], rests: Mapping[str, float]) -> list[float]:
    """Seconds that runs waited for their next step beyond the rest they had asked for."""
    found = []
    for run_id, mine in of_runs(executions).items():
        for before, after in itertools.pairwise(mine):
            if before.ended is not None:
                found.append(after.started - before.ended - rests[run_id])
    return found


async def cores(pods: Sequence[Pod], seconds: float) -> float:
    """How many processor cores these use on average."""
    before, began = sum(processor_seconds(pod.pid) for pod in pods), time.monotonic()
    await asyncio.sleep(seconds)  # the length of the measurement
    used = sum(processor_seconds(pod.pid) for pod in pods) - before
    return used / (time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_a_rolling_restart_keeps_no_due_run_waiting(
    audited_postgres_url: str, tmp_path: Path, shard_lock: str
) -> None:
    """Of 1,000 runs most are parked between two steps, and the others are in memory, or in a step."""
    async with World(audited_postgres_url, tmp_path, lease=5.0, shard_lock=shard_lock) as world:
        pods = await world.start_pods(*[world.url] * 4)
        parked = await world.start_runs(800, Beats(work=0.2, rest=6.0, spread=1.0))
        awake = await world.start_runs(200, Beats(work=0.2, rest=1.5, spread=1.0))
        runs = [*parked, *awake]
        await world.beating(runs, steps=2)
        used = await cores(pods, 6.0)
        print(f"the pods use {used:.2f} cores")
        assert used <= 1.0
        for pod in pods:
            world.start_pod()
            await world.even(5, deadline=60)
            pod.terminate()
            assert await pod.wait_end() == 0
            await world.even(4)
            await world.beating(runs, since=time.monotonic())
        await world.finish(deadline=120)
        assert await world.check() == 0
        rests = dict.fromkeys(parked, 6.0) | dict.fromkeys(awake, 1.5)
        found = sorted(waits(world.executions, rests))
        print(f"{len(found)} waits: p50 {found[len(found) // 2]:.3f} s, most {found[-1]:.3f} s")
        assert found[-1] <= 1.0 + 0.3
