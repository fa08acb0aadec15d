"""One of several pods of a benchmark: `python -m benchmarks.worker URL RUNS`.

Says "ready" when it holds its share of the shards, waits for a line, starts so many ten-step runs with 50 in flight,
says {"runs": …} when all have ended, and stops when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from benchmarks.measures import runner_on, throughput
from benchmarks.workflows import ten
from perdure.runtime.cli.pods import calm_collector
from perdure.runtime.logs import configure_logs
from tests.harness.waiting import until

SHARE = 128
"""Of 256 shards, with two pods."""


async def work(url: str, runs: int) -> None:
    runner = runner_on(url)
    await runner.start()
    try:
        session = runner.session
        await until(
            lambda: len(session.ownership.holds) == SHARE and not session.engine.looking,
            what="half of the shards",
            deadline=30,
        )
        calm_collector()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await throughput(runner, ten, runs)
        print(json.dumps({"runs": runs}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.stop()


if __name__ == "__main__":
    configure_logs(format="console", level="error")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(work(sys.argv[1], int(sys.argv[2])))
