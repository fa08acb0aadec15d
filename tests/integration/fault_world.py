"""Three real pods on one database, runs in them, and what must be true of both in the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from perdure import Client
from perdure.runtime.handle import Handle
from perdure.runtime.views import ClusterStatus, RunnerView
from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.model import Topology
from tests.harness.audit import AuditRow, read_history
from tests.harness.checkers import accounted_executions, check_history, claim_chains, final_statuses
from tests.harness.networks import Host
from tests.harness.pods import Pod, Pods
from tests.harness.sidelog import Execution, Fault, SideLog, check_executions
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats, beats, stop_file

APP = "tests.integration.apps.beats:app"
both_modes = pytest.mark.parametrize(
    "shard_lock", ["advisory", pytest.param("row", marks=pytest.mark.slow)]
)
LEASE = 2.0
SHARDS = 256


class World:
    """Pods (started by the test) and a client on one audited database.

    lease: of all pods, seconds. settings: further ones of all pods. Each pod can be given a URL of its own, such as
    that of a proxy.
    """

    def __init__(self, url: str, folder: Path, *, lease: float = LEASE, **settings: str) -> None:
        self.url = url
        self.side_log = SideLog(folder / "side.log")
        self.client = Client(url, workflows=[beats])
        self.handles: list[Handle[int]] = []
        self.pods = Pods(
            APP,
            url,
            folder,
            env={
                "PERDURE_LEASE": f"{lease:g}",
                "PERDURE_RUNNER_STORAGE": "sql",
                **{f"PERDURE_{key.upper()}": value for key, value in settings.items()},
            },
            command=[sys.executable, "-m", "perdure", "serve", APP],
            side_log=self.side_log.path,
        )
        self._ids = itertools.count(1)
        self._begun = Begun(self.side_log.path)

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pods.end_all()
        await self.client.__aexit__(None, None, None)

    @property
    def database(self) -> str:
        """The database's name, for the URL of a proxy before it."""
        return self.url.rpartition("/")[2]

    # ---- pods ---------------------------------------------------------------------------------

    async def start_pods(self, *urls: str) -> list[Pod]:
        """One pod for each URL, all ready and with their even share of the shards."""
        pods = [self.start_pod(url) for url in urls]
        for pod in pods:
            await pod.wait_http("/readyz", deadline=30)
        await self.even(len(pods))
        return pods

    async def start_pods_beside(self, *others: Pod | str) -> list[Pod]:
        """The same beside pods that are there: these first, then URLs for new ones. The new ones."""
        urls = [other for other in others if isinstance(other, str)]
        pods = [self.start_pod(url) for url in urls]
        for pod in pods:
            await pod.wait_http("/readyz", deadline=30)
        await self.even(len(others))
        return pods

    async def three(self) -> list[Pod]:
        return await self.start_pods(self.url, self.url, self.url)

    def start_pod(
        self, url: str | None = None, *, name: str | None = None, on: Host | None = None
    ) -> Pod:
        return self.pods.start(name, env={"PERDURE_DB": url or self.url}, on=on)

    async def cluster(self) -> ClusterStatus:
        return await self.client.cluster()

    async def runner_of(self, pod: Pod) -> RunnerView:
        """The runner that is alive at the pod's address; of several the one registered last."""
        found = [
            runner
            for runner in (await self.cluster()).runners
            if runner.alive and runner.address.endswith(f":{pod.port}")
        ]
        assert found, f"pod {pod.name} has no runner that is alive"
        return max(found, key=lambda runner: runner.lease_left)

    async def goes_on_anew(self, pod: Pod, old: int) -> int:
        """Wait until a pod's process is another runner than the old one, alive and with shards; its id."""

        async def look() -> int | None:
            for runner in (await self.cluster()).runners:
                mine = runner.address.endswith(f":{pod.port}") and runner.runner_id != old
                if mine and runner.alive and runner.shards:
                    return runner.runner_id
            return None

        new = await until(look, what=f"pod {pod.name} is a new runner", deadline=20, interval=0.05)
        assert new is not None
        assert (await pod.status())["runner_id"] == new
        assert old in {row.runner_id for row in (await self.topology()).runners if row.dead}
        return new

    async def even(self, count: int, *, deadline: float = 20.0) -> None:
        """Wait until so many runners are alive and each holds its even share."""

        async def look() -> bool:
            held = Counter(
                row.runner_id for row in (await self.topology()).shards if row.runner_id is not None
            )
            live = {runner.runner_id for runner in (await self.cluster()).runners if runner.alive}
            return (
                len(live) == count
                and held.keys() == live
                and sum(held.values()) == SHARDS
                and max(held.values()) - min(held.values()) <= 1
            )

        await until(
            look, what=f"an even share for {count} runners", deadline=deadline, interval=0.1
        )

    async def topology(self) -> Topology:
        cluster = connect(DatabaseSettings(self.url), clock=SystemClock()).cluster()
        await cluster.open()
        try:
            return await cluster.read_topology()
        finally:
            await cluster.close()

    async def shards_of(self, pod: Pod) -> set[int]:
        runner = (await self.runner_of(pod)).runner_id
        return {row.shard_id for row in (await self.topology()).shards if row.runner_id == runner}

    # ---- runs ---------------------------------------------------------------------------------

    def ids(self, shards: Collection[int] | None = None) -> Iterator[str]:
        """Fresh run ids; ``shards``: only such as belong to these."""
        for number in self._ids:
            run_id = f"run-{number:05}"
            if shards is None or shard_of(slot_of(run_id), SHARDS) in shards:
                yield run_id

    async def start_runs(
        self, count: int, plan: Beats, *, shards: Collection[int] | None = None
    ) -> list[str]:
        """Start runs; ``shards``: all of them in these."""
        started = await asyncio.gather(
            *(
                self.client.start(beats, plan, run_id=run_id)
                for run_id in itertools.islice(self.ids(shards), count)
            )
        )
        self.handles += started
        return [handle.run_id for handle in started]

    async def beating(
        self, run_ids: Collection[str], *, since: float = 0.0, steps: int = 1
    ) -> None:
        """Wait until each of these runs has begun so many steps since then."""

        def look() -> bool:
            begun = self._begun.since(since)
            return all(begun[run_id] >= steps for run_id in run_ids)

        await until(look, what=f"{steps} steps of each run", deadline=60, interval=0.1)

    async def finish(self, *, deadline: float = 60.0) -> None:
        """Tell the runs to stop, and wait until all have succeeded with the right result."""
        stop_file(self.side_log.path).touch()
        async with asyncio.timeout(deadline):
            results = await asyncio.gather(*(handle.wait() for handle in self.handles))
        rows = await self.history()
        counted = Counter(run_id for run_id, _ in accounted_executions(rows))
        wrong = {
            handle.run_id: (result, counted[handle.run_id])
            for handle, result in zip(self.handles, results, strict=True)
            if result != counted[handle.run_id]
        }
        assert not wrong, f"result and number of steps in the journal: {wrong}"
        assert Counter(final_statuses(rows).values()) == {"succeeded": len(self.handles)}

    # ---- what was seen ------------------------------------------------------------------------

    @property
    def executions(self) -> list[Execution]:
        return self.side_log.executions()

    def first_step(self, run_id: str) -> Execution:
        return next(e for e in self.executions if e.run == run_id)

    async def history(self) -> list[AuditRow]:
        return await read_history(self.url)

    async def check(self, faults: Sequence[Fault] = (), *, window: float = 1.0) -> int:
        """Nothing wrong in the history, and every execution beyond the journal's is explained by one of these
        faults. How many there were."""
        rows = await self.history()
        accounted = accounted_executions(rows)
        executions = self.executions
        wrong = check_history(rows)
        wrong += check_executions(executions, accounted, faults, window=window)
        assert not wrong, "\n".join(wrong[:20])
        return len(executions) - sum(accounted.values())


