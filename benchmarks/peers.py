"""Other systems in the same run, by a harness that is not part of this project.

A harness is a folder with ``run.sh NAME WORKLOAD…`` that appends JSON lines to the file named by ``PEERS_OUT``, with
``peer``, ``workload`` ("w1": one step, "w2": ten steps), ``per_second`` (runs), and ``failed``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

NAMES = ("dbos", "restate")
STEPS = {"w1": 1, "w2": 10}
PATIENCE = 1800.0
"""Seconds for one system, its installation included."""


async def measure(folder: Path, rounds: int) -> dict[tuple[str, str], list[float]]:
    """(system, "runs" of one step or "steps" of ten) → values a second. What cannot be measured here is left out, and
    said on standard error."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in NAMES:
        found = await _run(folder, name, rounds)
        for line in found:
            steps = STEPS.get(line.get("workload", ""))
            if steps is None or line.get("failed") or "per_second" not in line:
                continue
            metric = "runs" if steps == 1 else "steps"
            values[name, metric].append(float(line["per_second"]) * steps)
    return values


async def _run(folder: Path, name: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out:
        environment = {**os.environ, "PEERS_OUT": out.name, "PEERS_RUNS": str(rounds)}
        try:
            process = await asyncio.create_subprocess_exec(
                "bash",
                str(folder / "run.sh"),
                name,
                *STEPS,
                env=environment,
                stdout=asyncio.subprocess.DEVNULL,
            )
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        except (OSError, TimeoutError) as error:
            print_missing(name, repr(error))
        lines = [json.loads(line) for line in out if line.strip()]
    if not any(line.get("workload") in STEPS and not line.get("failed") for line in lines):
        print_missing(name, f"{folder / 'run.sh'} {name} measured nothing")
    return lines


def print_missing(name: str, why: str) -> None:
    print(f"{name} is left out: {why}", file=sys.stderr, flush=True)
