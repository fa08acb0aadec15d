"""A pod is killed, frozen, stopped: its runs go on elsewhere, and what was executed twice is explained by that."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Literal

import pytest

from tests.harness.pods import Pod
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import (
    LEASE,
    World,
    both_modes,
    claimed_by,
    handed_over,
    of_runs,
    taken_from,
)

pytestmark = pytest.mark.alone

BETWEEN_STEPS = Beats(work=0.005, rest=0.3)
SLOW_STEPS = Beats(work=0.2)
SLEEPING = Beats(work=0.01, rest=1.0)
UNEVEN_STEPS = Beats(work=0.2, spread=0.5)


async def check_take_over(
    w: World, victim: Pod, runner: int, *, least: int, shard_lock: str
) -> None:
    """Each run taken from the killed runner begins its next step within a lease and a second of the kill; where its
    session's lock tells of its end, within a second and what a run rests between two steps."""
    killed = victim.faults[-1].at
    taken = taken_from(await w.history(), runner)
    assert len(taken) >= least, f"only {len(taken)} runs were taken over"
    first = {
        run_id: next(e.started for e in executions if e.started > killed)
        for run_id, executions in of_runs(w.executions).items()
        if run_id in taken
    }
    slowest = max(first.values()) - killed
    print(
        f"taken over: {len(taken)}, first step after {min(first.values()) - killed:.3f} s … {slowest:.3f} s"
    )
    assert slowest <= (1.0 + 0.5 if shard_lock == "advisory" else LEASE + 1.0)