class Begun:
    """The steps begun so far, read from a side log as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._begun: list[tuple[float, str]] = []

    def since(self, moment: float) -> Counter[str]:
        """run_id → number of its steps begun after this moment of the monotonic clock."""
        self._read_on()
        return Counter(run_id for at, run_id in self._begun if at > moment)

    def _read_on(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        lines = (json.loads(line) for line in whole.splitlines())
        self._begun += [(line["t"], line["run"]) for line in lines if line["phase"] == "start"]


def of_runs(executions: Sequence[Execution]) -> Mapping[str, list[Execution]]:
    """run_id → its executions, in the order in which they began."""
    found: dict[str, list[Execution]] = defaultdict(list)
    for execution in executions:
        found[execution.run].append(execution)
    return found


def taken_from(rows: Sequence[AuditRow], runner: int) -> set[str]:
    """The runs that were claimed away from a runner."""
    return {
        row.run_id or ""
        for row in rows
        if row.table == "fences"
        and row.claim_id not in (None, row.old_claim_id)
        and row.old_claim_id is not None
        and row.old_runner_id == runner != row.runner_id
    }


def claimed_by(rows: Sequence[AuditRow], runner: int) -> set[str]:
    """The runs that a runner has claimed at some time."""
    return {
        run_id
        for run_id, chain in claim_chains(rows).items()
        if any(claimer == runner for _, claimer in chain)
    }


def handed_over(
    executions: Sequence[Execution], chosen: Callable[[Execution], bool]
) -> list[float]:
    """Seconds between the end of one step of a run and the start of its next in another process, for steps that
    ended and were chosen."""
    gaps = []
    for mine in of_runs(executions).values():
        for before, after in itertools.pairwise(mine):
            if before.pid != after.pid and before.ended is not None and chosen(before):
                gaps.append(after.started - before.ended)
    return gaps
