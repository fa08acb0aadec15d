"""`make soak [MINUTES=30 | HOURS=n]`: pods under mixed load on a private PostgreSQL, one of them killed each minute.

A line each ten seconds tells how it goes. At the end there is a verdict: every run ended as it had to, the history that
the database's triggers kept and the side log of executions show nothing that must not be, one pod was killed each
minute and none ended by itself, and memory, connections, dead tuples and table sizes do not grow (see `soak_trends`;
from twenty minutes on). What kills, samples and checks is part of it: when one of them fails, the soak ends and has
failed. Exit code 0 if all was well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import asyncpg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import soak_app
from benchmarks.processes import resident
from benchmarks.soak_trends import MIB, Sample, Trend, oldest, too_large, trends
from benchmarks.soak_witness import Witness
from perdure import Client, Settings
from perdure.storage.connect import migrate
from tests.harness.audit import install_audit_now
from tests.harness.pods import PodEndedError, Pods
from tests.harness.postgres import PrivatePostgres

PODS = 3
KILL_EVERY = 60.0
SAMPLE_EVERY = 10.0
SWEEP_EVERY = 30.0
FINISHED_TTL = 60
JUDGED_FROM = 20.0
"""Minutes: over a shorter time what goes up and down looks like growth."""
LAST_RUNS = 120.0
"""Seconds that runs may take to end after the last was started."""


@dataclass
class Load:
    """Keeps ``most`` runs in flight, started at about ``rate`` a second.

    wrong: what ended otherwise than it had to. enough: start no more, and all beside it may end."""

    client: Client
    most: int
    rate: float
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    in_flight: int = 0
    started: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, until: float) -> None:
        """Start until that moment of the monotonic clock, then wait for all."""
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until and not self.enough.is_set():
                if self.in_flight < self.most:
                    self.started += 1
                    self.in_flight += 1
                    tasks.create_task(self._one(self.started))
                await asyncio.sleep(random.expovariate(self.rate))

    async def rest(self, seconds: float) -> bool:
        """Wait so long, or until it is enough; whether there is more to come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.enough.wait()
        return not self.enough.is_set()

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


@dataclass
class Verdict:
    """wrong: sentences; none, if all was well. figures: what else there is to tell."""

    wrong: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    trends: list[Trend] = field(default_factory=list)

    def __str__(self) -> str:
        how = f"{len(self.wrong)} things are wrong" if self.wrong else "all well"
        return "; ".join([f"verdict: {how}", *self.figures, *map(str, self.trends)])


async def soak(
    server: PrivatePostgres, folder: Path, samples: list[Sample], options: argparse.Namespace
) -> Verdict:
    """samples: where to put them."""
    url = server.url(server.create_database())
    migrate(Settings(db=url).database())
    install_audit_now(url)
    side_log = folder / "side.log"
    env = {
        "PERDURE_PARK_AFTER": "1",
        "PERDURE_FINISHED_TTL": str(FINISHED_TTL),
        "PERDURE_LOG_LEVEL": "warning",
    }
    verdict = Verdict()
    with Pods("benchmarks.soak_app:app", url, folder, env=env, side_log=side_log) as pods:
        await asyncio.gather(*(pods.ready() for _ in range(PODS)))
        witness = await Witness(url, side_log, lambda: pods.faults, soak_app.is_tried_again).open()
        began = time.monotonic()
        end = began + 60 * options.minutes
        async with Client(Settings(db=url), workflows=soak_app.WORKFLOWS) as client:
            load = Load(client, options.in_flight, options.rate)
            beside = [
                asyncio.create_task(_killing(pods, began, end, load), name="killing"),
                asyncio.create_task(
                    _sampling(url, began, samples, load, pods, witness), name="sampling"
                ),
                asyncio.create_task(_sweeping(witness, load), name="checking"),
            ]
            verdict.wrong += await with_helpers(load, end, beside)
        verdict.wrong += [*load.wrong, *await _stopped(pods)]
        await witness.sweep(last=True)
        await witness.close()
    ended = dict(sorted(load.ended.items()))
    print(f"runs: {ended}")
    print(f"checked: {witness.rows} lines of history, {witness.executions} executions")
    verdict.wrong += witness.violations + too_few_kills(len(pods.faults), options.minutes)
    if witness.runs != load.started:
        verdict.wrong.append(
            f"{load.started} runs were started, the history has the end of {witness.runs}"
        )
    verdict.figures += [f"{witness.runs} runs", f"{len(pods.faults)} kills"]
    if options.minutes >= JUDGED_FROM and samples:
        _judge(samples, verdict)
    else:
        verdict.figures.append(f"growth is judged from {JUDGED_FROM:.0f} minutes on")
    return verdict


