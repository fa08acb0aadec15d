"""`python -m benchmarks [--runs N] [--rounds N] [--peers FOLDER]`: speed of this machine's perdure on a private server.

JSON lines: bench, metric, value, unit, ratio (to the round's limit, or of the value itself), goal, lowest, highest. The
limit is the rate at which 50 asyncpg connections commit one-row inserts on the same server in the same round; every
figure is the median of the rounds, and ``noise`` how far the limits of the rounds are apart. The client is in the pod's
process, fsync is on, no audit triggers are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import measures, peers
from benchmarks.measures import runner_on, throughput
from benchmarks.workflows import one, ten
from perdure.runtime.cli.pods import calm_collector
from perdure.runtime.logs import configure_logs
from perdure.runtime.settings import Settings
from perdure.storage.connect import migrate
from tests.harness.postgres import PrivatePostgres


@dataclass
class Figures:
    """Values of one metric over the rounds, and its ratios. goal: what the ratio, or the value, should be."""

    unit: str
    goal: str | None = None
    values: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def add(self, value: float, limit: float | None = None) -> None:
        self.values.append(value)
        if limit is not None:
            self.ratios.append(value / limit)


Table = dict[tuple[str, str], Figures]


def empty_table() -> Table:
    return {
        ("limit", "one-row commits"): Figures("1/s"),
        ("limit", "one commit, alone"): Figures("ms"),
        ("one-step", "runs"): Figures("1/s", ">= 0.2"),
        ("one-step", "cpu per run"): Figures("µs"),
        ("ten-step", "steps"): Figures("1/s", ">= 0.45"),
        ("ten-step", "cpu per step"): Figures("µs", "<= 75 µs"),
        ("ten-step", "cpu per step, traced"): Figures("µs", "<= 120 µs"),
        ("two processes", "steps"): Figures("1/s", ">= 0.6"),
        ("start_many", "starts, to bare inserts"): Figures("1/s", ">= 0.6"),
        ("one-step", "start to result, alone"): Figures("ms"),
        ("one-step", "the same less four commits"): Figures("ms", "<= 3 ms"),
        ("2 MiB results", "p99 of small runs beside them"): Figures("times", "<= 1.3"),
        ("2 MiB rows", "p99 of small commits beside them"): Figures("times"),
    }


async def one_round(server: PrivatePostgres, runs: int, table: Table, *, traced: bool) -> None:
    """One round. traced: only what an OpenTelemetry SDK changes."""
    url = server.url(await asyncio.to_thread(server.create_database))
    await asyncio.to_thread(migrate, Settings(db=url).database())
    few = max(100, runs // 4)
    if traced:
        runner = runner_on(url)
        await runner.start()
        try:
            await throughput(runner, one, 200)
            _, cpu = await throughput(runner, ten, few)
            table["ten-step", "cpu per step, traced"].add(cpu / few / 10 * 1e6)
        finally:
            await runner.stop()
        return
    limit = await measures.commit_rate(url)
    alone = await measures.commit_alone(url)
    table["limit", "one-row commits"].add(limit)
    table["limit", "one commit, alone"].add(alone * 1e3)
    runner = runner_on(url)
    await runner.start()
    try:
        await throughput(runner, one, 200)  # warm up, and take the shards
        calm_collector()  # as a pod does once it is up
        rate, cpu = await throughput(runner, one, runs)
        table["one-step", "runs"].add(rate, limit)
        table["one-step", "cpu per run"].add(cpu / runs * 1e6)
        rate, cpu = await throughput(runner, ten, few)
        table["ten-step", "steps"].add(rate * 10, limit)
        table["ten-step", "cpu per step"].add(cpu / few / 10 * 1e6)
        taken = await measures.latency(runner, 100)
        table["one-step", "start to result, alone"].add(taken * 1e3)
        table["one-step", "the same less four commits"].add((taken - 4 * alone) * 1e3)
        table["2 MiB results", "p99 of small runs beside them"].add(
            await measures.beside_large(runner)
        )
        table["2 MiB rows", "p99 of small commits beside them"].add(
            await measures.rows_beside_large(url)
        )
    finally:
        await runner.stop()
    table["two processes", "steps"].add(await measures.two_processes(url, few), limit)
    # Last, since nobody knows these runs: pods would look for somebody who does.
    raw = await measures.raw_starts(url, 10_000)
    many = await measures.many_starts(url, 10_000)
    table["start_many", "starts, to bare inserts"].add(many, raw)


def report(table: Table) -> None:
    for (bench, metric), figures in table.items():
        if not figures.values:
            continue
        line = {
            "bench": bench,
            "metric": metric,
            "value": round(statistics.median(figures.values), 2),
            "unit": figures.unit,
            "ratio": round(statistics.median(figures.ratios), 3) if figures.ratios else None,
            "goal": figures.goal,
            "lowest": round(min(figures.values), 2),
            "highest": round(max(figures.values), 2),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)
    noise = measures.spread(table["limit", "one-row commits"].values)
    load = os.getloadavg()[0]
    print(json.dumps({"bench": "noise", "of the limit": round(noise, 3), "load": round(load, 2)}))


async def measure(runs: int, rounds: int, folder: Path | None) -> None:
    table = empty_table()
    with PrivatePostgres(durable=True) as server:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            await one_round(server, runs, table, traced=False)
        if measures.trace_everything():
            for _ in range(rounds):
                await one_round(server, runs, table, traced=True)
    if folder is not None:
        limit = statistics.median(table["limit", "one-row commits"].values)
        for (name, metric), values in (await peers.measure(folder, rounds)).items():
            figures = table[name, metric] = Figures("1/s")
            for value in values:
                figures.add(value, limit)
    report(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="a folder with a harness of other systems")
    options = parser.parse_args(arguments)
    configure_logs(format="console", level="error")
    os.chdir(tempfile.gettempdir())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(measure(options.runs, options.rounds, options.peers and options.peers.resolve()))


if __name__ == "__main__":
    main()
