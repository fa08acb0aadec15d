"""`make soak [MINUTES=30 | HOURS=n]`: pods under mixed load on a private PostgreSQL, one of them killed each minute.

A line each ten seconds tells how it goes. At the end there is a verdict: every run ended as it had to, the history that
the database's triggers kept and the side log of executions show nothing that must not be, and memory, connections, dead
tuples and table sizes are flat: the last third of the time is compared with the middle one (from ten minutes on). Exit
code 0 if all of that is so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import soak_app
from benchmarks.processes import resident
from benchmarks.soak_witness import Witness
from perdure import Client, Settings
from perdure.storage.connect import migrate
from tests.harness.audit import install_audit_now
from tests.harness.pods import Pod, Pods
from tests.harness.postgres import PrivatePostgres

PODS = 3
KILL_EVERY = 60.0
SAMPLE_EVERY = 10.0
SWEEP_EVERY = 30.0
FINISHED_TTL = 60
JUDGED_FROM = 10.0
"""Minutes: a shorter soak has no middle to compare its end with."""
LAST_RUNS = 120.0
"""Seconds that runs may take to end after the last was started."""


@dataclass(frozen=True, slots=True)
class Sample:
    """memory: bytes of the pod that is never killed. tables: bytes without the audit's. dead: tuples."""

    at: float
    memory: int
    connections: int
    dead: int
    tables: int


@dataclass
class Load:
    """Keeps ``most`` runs in flight, started at about ``rate`` a second.

    wrong: what ended otherwise than it had to."""

    client: Client
    most: int
    rate: float
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    in_flight: int = 0
    started: int = 0

    async def run(self, until: float) -> None:
        """Start until that moment of the monotonic clock, then wait for all."""
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until:
                if self.in_flight < self.most:
                    self.started += 1
                    self.in_flight += 1
                    tasks.create_task(self._one(self.started))
                await asyncio.sleep(random.expovariate(self.rate))

    async def _one(self, number: int) -> None:
        kind, drive = random.choice(list(soak_app.KINDS.items()))
        run_id = f"{kind}-{number:07}"
        try:
            async with asyncio.timeout(LAST_RUNS + 60):
                fault = await drive(self.client, run_id)
            if fault is not None:
                self.wrong.append(f"{run_id}: {fault}")
        except Exception as error:
            self.wrong.append(f"{run_id}: {type(error).__name__}: {error}")
        finally:
            self.in_flight -= 1
            self.ended[kind] += 1


async def soak(
    server: PrivatePostgres, folder: Path, *, minutes: float, most: int, rate: float
) -> list[str]:
    """What was wrong; nothing, if all was well."""
    url = server.url(server.create_database())
    migrate(Settings(db=url).database())
    install_audit_now(url)
    side_log = folder / "side.log"
    env = {
        "PERDURE_PARK_AFTER": "1",
        "PERDURE_FINISHED_TTL": str(FINISHED_TTL),
        "PERDURE_LOG_LEVEL": "warning",
    }
    began = time.monotonic()
    end = began + 60 * minutes
    samples: list[Sample] = []
    with Pods("benchmarks.soak_app:app", url, folder, env=env, side_log=side_log) as pods:
        await asyncio.gather(*(pods.ready() for _ in range(PODS)))
        witness = await Witness(url, side_log, lambda: pods.faults, soak_app.is_tried_again).open()
        async with Client(Settings(db=url), workflows=soak_app.WORKFLOWS) as client:
            load = Load(client, most, rate)
            beside = [
                asyncio.create_task(_killing(pods, end)),
                asyncio.create_task(_sampling(url, pods.all[0], began, samples, load, pods)),
                asyncio.create_task(_sweeping(witness)),
            ]
            await load.run(end)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        for pod in pods.all:
            if pod.alive:
                pod.terminate()
                await pod.wait_end()
        await witness.sweep(last=True)
        await witness.close()
    print(
        f"{sum(load.ended.values())} runs: {dict(sorted(load.ended.items()))}; kills: {len(pods.faults)}"
    )
    print(
        f"checked: {witness.runs} runs, {witness.rows} lines of history, {witness.executions} executions"
    )
    wrong = load.wrong + witness.violations
    if witness.runs != load.started:
        wrong.append(f"{load.started} runs were started, the history has the end of {witness.runs}")
    return wrong + (not_flat(samples) if minutes >= JUDGED_FROM else [])


async def _killing(pods: Pods, end: float) -> None:
    """Each minute one pod, never the first; another takes its place."""
    while time.monotonic() + KILL_EVERY / 2 < end:
        await asyncio.sleep(min(KILL_EVERY, max(5.0, (end - time.monotonic()) / 3)))
        pod = random.choice([pod for pod in pods.all[1:] if pod.alive])
        await asyncio.to_thread(pod.kill)
        await pods.ready()


async def _sweeping(witness: Witness) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY)
        await witness.sweep()


async def _sampling(
    url: str, pod: Pod, began: float, samples: list[Sample], load: Load, pods: Pods
) -> None:
    connection = await asyncpg.connect(url)
    before = 0
    try:
        while True:
            await asyncio.sleep(SAMPLE_EVERY)
            sample = await _sample(connection, pod, time.monotonic() - began)
            samples.append(sample)
            ended = sum(load.ended.values())
            print(
                f"{sample.at / 60:6.1f} min  runs {ended} (+{ended - before})  in flight {load.in_flight}  "
                f"kills {len(pods.faults)}  memory {sample.memory / 2**20:.1f} MiB  "
                f"connections {sample.connections}  dead tuples {sample.dead}  "
                f"tables {sample.tables / 2**20:.1f} MiB  wrong {len(load.wrong)}",
                flush=True,
            )
            before = ended
    finally:
        connection.terminate()


async def _sample(connection: asyncpg.Connection, pod: Pod, at: float) -> Sample:
    row = await connection.fetchrow(
        "select (select count(*) from pg_stat_activity where datname = current_database()) as connections,"
        " sum(n_dead_tup)::bigint as dead, sum(pg_total_relation_size(relid))::bigint as tables"
        " from pg_stat_user_tables where relname like 'perdure%'"
    )
    assert row is not None
    memory = resident(pod.pid) if pod.alive else 0
    return Sample(at, memory, row["connections"], row["dead"], row["tables"])


def not_flat(samples: Sequence[Sample]) -> list[str]:
    """What has grown from the middle third of the time to the last, beyond a tenth and a little that may vary."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    slack = {"memory": 8 * 2**20, "connections": 10, "dead": 5_000, "tables": 4 * 2**20}
    found = []
    for name, room in slack.items():
        before = statistics.median(getattr(sample, name) for sample in middle)
        after = statistics.median(getattr(sample, name) for sample in last)
        if after > 1.1 * before + room:
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    hours, given = os.environ.get("HOURS"), os.environ.get("MINUTES")
    default = 60 * float(hours) if hours else float(given or 30)
    parser.add_argument("--minutes", type=float, default=default)
    parser.add_argument("--in-flight", type=int, default=60)
    parser.add_argument("--rate", type=float, default=10.0, help="runs started a second")
    options = parser.parse_args(arguments)
    with PrivatePostgres(durable=True) as server, tempfile.TemporaryDirectory() as folder:
        wrong = asyncio.run(
            soak(
                server,
                Path(folder),
                minutes=options.minutes,
                most=options.in_flight,
                rate=options.rate,
            )
        )
    for line in wrong[:50]:
        print(f"wrong: {line}")
    print(f"verdict: {'all well' if not wrong else f'{len(wrong)} things are wrong'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
