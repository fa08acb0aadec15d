"""`python -m benchmarks [--strict] [--peers FOLDER]`: speed of perdure on a private server of this machine.

JSON lines: bench, metric, value, unit, lowest, highest; where there is a limit ratio, lowest_ratio and highest_ratio;
where there is a goal goal, of (the value or the ratio), met and met_in. Every figure is the median of the rounds,
lowest and highest are those of single rounds, and a ratio is to the limit of the same round: the rate at which 50
asyncpg connections commit one-row inserts on the same server (for start_many, bare inserts of the same rows). The line
before the last tells about the machine, the last one which goals were missed. Progress is told on standard error. The
client is in the pod's process, fsync is on, no audit triggers are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import measures
from benchmarks.figures import Table, lines, missed, spread
from benchmarks.peers import Harness
from benchmarks.rounds import Round, empty_table
from perdure.runtime.logs import configure_logs
from tests.harness.postgres import PrivatePostgres


async def measure(options: argparse.Namespace) -> Table:
    """Print the figures, and return them."""
    table, left_out = empty_table(), {}
    load = os.getloadavg()[0]
    with PrivatePostgres(durable=True) as server, scratch() as folder:
        (version,) = await server.query("show server_version")
        harness = Harness(options.peers, folder, server.port) if options.peers else None
        peers = await harness.prepare() if harness else []
        for number in range(1, options.rounds + 1):
            name = f"round {number} of {options.rounds}"
            part = Round(server, table, options.runs, options.seconds, name)
            await part.perdure()
            if harness:
                await part.peers(harness, peers)
                left_out = harness.left_out
        if measures.trace_everything():
            for number in range(1, options.rounds + 1):
                name = f"round {number} of {options.rounds}"
                await Round(server, table, options.runs, options.seconds, name).traced()
    about = {
        "noise of the limit": round(spread(table["limit", "one-row commits"].values), 3),
        "load before": round(load, 2),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "postgresql": version[0].split()[0],
    }
    if options.peers:
        about["left out"] = left_out
    for line in lines(table, about):
        print(line, flush=True)
    return table


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Where a harness of other systems installs them: PEERS_DIR, which is kept, or a folder for this time."""
    given = os.environ.get("PEERS_DIR")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="perdure-peers-") as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--runs", type=int, default=4000, help="of one step, at once (4000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of two processes (8)")
    parser.add_argument("--peers", type=Path, help="a folder with a harness of other systems")
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 if a median misses its goal"
    )
    options = parser.parse_args(arguments)
    options.peers = options.peers and options.peers.resolve()
    if options.peers and not (options.peers / "run.sh").is_file():
        parser.error(f"--peers {options.peers}: there is no run.sh in it")
    configure_logs(format="console", level="error")
    os.chdir(tempfile.gettempdir())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        table = loop.run(measure(options))
    return 1 if options.strict and missed(table) else 0


if __name__ == "__main__":
    sys.exit(main())
