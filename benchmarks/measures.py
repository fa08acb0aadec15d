"""One measurement each, on a server and a runner that are given."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from opentelemetry import trace

from benchmarks.processes import processor_seconds
from benchmarks.workflows import LARGE, app, large, nobody, one
from perdure import Client, WorkflowDefinition
from perdure.runtime.bulk import UNDER_WAY
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings

CONNECTIONS = 50
LIMIT_SECONDS = 2.0
ROOT = Path(__file__).resolve().parent.parent

INSERT_RAW = """
with input as (
  select * from unnest($1::text[], $2::int[], $3::text[], $4::bigint[]) as u(run_id, slot, payload, token)),
runs as (insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload)
         select run_id, slot, 'bench.raw', token, token, payload from input),
fences as (insert into perdure_fences (run_id, slot, workflow) select run_id, slot, 'bench.raw' from input)
insert into perdure_wakes (run_id, slot, wake_at) select run_id, slot, now() from input
"""
"""The rows of a start and nothing else: no look-up, no answer."""
CHUNK = 500
TURNS = 6
SMALL = 600
"""Small runs, or commits, of a turn."""
BETWEEN_LARGE = 0.01
"""Seconds between two 2 MiB commits of a pod: writing and reading JSON, and giving the step to its body."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The 99th percentile of small things, in seconds, alone and beside large ones."""

    alone: float
    beside: float

    @property
    def times(self) -> float:
        return self.beside / self.alone


@dataclass(frozen=True, slots=True)
class Together:
    """Two pods at once. pods, server: cores that both pods, and all processes of the server, used meanwhile."""

    steps_per_second: float
    pods: float
    server: float


def runner_on(url: str, **settings: object) -> Runner:
    return Runner(app, Settings(db=url, runner_port=0, **settings))  # type: ignore[arg-type]


