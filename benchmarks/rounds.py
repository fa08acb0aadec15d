"""One round of `python -m benchmarks`: the limit of the server, and perdure beside it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

from benchmarks import measures
from benchmarks.figures import Figures, Goal, Table
from benchmarks.measures import runner_on, throughput
from benchmarks.peers import Harness, Peer
from benchmarks.processes import processor_seconds
from benchmarks.workflows import one, ten
from perdure.runtime.cli.pods import calm_collector
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.storage.connect import migrate
from tests.harness.postgres import PrivatePostgres

STARTS = 10_000
BATTERY = {1: ("one-step", "runs"), 10: ("ten-step", "steps")}
"""Steps of a run → the metric of it; what other systems are measured by, too."""


def at_least(figure: float) -> Goal:
    return Goal(">=", figure, of="ratio")


def at_most(figure: float) -> Goal:
    return Goal("<=", figure, of="value")


def empty_table() -> Table:
    return {
        ("limit", "one-row commits"): Figures("1/s", digits=0),
        ("limit", "one commit, alone"): Figures("ms"),
        ("one-step", "runs"): Figures("1/s", at_least(0.2), digits=0),
        ("one-step", "cpu per run"): Figures("µs", digits=0),
        ("ten-step", "steps"): Figures("1/s", at_least(0.45), digits=0),
        ("ten-step", "cpu per step"): Figures("µs", at_most(75), digits=1),
        ("ten-step", "cpu per step, traced"): Figures("µs", at_most(120), digits=1),
        ("ten-step", "cpu of the server per step"): Figures("µs", digits=0),
        ("ten-step", "bytes stored per step"): Figures("bytes", digits=0),
        ("two processes", "steps"): Figures("1/s", at_least(0.6), digits=0),
        ("two processes", "cpu of both pods"): Figures("cores"),
        ("two processes", "cpu of the server"): Figures("cores"),
        ("start_many", "starts, to bare inserts"): Figures("1/s", at_least(0.6), digits=0),
        ("one-step", "start to result, alone"): Figures("ms"),
        ("one-step", "the same less four commits"): Figures("ms", at_most(3)),
        ("2 MiB results", "p99 of small runs, alone"): Figures("ms"),
        ("2 MiB results", "p99 of small runs, beside them"): Figures("ms"),
        ("2 MiB results", "how much longer"): Figures("times", at_most(1.3)),
        ("2 MiB rows", "p99 of small commits, how much longer"): Figures("times"),
    }


@dataclass
class Round:
    """runs: how many of one step are measured at once; half as many of ten steps. seconds: of two processes.

    name: for progress. limit: one-row commits a second, once :meth:`perdure` has measured them."""

    server: PrivatePostgres
    table: Table
    runs: int
    seconds: float
    name: str
    url: str = ""
    limit: float = 0.0
    rates: dict[int, float] = field(default_factory=dict)

    async def perdure(self) -> None:
        await self._database()
        await self._limit()
        runner = runner_on(self.url)
        await runner.start()
        try:
            self._tell("short and long runs")
            await throughput(runner, one, 200)  # warm up, and take the shards
            calm_collector()  # as a pod does once it is up
            await self._one_step(runner)
            await self._ten_steps(runner)
            await self._alone(runner)
            await self._large(runner)
        finally:
            await runner.stop()
        await self._two_processes()
        await self._starts()  # last, since nobody knows these runs: pods would look for somebody

    async def traced(self) -> None:
        """Only what an OpenTelemetry SDK changes."""
        self._tell("with OpenTelemetry")
        await self._database()
        runner = runner_on(self.url)
        await runner.start()
        try:
            await throughput(runner, one, 200)
            calm_collector()
            runs = self.runs // 2
            _, cpu = await throughput(runner, ten, runs)
            self.table["ten-step", "cpu per step, traced"].add(cpu / runs / 10 * 1e6)
        finally:
            await runner.stop()

    async def peers(self, harness: Harness, peers: list[Peer]) -> None:
        """Other systems, on the server that perdure was just measured on where they use a PostgreSQL."""
        for peer in peers:
            self._tell(peer.name)
            for steps, rate in (await harness.measure(peer)).items():
                bench, metric = BATTERY[steps]
                place = (peer.name, f"{bench} {metric}")
                mine = (peer.name, f"{bench} {metric}, perdure's beside them")
                figures = self.table.setdefault(place, Figures("1/s", digits=0))
                figures.add(rate * steps, self.limit if peer.shares_server else None)
                times = self.table.setdefault(mine, Figures("times"))
                times.add(self.rates[steps] / (rate * steps))

    def _tell(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)

    def _add(self, bench: str, metric: str, value: float, limit: float | None = None) -> None:
        self.table[bench, metric].add(value, limit)

    async def _database(self) -> None:
        self.url = self.server.url(await asyncio.to_thread(self.server.create_database))
        await asyncio.to_thread(migrate, Settings(db=self.url).database())

    async def _limit(self) -> None:
        self._tell("the limit")
        self.limit = await measures.commit_rate(self.url)
        self._add("limit", "one-row commits", self.limit)

    async def _starts(self) -> None:
        self._tell("starts")
        raw = await measures.raw_starts(self.url, STARTS)
        many = await measures.many_starts(self.url, STARTS)
        self._add("start_many", "starts, to bare inserts", many, raw)

    async def _one_step(self, runner: Runner) -> None:
        self.rates[1], cpu = await throughput(runner, one, self.runs)
        self._add("one-step", "runs", self.rates[1], self.limit)
        self._add("one-step", "cpu per run", cpu / self.runs * 1e6)

    async def _ten_steps(self, runner: Runner) -> None:
        runs = self.runs // 2
        steps = runs * 10
        used, stored = processor_seconds(self.server.pid), await measures.stored(self.url)
        rate, cpu = await throughput(runner, ten, runs)
        used = processor_seconds(self.server.pid) - used
        stored = await measures.stored(self.url) - stored
        self.rates[10] = rate * 10
        self._add("ten-step", "steps", rate * 10, self.limit)
        self._add("ten-step", "cpu per step", cpu / steps * 1e6)
        self._add("ten-step", "cpu of the server per step", used / steps * 1e6)
        self._add("ten-step", "bytes stored per step", stored / steps)

    async def _alone(self, runner: Runner) -> None:
        commit = await measures.commit_alone(self.url)  # now, since disks change their mind
        taken = await measures.latency(runner, 100)
        self._add("limit", "one commit, alone", commit * 1e3)
        self._add("one-step", "start to result, alone", taken * 1e3)
        self._add("one-step", "the same less four commits", (taken - 4 * commit) * 1e3)

    async def _large(self, runner: Runner) -> None:
        self._tell("2 MiB results")
        runs = await measures.beside_large(runner)
        self._add("2 MiB results", "p99 of small runs, alone", runs.alone * 1e3)
        self._add("2 MiB results", "p99 of small runs, beside them", runs.beside * 1e3)
        self._add("2 MiB results", "how much longer", runs.times)
        rows = await measures.rows_beside_large(self.url)
        self._add("2 MiB rows", "p99 of small commits, how much longer", rows.times)

    async def _two_processes(self) -> None:
        self._tell("two processes")
        both = await measures.two_processes(self.url, self.server.pid, self.seconds)
        self._add("two processes", "steps", both.steps_per_second, self.limit)
        self._add("two processes", "cpu of both pods", both.pods)
        self._add("two processes", "cpu of the server", both.server)
