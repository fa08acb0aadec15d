"""`python -m benchmarks.telemetry [--runs N] [--rounds N]`: CPU a step costs without and with OpenTelemetry.

One runner after the other on one private PostgreSQL, in turn: untraced, traced by the SDK with a batch processor whose
exporter throws spans away. JSON lines: µs of this process's CPU per step of a ten-step run, the client's part included;
load is the machine's while that was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measures import throughput
from benchmarks.workflows import ten
from perdure import App
from perdure.runtime.logs import configure_logs
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.runtime.telemetry import Telemetry
from perdure.runtime.telemetry.tracing import Tracing
from perdure.storage.connect import migrate
from tests.harness.postgres import PrivatePostgres


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


async def cpu_per_step(server: PrivatePostgres, telemetry: Telemetry, runs: int) -> float:
    url = server.url(await asyncio.to_thread(server.create_database))
    await asyncio.to_thread(migrate, Settings(db=url).database())
    settings = Settings(db=url, runner_port=0)
    runner = Runner(App("bench", workflows=[ten]), settings, telemetry=telemetry)
    await runner.start()
    try:
        await throughput(runner, ten, 50)
        _, cpu = await throughput(runner, ten, runs)
    finally:
        await runner.stop()
    return cpu / runs / 10 * 1e6


async def main(runs: int, rounds: int) -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    found: dict[str, list[float]] = {"untraced": [], "traced": []}
    with PrivatePostgres(durable=True) as server:
        for _ in range(rounds):
            found["untraced"].append(await cpu_per_step(server, Telemetry(), runs))
            traced = Telemetry(tracing=Tracing(provider))
            found["traced"].append(await cpu_per_step(server, traced, runs))
    for name, values in found.items():
        line = {
            "bench": "cpu per step",
            "telemetry": name,
            "median_us": round(statistics.median(values), 1),
            "all_us": [round(value, 1) for value in values],
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    configure_logs(level="warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(main(options.runs, options.rounds))
