"""One of several pods of a benchmark: `python -m benchmarks.worker URL SECONDS`.

Says "ready" when it holds its share of the shards and has warmed up, waits for a line, starts ten-step runs for so long
with 50 in flight, says {"runs": those that ended in time, "cpu": seconds it used}, and stops when its standard input is
closed.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from benchmarks.measures import runner_on, throughput, throughput_for
from benchmarks.workflows import ten
from perdure.runtime.cli.pods import calm_collector
from perdure.runtime.logs import configure_logs
from tests.harness.waiting import until

SHARE = 128
"""Of 256 shards, with two pods."""
WARM_UP = 200


async def work(url: str, seconds: float) -> None:
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
        await throughput(runner, ten, WARM_UP)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        runs, cpu = await throughput_for(runner, ten, seconds)
        print(json.dumps({"runs": runs, "cpu": cpu}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.stop()


if __name__ == "__main__":
    configure_logs(format="console", level="error")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(work(sys.argv[1], float(sys.argv[2])))
