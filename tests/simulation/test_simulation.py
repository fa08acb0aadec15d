"""The real runtime on a virtual clock under faults from a seed: many seeds, and the mistakes they must find.

A failing seed is repeated exactly by the command that its failure prints; without ``--quiet`` it tells the whole story.
``SIMULATED_SEEDS`` sets how many seeds are tried instead of 200.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.clock import SystemClock

from .guard import GUARD, guarded
from .loop import LANE, Lane, VirtualLoop
from .plants import PLANTS
from .simulate import bury, simulate

pytestmark = pytest.mark.req("CL4", "CL9", "CL11", "SL3", "WF5")

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("SIMULATED_SEEDS", "200"))
MANY = max(SEEDS, 1_000)
PROCESSES = 2

REACHED = {
    # What must have happened, so often in a thousand seeds; else they prove nothing about it.
    "crash": 500,
    "pause": 150,
    "block": 60,
    "cut": 150,
    "outage": 60,
    "drained": 100,
    "drain deadline": 5,
    "commits lost": 150,
    "database clock jumped": 60,
    "pod clock jumped": 30,
    "declared dead": 600,
    "twins": 30,
    "void": 30,
    "orphan re-claimed": 500,
    "own orphan re-claimed": 3,
    "suspect claimed": 500,
    "lent": 100,
    "written by other than the holder": 500,
    "displaced": 10,
    "birth asked": 500,
    "fenced": 60,
    "reload": 10,
    "park-refused": 100,
    "settled again": 300,
    "settled committed": 200,
    "settled parked": 20,
    "settled fenced": 3,
    "call ghost": 500,
    "call conflict": 500,
    "replayed": 1_500,
    "hint lost": 5_000,
    "hint late": 2_000,
    "hint doubled": 2_000,
    "mail found by a scan": 100,
    "write refused": 50,
    "batch halved": 5,
    "crash-looped": 30,
    "suspended": 200,
    "resumed": 200,
    "retried": 50,
    "client told UnknownOutcome": 10,
    "client told RunEnded": 100,
    "client told MailboxFull": 100,
}


def _run(first: int, end: int, *, plant: str | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.simulation", f"{first}:{end}", "--report"]
    if plant is not None:
        command += ["--plant", plant]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def _reports(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    reports = []
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, f"a simulating process ended with {process.returncode}"
        reports.append(json.loads(output))
    return reports


def _try(count: int) -> None:
    share = math.ceil(count / PROCESSES)
    bounds = [(n * share, min(count, (n + 1) * share)) for n in range(PROCESSES)]
    reports = _reports([_run(first, end) for first, end in bounds])
    failures = [failure for report in reports for failure in report["failures"]]
    seen: Counter[str] = Counter()
    for report in reports:
        seen.update(report["seen"])
    print(f"{count} seeds, {[round(r['cpu'], 3) for r in reports]} s of CPU each")
    assert not failures, "\n".join(
        f"{failure['command']}\n    " + "\n    ".join(failure["violations"]) for failure in failures
    )
    scale = count / 1_000
    missed = {
        name: (seen[name], floor)
        for name, floor in REACHED.items()
        if seen[name] < math.floor(floor * scale * (0.5 if count < 1_000 else 1.0))
    }
    assert not missed, f"(seen, wanted in a thousand seeds) of {count} seeds: {missed}"


# ---- seeds --------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_seeds() -> None:
    _try(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_many_seeds() -> None:
    _try(MANY)


# ---- mistakes -----------------------------------------------------------------------------------

QUICK = ("barrier", "guess")
"""Planted in the default tier, too."""


def _find(plant: str) -> None:
    """The first of a thousand seeds that finds it."""
    process = _run(0, MANY, plant=plant)
    [report] = _reports([process])
    assert report["failures"], f"{PLANTS[plant].what}: not found by {report['tried']} seeds"
    print(f"{plant}: found by seed {report['tried'] - 1}: {report['failures'][0]['violations'][0]}")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_mistake_can_still_be_planted(plant: str) -> None:
    """What it replaces is where it was; if not, plant it anew."""
    with PLANTS[plant].planted():
        pass


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", QUICK)
def test_a_planted_mistake_is_found_soon(plant: str) -> None:
    _find(plant)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", [name for name in PLANTS if name not in QUICK])
def test_a_planted_mistake_is_found(plant: str) -> None:
    _find(plant)


# ---- the simulation itself ----------------------------------------------------------------------


def test_a_seed_has_one_history() -> None:
    """In this process and in others that order their sets otherwise."""
    seed = 20
    digests = {simulate(seed).digest, simulate(seed).digest}
    bury()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        command = [sys.executable, "-m", "tests.simulation", str(seed), "--quiet"]
        told = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True
        )
        digests.add(told.stdout.split()[-1])
    assert len(digests) == 1


def test_real_time_is_out_of_reach_of_the_product() -> None:
    with guarded(time.perf_counter) as guard:
        with pytest.raises(BaseException, match=r"time\.time"):
            SystemClock().now()
        assert guard.touched == ["time.time"]
        assert time.time() > 0  # others may
    assert not GUARD.active
    assert SystemClock().now() > 0


def test_a_paused_lane_goes_on_where_it_was_and_a_dead_one_never() -> None:
    loop = VirtualLoop()  # type: ignore[abstract]
    lanes = {name: Lane(name) for name in ("paused", "dead", "free")}
    heard: list[tuple[str, float]] = []

    def tick(name: str) -> None:
        heard.append((name, loop.now - 1000.0))
        if loop.now < 1003.0:
            loop.call_later(1.0, tick, name)

    def begin(name: str) -> None:
        LANE.set(lanes[name])
        tick(name)

    async def main() -> None:
        for name in lanes:
            loop.create_task(_in(begin, name))
        await asyncio.sleep(0.5)
        loop.pause(lanes["paused"])
        lanes["dead"].dead = True
        await asyncio.sleep(2.0)
        loop.go_on(lanes["paused"])
        await asyncio.sleep(3.0)

    loop.run(main())
    assert [at for name, at in heard if name == "dead"] == [0.0]
    assert [at for name, at in heard if name == "free"] == [0.0, 1.0, 2.0, 3.0]
    assert [at for name, at in heard if name == "paused"] == [0.0, 2.5, 3.5]


async def _in(begin: Any, name: str) -> None:
    begin(name)
