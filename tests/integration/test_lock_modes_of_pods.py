"""Real pods in advisory mode: taken over in a moment when killed, not at all when only a session was cut."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e.commands import Commands
from tests.harness.audit import AuditRow
from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, of_runs, taken_from

pytestmark = pytest.mark.alone

LONG = 10.0
"""A lease nobody waits for here, with the usual renewal and look: 2.5 and 0.5 s."""
STEADY = Beats(work=0.1, spread=0.5)


async def settled(w: World) -> None:
    """Every survivor's session is old enough that it may go by the others' locks."""
    since = time.monotonic()
    await until(
        lambda: time.monotonic() > since + LONG / 2, what="sessions that lasted", deadline=LONG
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.req("CL5")
async def test_killed_pods_are_taken_over_within_a_second(
    audited_postgres_url: str, tmp_path: Path
) -> None:
    """Ten kills. For each, from the kill to the first step that each taken-over run begins: the median over its runs,
    and the last one's."""
    middles, lasts = [], []
    async with World(audited_postgres_url, tmp_path, lease=LONG, shard_lock="advisory") as w:
        pods = await w.three()
        run_ids = await w.start_runs(40, STEADY)
        for number in range(10):
            await settled(w)
            await w.beating(run_ids, since=time.monotonic(), steps=1)
            victim = pods.pop(0)
            runner = (await w.runner_of(victim)).runner_id
            killed = victim.kill().at
            await w.beating(run_ids, since=killed + 0.1, steps=1)
            taken = taken_from(await w.history(), runner)
            assert taken
            begun = [
                next(e.started for e in executions if e.started > killed and e.pid != victim.pid)
                - killed
                for run_id, executions in of_runs(w.executions).items()
                if run_id in taken
            ]
            middles.append(statistics.median(begun))
            lasts.append(max(begun))
            pods.append(w.start_pod(name=f"again-{number}"))
            await pods[-1].wait_http("/readyz", deadline=30)
            await w.even(3)
        await w.finish()
        await w.check(w.pods.faults)
    print("median of the first steps after", [f"{each:.3f}" for each in sorted(middles)])
    print("last of them after", [f"{each:.3f}" for each in sorted(lasts)])
    assert statistics.median(middles) <= 1.0
    assert statistics.median(lasts) <= 1.0 + 0.5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.req("CL5", "CL11")
async def test_a_pod_whose_keeper_alone_is_cut_off_for_200_ms_repeats_nothing(
    postgres: PrivatePostgres, audited_postgres_url: str, tmp_path: Path
) -> None:
    """Its connection is reset and every new one refused; the two others watch its lock."""
    async with (
        PostgresProxy(postgres.port) as proxy,
        World(audited_postgres_url, tmp_path, lease=4.0, shard_lock="advisory") as w,
    ):
        cut, _, _ = await w.start_pods(proxy.url(w.database), w.url, w.url)
        run_ids = await w.start_runs(60, STEADY)
        before = (await w.runner_of(cut)).runner_id
        await w.beating(run_ids, steps=2)
        since = time.monotonic()
        await until(lambda: time.monotonic() > since + 2, what="sessions that lasted")
        for _ in range(3):
            rule = proxy.cut(name="free_locks", where="before")
            await asyncio.wait_for(rule.happened.wait(), 5)
            proxy.refuse()
            await asyncio.sleep(0.2)  # the length of the fault
            await proxy.accept()
            await w.beating(run_ids, since=time.monotonic(), steps=2)
        assert not [row for row in (await w.topology()).runners if row.dead]
        assert (await w.runner_of(cut)).runner_id == before
        await w.finish()
        assert await w.check() == 0
        assert "database.lost" in cut.log


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.req("CL11", "CL4", "DB11")
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_an_old_copy_of_the_server_is_started_under_live_pods(
    tmp_path: Path, shard_lock: str
) -> None:
    """A base backup, work for a while, then the copy in the server's place: commits are lost, and nothing else. The
    logs and the doctor say so."""
    with PrivatePostgres() as server, audited_database(server) as url:
        async with World(url, tmp_path, lease=4.0, shard_lock=shard_lock, park_after="0.4") as w:
            pods = await w.three()
            run_ids = await w.start_runs(60, Beats(work=0.1, rest=0.2))
            run_ids += await w.start_runs(20, Beats(work=0.1, rest=0.6))  # they park
            await w.beating(run_ids, steps=3)
            old = {pod.name: (await w.runner_of(pod)).runner_id for pod in pods}
            copied = time.monotonic()
            copy = await asyncio.to_thread(server.base_backup)
            await w.beating(run_ids, since=time.monotonic(), steps=3)
            lost = await w.history()
            await asyncio.to_thread(server.stop, "immediate")
            await asyncio.to_thread(server.start_copy, copy)
            started = time.monotonic()
            for pod in pods:
                await w.goes_on_anew(pod, old[pod.name])
            await w.even(3)
            back = time.monotonic()
            print(f"all shards in new hands after {back - started:.3f} s")
            await w.beating(run_ids, since=back, steps=2)
            report = await asyncio.to_thread(Commands(url, tmp_path), "doctor", "--format", "json")
            assert report.code == 1
            check_doctor(report.json)
            await w.finish()
            # A step whose commit is lost is executed again, and once more if that is cut short when a pod notices.
            faults = [
                Fault("commits are lost", at=copied, until=back),
                Fault("its runner is void", at=started, until=back),
            ]
            beyond = await w.check(faults)
            check_claims_of_two_time_lines(lost, await w.history())
            print(f"executions beyond commits: {beyond} of {len(w.executions)}")
            for pod in pods:
                assert "server.changed" in pod.log
                assert "an older copy of the server: commits are lost" in pod.log


def check_doctor(report: Sequence[Mapping[str, str]]) -> None:
    """It tells what happened and what to do, and that nothing else is wrong but the tests' server without fsync."""
    found = {each["check"]: each["what"] for each in report if each["verdict"] == "found"}
    assert set(found) == {"server", "durability"}
    assert "an older copy of the server: commits are lost" in found["server"]
    assert "see what ran twice, and after a restore run: perdure after-restore" in found["server"]


def check_claims_of_two_time_lines(lost: Sequence[AuditRow], kept: Sequence[AuditRow]) -> None:
    """What was claimed after the copy was made, on the server that is gone, was not claimed again on the copy; and each
    claim ever made was one runner's."""
    before, after = claimers(lost), claimers(kept)
    both = claimers(sorted(set(lost) & set(kept), key=lambda row: row.id))
    gone, new = before.keys() - both.keys(), after.keys() - both.keys()
    print(f"claims: {len(both)} in both time lines, {len(gone)} lost, {len(new)} made since")
    assert gone, "nothing was claimed in the time that was lost"
    assert new
    assert not gone & new, "a claim of the lost time was made again"
    shared = {
        claim: before[claim] | after[claim]
        for claim in before.keys() & after.keys()
        if len(before[claim] | after[claim]) > 1
    }
    assert not shared, f"claims under which two runners worked: {shared}"


def claimers(rows: Sequence[AuditRow]) -> Mapping[int, set[tuple[str, int]]]:
    """claim_id → the runs and runners that fence rows name beside it."""
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for row in rows:
        if row.table == "fences" and row.claim_id and row.run_id and row.runner_id:
            found[row.claim_id].add((row.run_id, row.runner_id))
    return found
