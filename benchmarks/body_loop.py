"""`python -m benchmarks.body_loop [--steps N] [--rounds N]`: what a body's loop costs, without engine and database.

JSON lines: bench, metric, value, unit, ratio_to_limit. Processor time of this process; steps end at the host loop's
next turn and every write is durable at once, so what is left is the body, its loop and one host callback per step.
The limit is 10,000 bare `asyncio` round trips (a host callback that sets a future a task waits for) in the same
round; every figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perdure.runtime.body import Body, Ending, StepCall
from perdure.storage.model import Entry, RunEvent

STARTED = time.time()

Main = Callable[[Body], Coroutine[Any, Any, Any]]


class Port:
    """An engine for which every step is done and every write durable at once."""

    def __init__(self, host: asyncio.AbstractEventLoop, journal: Sequence[Entry]) -> None:
        self.host = host
        self.entries = list(journal)
        self.over: asyncio.Future[Ending] = host.create_future()
        self.body: Body

    def recorded(self, entry: Entry, message_id: str | None) -> None:
        self.entries.append(entry)

    def event(self, event: RunEvent) -> None:
        return None

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        self.host.call_soon(self.step_ends, key)

    def step_ends(self, key: str) -> None:
        self.body.step_done(key, attempt=1, output="1", error=None, started_at=0.0)

    def abandon_step(self, key: str) -> None:
        return None

    def want_mail(self) -> None:
        self.body.mail([], time.time())

    def quiescent(self) -> None:
        self.body.committed(len(self.entries))

    def ended(self, ending: Ending) -> None:
        self.over.set_result(ending)


def call(name: str = "step") -> StepCall:
    return StepCall(name, "1", 1, lambda text: text, ValueError)


async def life(main: Main, journal: Sequence[Entry] = ()) -> tuple[float, list[Entry]]:
    """Seconds of processor time of one life, and its journal."""
    port = Port(asyncio.get_running_loop(), journal)
    port.body = Body(
        host=port.host,
        main=main,
        entered_at=STARTED,
        journal=journal,
        clock=time.time,
        port=port,
        name="bench",
    )
    gc.collect()
    before = time.process_time()
    port.body.begin()
    ending = await port.over
    spent = time.process_time() - before
    assert ending.kind == "returned", ending
    return spent, port.entries


async def bare(count: int) -> float:
    """Seconds of processor time of ``count`` futures set by a host callback."""
    host = asyncio.get_running_loop()
    before = time.process_time()
    for _ in range(count):
        future = host.create_future()
        host.call_soon(future.set_result, None)
        await future
    return time.process_time() - before


def bodies(steps: int) -> dict[str, Main]:
    async def sequence(body: Body) -> None:
        for _ in range(steps):
            await body.step(call())

    async def with_timeout(body: Body) -> None:
        for _ in range(steps):
            async with asyncio.timeout(60):
                await body.step(call())

    async def fan_out(body: Body) -> None:
        await asyncio.gather(*(body.step(call()) for _ in range(steps)))

    return {"sequence": sequence, "with_timeout": with_timeout, "fan_out": fan_out}


def measure(steps: int, rounds: int) -> None:
    figures: dict[str, list[float]] = {}
    limits = []
    for _ in range(rounds):
        limits.append(asyncio.run(bare(steps)) / steps)
        for name, main in bodies(steps).items():
            spent, journal = asyncio.run(life(main))
            figures.setdefault(f"{name}_live", []).append(spent / steps)
            spent, _ = asyncio.run(life(main, journal))
            figures.setdefault(f"{name}_replayed", []).append(spent / steps)
    limit = statistics.median(limits)
    for metric, values in figures.items():
        value = statistics.median(values)
        line = {
            "bench": "body_loop",
            "metric": metric,
            "value": round(value * 1e6, 1),
            "unit": "µs/step",
            "ratio_to_limit": round(value / limit, 2),
        }
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    measure(arguments.steps, arguments.rounds)