async def with_helpers(load: Load, end: float, beside: Sequence[asyncio.Task[None]]) -> list[str]:
    """Drive the load until its end, or until one of those beside it fails. What failed."""
    driving = asyncio.create_task(load.run(end), name="driving")
    waiting: set[asyncio.Task[None]] = {driving, *beside}
    while not driving.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() for task in done):
            break
    load.enough.set()
    tasks = (driving, *beside)
    _, late = await asyncio.wait(tasks, timeout=LAST_RUNS + 90)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [f"{task.get_name()} did not end" for task in tasks if task.cancelled()] + [
        f"{task.get_name()} ended: {task.exception()!r}"
        for task in tasks
        if not task.cancelled() and task.exception()
    ]


async def _stopped(pods: Pods) -> list[str]:
    """Stop all that live. What ended by itself, or not well."""
    wrong = []
    for pod in pods.all:
        if pod.alive:
            pod.terminate()
            code = await pod.wait_end()
        elif pod.faults:
            continue
        else:
            code = int(pod.process.returncode)
        if code != 0:
            wrong.append(f"{pod.name} ended with code {code}: {pod.log[-500:]}")
    return wrong


def too_few_kills(kills: int, minutes: float) -> list[str]:
    """One a minute, none in the last half; a new pod that was late to be ready may have cost some."""
    least = int(0.9 * (minutes - 1)) if minutes >= 3 else 1
    return [] if kills >= least else [f"{kills} pods were killed, not {least}"]


def _judge(samples: Sequence[Sample], verdict: Verdict) -> None:
    verdict.trends = trends(samples)
    verdict.wrong += [f"it grows: {trend}" for trend in verdict.trends if not trend.flat]
    largest = too_large(samples)
    verdict.wrong += [largest] if largest else []


async def _killing(pods: Pods, began: float, end: float, load: Load) -> None:
    """Each minute one pod, never the first; another takes its place."""
    every = min(KILL_EVERY, (end - began) / 3)
    due = began + every
    while due + every / 2 < end and await load.rest(due - time.monotonic()):
        pod = random.choice([pod for pod in pods.all[1:] if pod.alive])
        pod.kill()  # at once and within this turn: nobody sees it dead and does not know why
        await pods.ready()
        due = max(due + every, time.monotonic())


async def _sweeping(witness: Witness, load: Load) -> None:
    while await load.rest(SWEEP_EVERY):
        await witness.sweep()


async def _sampling(
    url: str, began: float, samples: list[Sample], load: Load, pods: Pods, witness: Witness
) -> None:
    connection = await asyncpg.connect(url, command_timeout=60)
    before = 0
    try:
        while await load.rest(SAMPLE_EVERY):
            sample = await _sample(connection, pods, time.monotonic() - began)
            samples.append(sample)
            ended = sum(load.ended.values())
            (_, memory), *_ = oldest([sample])
            print(
                f"{sample.at / 60:6.1f} min  runs {ended} (+{ended - before})  in flight {load.in_flight}  "
                f"kills {len(pods.faults)}  memory {memory / MIB:.1f} "
                f"(most {max(sample.pods.values()) / MIB:.1f}) MiB  "
                f"connections {sample.connections}  dead tuples {sample.dead}  "
                f"tables {sample.tables / MIB:.1f} MiB  "
                f"wrong {len(load.wrong) + len(witness.violations)}",
                flush=True,
            )
            before = ended
    finally:
        connection.terminate()


async def _sample(connection: asyncpg.Connection, pods: Pods, at: float) -> Sample:
    row = await connection.fetchrow(
        "select (select count(*) from pg_stat_activity where datname = current_database()) as connections,"
        " sum(n_dead_tup)::bigint as dead, sum(pg_total_relation_size(relid))::bigint as tables"
        " from pg_stat_user_tables where relname like 'perdure%'"
    )
    assert row is not None
    memory = {}
    for pod in pods.all:
        if not pod.alive:
            if not pod.faults:
                raise PodEndedError(f"pod {pod.name} ended by itself:\n{pod.log[-2000:]}")
            continue
        with suppress(OSError, KeyError):  # it is killed at this moment
            memory[pod.name] = resident(pod.pid)
    return Sample(at, memory, row["connections"], row["dead"], row["tables"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    hours, given = os.environ.get("HOURS"), os.environ.get("MINUTES")
    default = 60 * float(hours) if hours else float(given or 30)
    parser.add_argument("--minutes", type=float, default=default)
    parser.add_argument("--in-flight", type=int, default=60)
    parser.add_argument("--rate", type=float, default=10.0, help="runs started a second")
    parser.add_argument("--samples", type=Path, help="a file for them, a JSON line each")
    options = parser.parse_args(arguments)
    samples: list[Sample] = []
    with PrivatePostgres(durable=True) as server, tempfile.TemporaryDirectory() as folder:
        verdict = asyncio.run(soak(server, Path(folder), samples, options))
    if options.samples:
        options.samples.write_text("".join(json.dumps(asdict(each)) + "\n" for each in samples))
    for line in verdict.wrong[:50]:
        print(f"wrong: {line}")
    print(verdict)
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
