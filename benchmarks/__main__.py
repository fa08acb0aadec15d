"""`python -m benchmarks [--runs N] [--rounds N]`: speed of this machine's perdure on a private, durable PostgreSQL.

JSON lines: bench, metric, value, unit, ratio_to_limit. The limit is the rate at which 50 asyncpg connections commit
one-row inserts on the same server in the same round; every figure is the median of the rounds. The client is in the
pod's process, fsync is on, no audit triggers are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perdure import App, Context, WorkflowDefinition, step, workflow
from perdure.runtime.logs import configure_logs
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.storage.connect import migrate
from tests.harness.postgres import PrivatePostgres

CONNECTIONS = 50
LIMIT_SECONDS = 2.0


@step
async def add(number: int) -> int:
    return number + 1


@workflow(name="bench.one")
async def one(ctx: Context, number: int) -> int:
    return await ctx.step(add, number)


@workflow(name="bench.ten")
async def ten(ctx: Context, number: int) -> int:
    for _ in range(10):
        number = await ctx.step(add, number)
    return number


@dataclass
class Figures:
    """Values of one metric over the rounds, and its ratio to the round's limit."""

    unit: str
    values: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def add(self, value: float, limit: float | None = None) -> None:
        self.values.append(value)
        if limit is not None:
            self.ratios.append(value / limit)


async def commit_rate(url: str) -> float:
    """One-row commits a second by 50 connections: what the disk and the server allow."""
    connections = [await asyncpg.connect(url) for _ in range(CONNECTIONS)]
    await connections[0].execute("create table if not exists bench_limit (id bigserial, v text)")
    end = time.perf_counter() + LIMIT_SECONDS
    counts = [0] * CONNECTIONS

    async def write(n: int, connection: asyncpg.Connection) -> None:
        while time.perf_counter() < end:
            await connection.execute("insert into bench_limit (v) values ('x')")
            counts[n] += 1

    await asyncio.gather(*(write(n, c) for n, c in enumerate(connections)))
    for connection in connections:
        await connection.close()
    return sum(counts) / LIMIT_SECONDS


async def throughput(
    runner: Runner, which: WorkflowDefinition[int, int], runs: int
) -> tuple[float, float]:
    """(runs a second, CPU seconds of this process) with 50 in flight from start to result."""
    gate = asyncio.Semaphore(CONNECTIONS)

    async def drive(n: int) -> None:
        async with gate:
            await runner.client.run(which, n)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(drive(n) for n in range(runs)))
    return runs / (time.perf_counter() - began), time.process_time() - cpu


async def latency(runner: Runner, runs: int) -> float:
    """Median seconds from start to result of a one-step run on an idle system."""
    taken = []
    for n in range(runs):
        began = time.perf_counter()
        await runner.client.run(one, n)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def one_round(
    server: PrivatePostgres, runs: int, figures: dict[tuple[str, str], Figures]
) -> None:
    url = server.url(await asyncio.to_thread(server.create_database))
    await asyncio.to_thread(migrate, Settings(db=url).database())
    limit = await commit_rate(url)
    figures[("limit", "one-row commits")].add(limit)
    runner = Runner(App("bench", workflows=[one, ten]), Settings(db=url, runner_port=0))
    await runner.start()
    try:
        await throughput(runner, one, 200)  # warm up, and take the shards
        rate, cpu = await throughput(runner, one, runs)
        figures[("one-step", "runs")].add(rate, limit)
        figures[("one-step", "cpu per run")].add(cpu / runs * 1e6)
        rate, cpu = await throughput(runner, ten, max(100, runs // 4))
        figures[("ten-step", "steps")].add(rate * 10, limit)
        figures[("ten-step", "cpu per step")].add(cpu / max(100, runs // 4) / 10 * 1e6)
        figures[("one-step", "start to result, alone")].add(await latency(runner, 100) * 1e3)
    finally:
        await runner.stop()


def report(figures: dict[tuple[str, str], Figures]) -> None:
    for (bench, metric), values in figures.items():
        line = {
            "bench": bench,
            "metric": metric,
            "value": round(statistics.median(values.values), 2),
            "unit": values.unit,
            "ratio_to_limit": round(statistics.median(values.ratios), 3) if values.ratios else None,
            "lowest": round(min(values.values), 2),
            "highest": round(max(values.values), 2),
        }
        print(json.dumps(line), flush=True)


async def measure(runs: int, rounds: int) -> None:
    figures = {
        ("limit", "one-row commits"): Figures("1/s"),
        ("one-step", "runs"): Figures("1/s"),
        ("one-step", "cpu per run"): Figures("µs"),
        ("ten-step", "steps"): Figures("1/s"),
        ("ten-step", "cpu per step"): Figures("µs"),
        ("one-step", "start to result, alone"): Figures("ms"),
    }
    with PrivatePostgres(durable=True) as server:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            await one_round(server, runs, figures)
    report(figures)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    configure_logs(format="console", level="warning")
    os.chdir(tempfile.gettempdir())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(measure(options.runs, options.rounds))


if __name__ == "__main__":
    main()