async def commit_rate(url: str) -> float:
    """One-row commits a second by 50 connections: what the disk and the server allow."""
    connections = [await asyncpg.connect(url) for _ in range(CONNECTIONS)]
    await connections[0].execute("create table if not exists bench_limit (id bigserial, v text)")
    end = time.perf_counter() + LIMIT_SECONDS
    counts = [0] * CONNECTIONS

    async def write(n: int, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        while time.perf_counter() < end:
            await connection.execute("insert into bench_limit (v) values ('x')")
            counts[n] += 1

    await asyncio.gather(*(write(n, c) for n, c in enumerate(connections)))
    for connection in connections:
        await connection.close()
    return sum(counts) / LIMIT_SECONDS


async def commit_alone(url: str, commits: int = 200) -> float:
    """Median seconds of a one-row commit with nobody beside it."""
    connection = await asyncpg.connect(url)
    taken = []
    for _ in range(commits):
        began = time.perf_counter()
        await connection.execute("insert into bench_limit (v) values ('x')")
        taken.append(time.perf_counter() - began)
    await connection.close()
    return statistics.median(taken)


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


async def throughput_for(
    runner: Runner, which: WorkflowDefinition[int, int], seconds: float
) -> tuple[int, float]:
    """(runs that ended within so many seconds, CPU seconds of this process) with 50 in flight all the time."""
    end = time.perf_counter() + seconds
    ended = 0

    async def drive(n: int) -> None:
        nonlocal ended
        while time.perf_counter() < end:
            await runner.client.run(which, n)
            ended += time.perf_counter() < end

    cpu = time.process_time()
    await asyncio.gather(*(drive(n) for n in range(CONNECTIONS)))
    return ended, time.process_time() - cpu


async def latency(runner: Runner, runs: int) -> float:
    """Median seconds from start to result of a one-step run on an idle system."""
    taken = await _one_by_one(runner, runs)
    return statistics.median(taken)


async def _one_by_one(runner: Runner, runs: int) -> list[float]:
    taken = []
    for n in range(runs):
        began = time.perf_counter()
        await runner.client.run(one, n)
        taken.append(time.perf_counter() - began)
    return taken


async def beside_large(runner: Runner, runs: int = SMALL) -> Beside:
    """Small runs, ten at a time, without and with one beside them that writes 2 MiB results."""

    async def small() -> list[float]:
        taken = await asyncio.gather(*(_one_by_one(runner, runs // 10) for _ in range(10)))
        return [each for some in taken for each in some]

    async def write() -> None:
        await runner.client.run(large, 2)

    return await _beside(small, write)


async def rows_beside_large(url: str, commits: int = SMALL) -> Beside:
    """The same of plain connections: ten that commit a row twice, beside one that commits 2 MiB as often as a pod
    does. What the server, its disk and this loop make of it."""
    *connections, other = [await asyncpg.connect(url) for _ in range(11)]
    insert = "insert into bench_limit (v) values ($1)"

    async def one_by_one(connection: asyncpg.Connection[asyncpg.Record]) -> list[float]:
        taken = []
        for _ in range(commits // 10):
            began = time.perf_counter()
            await connection.execute(insert, "x")
            await connection.execute(insert, "x")
            taken.append(time.perf_counter() - began)
        return taken

    async def small() -> list[float]:
        taken = await asyncio.gather(*(one_by_one(connection) for connection in connections))
        return [each for some in taken for each in some]

    async def write() -> None:
        await other.execute(insert, "x" * LARGE)
        await asyncio.sleep(BETWEEN_LARGE)

    try:
        return await _beside(small, write)
    finally:
        for connection in (*connections, other):
            await connection.close()


async def _beside(
    small: Callable[[], Awaitable[list[float]]], write: Callable[[], Awaitable[None]]
) -> Beside:
    """``small`` by turns alone and while ``write`` is called over and over."""
    alone: list[float] = []
    beside: list[float] = []
    await write()  # everybody's connections are open, and statements planned
    for _ in range(TURNS):
        alone += await small()
        enough = asyncio.Event()

        async def go_on(enough: asyncio.Event = enough) -> None:
            while not enough.is_set():
                await write()

        writing = asyncio.create_task(go_on())
        try:
            beside += await small()
        finally:
            enough.set()
            await writing
    return Beside(*(statistics.quantiles(taken, n=100)[-1] for taken in (alone, beside)))


async def two_processes(url: str, server: int, seconds: float) -> Together:
    """Two pods that share the shards, each starting ten-step runs for so long. server: the postmaster's process id."""
    command = [sys.executable, "-m", "benchmarks.worker", url, str(seconds)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    workers = [
        await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"ready\n", "a pod did not get its shards"
        began, used = time.perf_counter(), processor_seconds(server)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
        ended, cpu = 0, 0.0
        for worker in workers:
            assert worker.stdout is not None
            told = json.loads(await worker.stdout.readline())
            ended, cpu = ended + told["runs"], cpu + told["cpu"]
        took, used = time.perf_counter() - began, processor_seconds(server) - used
    finally:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
            await worker.wait()
    return Together(ended * 10 / seconds, pods=cpu / took, server=used / took)


async def raw_starts(url: str, rows: int) -> float:
    """Rows a second of bare inserts into the three tables of a start, two chunks under way."""
    connections = [await asyncpg.connect(url) for _ in range(2)]
    numbers = iter(range(0, rows, CHUNK))
    began = time.perf_counter()

    async def insert(connection: asyncpg.Connection[asyncpg.Record]) -> None:
        for first in numbers:
            part = range(first, first + CHUNK)
            ids = [f"raw-{began:.6f}-{n:09}" for n in part]
            slots = [n * 7919 % 65_536 for n in part]
            await connection.execute(
                INSERT_RAW, ids, slots, [str(n) for n in part], [n + 1 for n in part]
            )

    await asyncio.gather(*(insert(connection) for connection in connections))
    rate = rows / (time.perf_counter() - began)
    for connection in connections:
        await connection.close()
    return rate


async def many_starts(url: str, rows: int) -> float:
    """Starts a second of `start_many` by a client without a runner, its connections open like those of the inserts."""
    async with Client(url, workflows=[nobody]) as client:
        await client.start_many(nobody, range(UNDER_WAY * CHUNK))
        began = time.perf_counter()
        started = await client.start_many(nobody, range(rows))
        rate = rows / (time.perf_counter() - began)
    assert all(item.created for item in started)
    return rate


def trace_everything() -> bool:
    """Set up an OpenTelemetry SDK that records every span and exports none; False where there is none."""
    try:
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return False
    trace.set_tracer_provider(TracerProvider())
    return True


async def stored(url: str) -> int:
    """Bytes of the tables of runs, with their indexes."""
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchval(
            "select sum(pg_total_relation_size(oid))::bigint from pg_class"
            " where relkind in ('r', 'p') and relname like 'perdure%'"
        )
    finally:
        await connection.close()
    return int(found)