# ---- killed -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("CL5", "CL4")
@both_modes
async def test_a_killed_pods_runs_go_on_within_a_lease_and_a_second(
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    runs = 300
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        pods = await w.three()
        run_ids = await w.start_runs(runs, BETWEEN_STEPS)
        await w.beating(run_ids, steps=3)
        victim = pods[0]
        runner = (await w.runner_of(victim)).runner_id
        victim.kill()
        await w.beating(run_ids, since=victim.faults[0].at, steps=2)
        await w.finish()
        await check_take_over(w, victim, runner, least=runs // 5, shard_lock=shard_lock)
        beyond = await w.check(w.pods.faults)
        print(f"executions beyond commits: {beyond} of {len(w.executions)}")


@pytest.mark.req("CL5", "CL4")
@pytest.mark.parametrize(
    ("runs", "where"),
    [
        (60, "answer"),
        pytest.param(300, "before", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
        pytest.param(300, "answer", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
@both_modes
async def test_a_pod_is_killed_while_its_batch_is_in_flight(
    postgres: PrivatePostgres,
    audited_postgres_url: str,
    tmp_path: Path,
    runs: int,
    where: Literal["before", "answer"],
    shard_lock: str,
):
    async with (
        PostgresProxy(postgres.port) as proxy,
        World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w,
    ):
        behind = proxy.url(w.database)
        victim, _, _ = await w.start_pods(behind, w.url, w.url)
        run_ids = await w.start_runs(runs, BETWEEN_STEPS)
        await w.beating(run_ids, steps=3)
        runner = (await w.runner_of(victim)).runner_id
        rule = proxy.call(lambda _: victim.kill(), name="commit", where=where)
        await asyncio.wait_for(rule.happened.wait(), 10)
        await w.beating(run_ids, since=victim.faults[0].at, steps=2)
        await w.finish()
        await check_take_over(w, victim, runner, least=runs // 5, shard_lock=shard_lock)
        beyond = await w.check(w.pods.faults)
        print(f"executions beyond commits: {beyond} of {len(w.executions)}")


# ---- frozen -----------------------------------------------------------------------------------


@pytest.mark.req("CL3", "CL4")
@pytest.mark.parametrize(
    ("runs", "where"),
    [
        (60, "answer"),
        pytest.param(200, "before", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
        pytest.param(200, "answer", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
        pytest.param(200, None, marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
@both_modes
async def test_a_frozen_pod_writes_nothing_after_it_was_declared_dead_and_goes_on_as_a_new_runner(
    postgres: PrivatePostgres,
    audited_postgres_url: str,
    tmp_path: Path,
    runs: int,
    where: Literal["before", "answer"] | None,
    shard_lock: str,
):
    """Frozen as it sends a batch, as the answer to one comes, or anywhere. Steps are in flight."""
    async with (
        PostgresProxy(postgres.port) as proxy,
        World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w,
    ):
        frozen, _, _ = await w.start_pods(proxy.url(w.database), w.url, w.url)
        run_ids = await w.start_runs(runs, UNEVEN_STEPS)
        await w.beating(run_ids, steps=2)
        old = (await w.runner_of(frozen)).runner_id
        if where is None:
            frozen.freeze()
        else:
            rule = proxy.call(lambda _: frozen.freeze(), name="commit", where=where)
            await asyncio.wait_for(rule.happened.wait(), 10)
        frozen_at = frozen.faults[0].at
        thaw_at = frozen_at + 3 * LEASE
        await until(lambda: time.monotonic() >= thaw_at, what="three leases", deadline=4 * LEASE)
        thawed = frozen.thaw().until
        assert thawed is not None
        new = await w.goes_on_anew(frozen, old)
        await w.even(3)
        await w.beating(run_ids, since=time.monotonic(), steps=2)
        await w.finish()

        rows = await w.history()
        in_flight = [
            e
            for e in w.executions
            if e.pid == frozen.pid and e.started < frozen_at < (e.ended or float("inf"))
        ]
        assert in_flight
        assert taken_from(rows, old)
        beyond = await w.check(w.pods.faults)
        twice: dict[tuple[str, str], set[int]] = defaultdict(set)
        for execution in w.executions:
            twice[execution.run, execution.key].add(execution.pid)
        assert all(frozen.pid in pids for pids in twice.values() if len(pids) > 1)
        # Once thawed, its old life begins nothing: what it executes it has claimed as the new runner.
        begun = {e.run for e in w.executions if e.pid == frozen.pid and e.started > thawed}
        assert begun <= claimed_by(rows, new)
        print(f"in flight {len(in_flight)}, beyond commits {beyond}, begun anew {len(begun)}")


# ---- stopped ----------------------------------------------------------------------------------


@pytest.mark.req("CL5", "CL1")
@pytest.mark.parametrize(
    "runs", [60, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
@both_modes
async def test_a_clean_stop_repeats_no_step_and_keeps_no_run_waiting(
    audited_postgres_url: str,
    tmp_path: Path,
    runs: int,
    shard_lock: str,
):
    """All runs are at work in the pod that is stopped; the two others have 400 free slots."""
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        pods = await w.three()
        leaving = pods[0]
        run_ids = await w.start_runs(runs, SLOW_STEPS, shards=await w.shards_of(leaving))
        await w.beating(run_ids, steps=3)
        assert {e.pid for e in w.executions} == {leaving.pid}
        leaving.terminate()
        told = time.monotonic()
        assert await leaving.wait_end() == 0
        took = time.monotonic() - told
        await w.beating(run_ids, since=told, steps=3)
        await w.finish()
        assert await w.check() == 0
        gaps = handed_over(w.executions, lambda e: e.pid == leaving.pid)
        print(f"handed over {len(gaps)}, longest gap {max(gaps):.3f} s, ended after {took:.3f} s")
        assert len(gaps) == runs
        assert max(gaps) <= 0.5


@pytest.mark.slow
@pytest.mark.req("CL5", "SL1")
@pytest.mark.parametrize("park_after", [5.0, 0.1])
@both_modes
async def test_a_clean_stop_makes_no_timer_and_no_start_late(
    audited_postgres_url: str,
    tmp_path: Path,
    park_after: float,
    shard_lock: str,
):
    """Runs of the stopped pod that sleep, in memory or parked, and runs that are started while it stops."""
    async with World(
        audited_postgres_url, tmp_path, shard_lock=shard_lock, park_after=f"{park_after:g}"
    ) as w:
        pods = await w.three()
        leaving = pods[0]
        shards = await w.shards_of(leaving)
        resting = await w.start_runs(30, SLEEPING, shards=shards)
        await w.beating(resting, steps=3)
        leaving.terminate()
        told = time.monotonic()
        late: list[float] = []
        while leaving.alive:
            (run_id,) = await w.start_runs(1, SLEEPING, shards=shards)
            started = time.monotonic()
            await w.beating([run_id])
            late.append(w.first_step(run_id).started - started)
        await w.beating(resting, since=told, steps=3)
        await w.finish()
        assert await w.check() == 0
        gaps = handed_over(w.executions, lambda e: e.pid == leaving.pid)
        overslept = max(gaps) - SLEEPING.rest
        print(
            f"handed over {len(gaps)}, overslept {overslept:.3f} s; {len(late)} starts {max(late):.3f} s"
        )
        assert len(gaps) >= 20
        assert overslept <= 0.5
        assert max(late) <= 0.5


@pytest.mark.slow
@pytest.mark.req("CL5")
@both_modes
async def test_steps_that_outlast_the_grace_are_begun_anew_without_waiting_for_a_lease(
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock, grace="1") as w:
        pods = await w.three()
        leaving = pods[0]
        run_ids = await w.start_runs(
            20, Beats(work=8.0, spread=0.1), shards=await w.shards_of(leaving)
        )
        await w.beating(run_ids)
        told = time.monotonic()
        leaving.terminate()
        assert await leaving.wait_end(deadline=1 + LEASE) == 4
        ended = time.monotonic()
        await w.beating(run_ids, since=told)
        again = max(e.started for e in w.executions if e.pid != leaving.pid) - ended
        await w.finish()
        beyond = await w.check([Fault("grace", at=told, until=ended, pid=leaving.pid)], window=0)
        print(f"ended after {ended - told:.3f} s, begun anew after {again:.3f} s, twice: {beyond}")
        assert beyond == len(run_ids)
        assert again < 1.0


@pytest.mark.slow
@pytest.mark.req("CL5", "CL1")
@both_modes
async def test_all_pods_are_restarted_one_after_the_other(
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        pods = await w.three()
        run_ids = await w.start_runs(100, SLOW_STEPS)
        await w.beating(run_ids, steps=2)
        for pod in pods:
            pod.terminate()
            assert await pod.wait_end() == 0
            successor = w.start_pod(name=f"{pod.name}-again")
            await successor.wait_http("/readyz", deadline=30)
            await w.even(3)
            await w.beating(run_ids, since=time.monotonic(), steps=1)
        await w.finish()
        assert await w.check() == 0
        gaps = handed_over(w.executions, lambda _: True)
        print(f"handed over {len(gaps)}, longest gap {max(gaps):.3f} s")
        assert max(gaps) < LEASE, "nobody waited for a lease to run out, or for a scan"


@pytest.mark.req("CL5")
@both_modes
async def test_ctrl_c_of_the_only_pod_and_a_new_one_that_goes_on(
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        (only,) = await w.start_pods(w.url)
        run_ids = await w.start_runs(40, SLOW_STEPS)
        await w.beating(run_ids, steps=2)
        only.process.send_signal(signal.SIGINT)
        assert await only.wait_end() == 0
        assert "Traceback" not in only.log
        topology = await w.topology()
        assert {row.runner_id for row in topology.shards} == {None}
        stopped = time.monotonic()
        await w.start_pods(w.url)
        await w.beating(run_ids, since=stopped, steps=2)
        await w.finish()
        assert await w.check() == 0


# ---- one name twice ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("CL1", "CL8")
@both_modes
async def test_of_two_live_pods_with_one_name_the_newcomer_leaves_and_names_both(
    audited_postgres_url: str,
    tmp_path: Path,
    shard_lock: str,
):
    async with World(audited_postgres_url, tmp_path, shard_lock=shard_lock) as w:
        first, _ = await w.start_pods(w.url, w.url)
        run_ids = await w.start_runs(20, BETWEEN_STEPS)
        await w.beating(run_ids, steps=2)
        newcomer = w.pods.start("newcomer", env={"PERDURE_DB": w.url, "POD_NAME": first.name})
        assert await newcomer.wait_end() not in (0, None)
        last = newcomer.log.strip().splitlines()[-1]
        assert f"127.0.0.1:{first.port}" in last
        assert f"127.0.0.1:{newcomer.port}" in last
        assert first.name in last
        left = time.monotonic()
        await w.even(2)
        await w.beating(run_ids, since=left, steps=2)
        assert first.alive
        await w.finish()
        assert await w.check() == 0
