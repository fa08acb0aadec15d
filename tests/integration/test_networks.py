"""Pods on hosts of their own whose network goes silent: half-open connections, a database out of reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.harness import networks
from tests.harness.audit import AuditRow
from tests.harness.fixtures import audited_database
from tests.harness.networks import Host
from tests.harness.pods import Pod
from tests.harness.postgres import MISSING, PrivatePostgres, find_binaries
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, claimed_by, of_runs, taken_from

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(240),
    pytest.mark.skipif(networks.missing() is not None, reason=networks.missing() or ""),
    pytest.mark.skipif(find_binaries() is None, reason=MISSING),
]

LEASE = 15.0
BACK = 5.0
"""Seconds from the return of the network to the moment at which every run has gone on by two steps."""
PLAN = Beats(work=0.1, rest=0.2)


@asynccontextmanager
async def three_hosts(folder: Path, *, shard_lock: str) -> AsyncIterator[tuple[World, list[Host]]]:
    """A server on this machine and three hosts beside it, each with a pod."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(Host(number)) for number in (1, 2, 3)]
        addresses = ",".join(["127.0.0.1", *(host.gateway for host in hosts)])
        server = stack.enter_context(PrivatePostgres(settings={"listen_addresses": addresses}))
        rules = Path(server.run_sql("show hba_file")[0][0])
        rules.write_text(
            "".join(f"host all all {host.address}/32 trust\n" for host in hosts) + rules.read_text()
        )
        server.run_sql("select pg_reload_conf()")
        url = stack.enter_context(audited_database(server))
        async with World(url, folder, lease=LEASE, shard_lock=shard_lock) as w:
            for host in hosts:
                w.start_pod(url.replace("127.0.0.1", host.gateway), on=host)
            for pod in w.pods.all:
                await pod.wait_http("/readyz", deadline=30)
            await w.even(3)
            yield w, hosts


async def lasted(seconds: float) -> None:
    ends = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= ends, what="a while", deadline=seconds + 5)


def written_by(rows: list[AuditRow], runner: int) -> int:
    """Changes of runs that this runner's claims have made."""
    return sum(1 for row in rows if row.table == "fences" and row.runner_id == runner)


async def answers(pods: Sequence[Pod], hosts: Sequence[Host], path: str) -> list[int]:
    """The statuses with which the pods answer on their own hosts."""
    asked = [
        asyncio.to_thread(host.ask, f"http://{pod.host}:{pod.port}{path}")
        for pod, host in zip(pods, hosts, strict=True)
    ]
    return await asyncio.gather(*asked)


def cut(pod: Pod, since: float) -> Fault:
    return Fault("cut off", at=since, until=time.monotonic(), pid=pod.pid)


@pytest.mark.req("CL5", "CL4")
@pytest.mark.parametrize("how", ["silence", "unplug"])
async def test_a_pod_that_is_cut_off_is_replaced_in_seconds_and_commits_nothing_when_it_is_back(
    tmp_path: Path, how: str
) -> None:
    async with three_hosts(tmp_path, shard_lock="advisory") as (w, hosts):
        run_ids = await w.start_runs(60, PLAN)
        await lasted(LEASE / 2 + 1)  # sessions that are old enough to judge by locks
        await w.beating(run_ids, since=time.monotonic(), steps=1)
        alone, host = w.pods.all[0], hosts[0]
        old = (await w.runner_of(alone)).runner_id
        since = time.monotonic()
        getattr(host, how)()
        await until(
            lambda: all(
                any(e.started > since and e.pid != alone.pid for e in of_runs(w.executions)[run_id])
                for run_id in run_ids
            ),
            what="every run goes on elsewhere",
            deadline=20,
        )
        taken = taken_from(await w.history(), old)
        assert len(taken) >= 10
        first = max(
            next(e.started for e in mine if e.started > since and e.pid != alone.pid) - since
            for run_id, mine in of_runs(w.executions).items()
            if run_id in taken
        )
        print(f"taken over: {len(taken)}, the last of them after {first:.3f} s")
        assert first <= 6.0
        await lasted(LEASE)
        before = written_by(await w.history(), old)
        host.heal()
        new = await w.goes_on_anew(alone, old)
        fault = cut(alone, since)
        await w.even(3)
        await w.beating(run_ids, since=time.monotonic(), steps=2)
        await w.finish()
        rows = await w.history()
        assert written_by(rows, old) == before, "what it still had to say was refused"
        assert claimed_by(rows, new)
        beyond = await w.check([fault])
        print(f"executions beyond commits: {beyond} of {len(w.executions)}")


@pytest.mark.req("CL11", "CL3")
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_the_databases_host_is_out_of_reach_for_longer_than_a_lease(
    tmp_path: Path, shard_lock: str
) -> None:
    """Nobody can renew and nobody can take: when the network is back everything goes on, whoever was quicker."""
    async with three_hosts(tmp_path, shard_lock=shard_lock) as (w, hosts):
        run_ids = await w.start_runs(60, PLAN)
        await w.beating(run_ids, steps=3)
        since = time.monotonic()
        for host in hosts:
            host.silence()
        await lasted(18)
        assert await answers(w.pods.all, hosts, "/readyz") == [503, 503, 503]
        assert await answers(w.pods.all, hosts, "/livez") == [200, 200, 200]
        await lasted(since + 20 - time.monotonic())
        for host in hosts:
            host.heal()
        healed = time.monotonic()
        await w.beating(run_ids, since=healed, steps=2)
        took = time.monotonic() - healed
        print(f"every run has gone on after {took:.3f} s")
        assert took <= BACK
        faults = [cut(pod, since) for pod in w.pods.all]
        await w.even(3)
        await w.finish()
        beyond = await w.check(faults)
        dead = sum(row.dead for row in (await w.topology()).runners)
        print(f"executions beyond commits: {beyond} of {len(w.executions)}; declared dead: {dead}")
        await asyncio.gather(*(pod.wait_http("/readyz") for pod in w.pods.all))
