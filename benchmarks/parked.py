"""`python -m benchmarks.parked [--runs N] [--seconds N]`: what 100,000 parked runs cost one pod and its database.

JSON lines: bench, metric, value, unit, limit. One real pod on a private, durable PostgreSQL. A few thousand runs are
parked by the pod itself, which fills what it keeps in memory; the rest are copies of their rows, half of them with a
time to wake at, hours ahead. Then the pod idles, and single runs are signalled one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import processor_seconds, resident
from perdure import App, Client, Context, Settings, workflow
from perdure.sharding.slots import slot_of
from perdure.storage.connect import migrate
from tests.harness.pods import Pod, Pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until

WOKEN = "BENCH_WOKEN"
"""Environment variable: the file to which bodies write when they were woken."""
BY_POD = 1_500
SIGNALS = 100
SETTLED = 10.0


@workflow(name="bench.waits")
async def waits(ctx: Context, word: str) -> str:
    """Runs of one signal each; the moment at which the body has it goes to a file."""
    said = await ctx.wait_signal("go", str)
    _note(ctx.run_id)
    return said


app = App("bench", workflows=[waits])


@dataclass
class Figures:
    """memory: bytes the pod has more than before. pod, database: share of a core while idle, beside the same before.

    signal, signal_empty: median seconds from sending to the woken body."""

    runs: int
    memory: int
    pod: float
    pod_empty: float
    database: float
    database_empty: float
    signal: float
    signal_empty: float


async def measure(
    server: PrivatePostgres, url: str, folder: Path, runs: int, seconds: float
) -> Figures:
    """``url``: of a migrated database of that server."""
    woken = folder / "woken"
    woken.touch()
    env = {WOKEN: str(woken), "PERDURE_PARK_AFTER": "0.2", "PERDURE_LOG_LEVEL": "warning"}
    with Pods("benchmarks.parked:app", url, folder, env=env) as pods:
        pod = await pods.ready()
        async with Client(Settings(db=url), workflows=[waits]) as client:
            await park(client, "warm", 200)
            progress("200 runs parked")
            signal_empty = await signals(client, woken, [f"warm-{n}" for n in range(SIGNALS)])
            await asyncio.sleep(SETTLED)
            before = resident(pod.pid)
            pod_empty, database_empty = await idle(pod, server, seconds)
            await park(client, "real", min(runs, BY_POD))
            progress(f"{BY_POD} more parked by the pod")
            await copy(url, "real-0", runs - BY_POD)
            await asyncio.sleep(SETTLED)
            progress(f"{runs:,} in all")
            memory = resident(pod.pid) - before
            pod_share, database_share = await idle(pod, server, seconds)
            some = [f"copy-{random.randrange(1, runs - BY_POD + 1)}" for _ in range(SIGNALS)]
            signal = await signals(client, woken, list(dict.fromkeys(some)))
    return Figures(
        runs, memory, pod_share, pod_empty, database_share, database_empty, signal, signal_empty
    )


def progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def park(client: Client, prefix: str, count: int) -> None:
    gate = asyncio.Semaphore(100)

    async def start(n: int) -> None:
        async with gate:
            await client.start(waits, "x", run_id=f"{prefix}-{n}")

    parked = (await client.cluster()).runs.get("suspended", 0)
    await asyncio.gather(*(start(n) for n in range(count)))

    async def look() -> bool:
        return (await client.cluster()).runs.get("suspended", 0) == parked + count

    await until(look, what=f"{count} runs parked", deadline=120, interval=0.2)


async def copy(url: str, run_id: str, count: int) -> None:
    """Rows like those of a run the pod has parked, under other ids."""
    ids = [f"copy-{n}" for n in range(1, count + 1)]
    slots = [slot_of(each) for each in ids]
    connection = await asyncpg.connect(url, command_timeout=300)
    try:
        for table in ("runs", "fences", "wakes"):
            names = [
                row["column_name"]
                for row in await connection.fetch(
                    "select column_name from information_schema.columns where table_name = $1",
                    f"perdure_{table}",
                )
            ]
            own = {"run_id": "c.run_id", "slot": "c.slot"}
            if table == "wakes":
                own["wake_at"] = (
                    "case when slot % 2 = 0 then now() + (60 + slot % 600) * interval '1 minute' end"
                ).replace("slot", "c.slot")
            values = [own.get(name, f"r.{name}") for name in names]
            await connection.execute(
                f"insert into perdure_{table} ({', '.join(names)}) select {', '.join(values)} "
                f"from perdure_{table} r, unnest($1::text[], $2::int[]) c(run_id, slot) where r.run_id = $3",
                ids,
                slots,
                run_id,
            )
        await connection.execute("vacuum analyze")
    finally:
        await connection.close()


async def idle(pod: Pod, server: PrivatePostgres, seconds: float) -> tuple[float, float]:
    """The shares of a core that the pod and the database's processes use while nothing happens."""
    began = time.monotonic()
    used = processor_seconds(pod.pid), processor_seconds(server.pid)
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return (
        (processor_seconds(pod.pid) - used[0]) / took,
        (processor_seconds(server.pid) - used[1]) / took,
    )


async def signals(client: Client, woken: Path, run_ids: Sequence[str]) -> float:
    """Median seconds from sending a signal to the body that has it, one after the other."""
    took = []
    for run_id in run_ids:
        sent = time.monotonic()
        await client.signal(run_id, "go", "on")
        moment = await until(
            partial(_moment, woken, run_id), what=f"{run_id} woken", deadline=30, interval=0.005
        )
        took.append(float(moment or 0.0) - sent)
    return statistics.median(took)


def _moment(woken: Path, run_id: str) -> str | None:
    return dict(line.split() for line in woken.read_text().splitlines()).get(run_id)


def _note(run_id: str) -> None:
    with Path(os.environ[WOKEN]).open("a") as file:
        file.write(f"{run_id} {time.monotonic()}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parked", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    with PrivatePostgres(durable=True) as server, tempfile.TemporaryDirectory() as folder:
        url = server.url(server.create_database())
        migrate(Settings(db=url).database())
        found = asyncio.run(measure(server, url, Path(folder), options.runs, options.seconds))
    for metric, value in asdict(found).items():
        print(json.dumps({"bench": "parked", "metric": metric, "value": round(value, 5)}))


if __name__ == "__main__":
    main()
