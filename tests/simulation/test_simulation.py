"""The real runtime on a virtual clock under faults from a seed: many seeds, and the mistakes they must find.

A failing seed is repeated exactly by the command that its failure prints; without ``--quiet`` it tells the whole story.
``SIMULATED_SEEDS`` sets how many seeds are tried instead of 200, ``SIMULATED_PROCESSES`` in how many processes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from perdure.sharding import ownership
from perdure.storage.clock import SystemClock

from .guard import GUARD, guarded
from .loop import LANE, Lane, VirtualLoop
from .plants import PLANTS
from .simulate import Outcome, bury, simulate

pytestmark = pytest.mark.req("CL4", "CL9", "CL11", "SL3", "WF5")

ROOT = Path(__file__).parents[2]
SEEDS = int(os.environ.get("SIMULATED_SEEDS", "200"))
MANY = max(SEEDS, 1_000)
PROCESSES = int(os.environ.get("SIMULATED_PROCESSES", "2"))

REACHED = {
    # What must have happened, so often in a thousand seeds; else they prove nothing about it. About half of what does.
    "crash": 650,
    "pause": 190,
    "block": 100,
    "cut": 200,
    "outage": 90,
    "drained": 220,
    "grace over": 7,
    "commits lost": 140,
    "database clock jumped": 90,
    "pod clock jumped": 30,
    "declared dead": 750,
    "twins": 30,
    "void": 160,
    "gave up": 700,
    "orphan re-claimed": 1_200,
    "own orphan re-claimed": 4,
    "suspect claimed": 1_300,
    "strays marked": 120,
    "lent": 130,
    "lent run written": 380,
    "pinned": 650,
    "warm wake": 1_000,
    "warm and replayed all the same": 35,
    "journal goes on": 2_800,
    "displaced": 6,
    "birth asked": 600,
    "fenced": 60,
    "dead at commit": 3,
    "reload": 20,
    "park-refused": 200,
    "settled again": 400,
    "settled committed": 300,
    "settled parked": 60,
    "settled fenced": 4,
    "call ghost": 1_100,
    "call ghost committed": 900,
    "call lost-before": 1_100,
    "call lost-after": 1_200,
    "call conflict": 1_100,
    "call unavailable": 7_000,
    "call slow": 9_000,
    "replayed": 3_500,
    "hint lost": 17_000,
    "hint late": 8_000,
    "hint doubled": 9_000,
    "mail found by a scan": 200,
    "write refused": 450,
    "batch halved": 70,
    "answered in halves": 60,
    "crash-looped": 55,
    "suspended": 450,
    "resumed": 400,
    "retried": 230,
    "client told UnknownOutcome": 35,
    "client told RunEnded": 650,
    "client told MailboxFull": 450,
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
    wanted = _wanted(count)
    missed = {name: (seen[name], floor) for name, floor in wanted.items() if seen[name] < floor}
    assert not missed, f"(seen, wanted) of {count} seeds: {missed}"


def _wanted(count: int) -> dict[str, int]:
    """How often each must have happened in so many seeds. Of few seeds half the share is asked; what then comes to less
    than one is left to those who try more."""
    share = count / 1_000 * (0.5 if count < 1_000 else 1.0)
    floors = {name: math.floor(floor * share) for name, floor in REACHED.items()}
    return {name: floor for name, floor in floors.items() if floor}


# ---- seeds --------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_seeds() -> None:
    _try(SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(MANY)
def test_many_seeds() -> None:
    _try(MANY)


def test_a_thousand_seeds_are_asked_for_everything() -> None:
    assert _wanted(1_000) == REACHED
    assert all(floor > 0 for floor in _wanted(200).values())
    assert len(_wanted(200)) >= 0.9 * len(REACHED)


# ---- mistakes -----------------------------------------------------------------------------------

QUICK = ("barrier", "guess")
"""Planted in the default tier, too."""


def _find(plant: str) -> None:
    """The first of a thousand seeds that finds it."""
    process = _run(0, MANY, plant=plant)
    [report] = _reports([process])
    how = f"by {PLANTS[plant].finds}, {report['astray']} seeds broke otherwise"
    assert report["failures"], f"{PLANTS[plant].what}: not found by {report['tried']} seeds ({how})"
    print(f"{plant}: found by seed {report['tried'] - 1}: {report['failures'][0]['violations'][0]}")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_mistake_can_still_be_planted(plant: str) -> None:
    """What it replaces is where it was; if not, plant it anew."""
    with PLANTS[plant].planted():
        pass


def test_a_mistake_is_found_by_its_own_words_only() -> None:
    """One that breaks the simulation, or that the product itself complains of, is not found by that."""
    broken = [
        "the simulation broke off: something turns for ever",
        "the product logged 'engine.failed': {}",
    ]
    outcome = Outcome(1, broken, Counter({"commits lost": 1}), "", (), 1.0)
    assert [plant for plant in PLANTS if outcome.finding(plant)] == []


def test_a_mistake_may_need_a_fault_to_be_found() -> None:
    words = PLANTS["epoch-down"].finds[0]
    assert Outcome(1, [words], Counter({"commits lost": 1}), "", (), 1.0).finding("epoch-down")
    assert not Outcome(1, [words], Counter(), "", (), 1.0).finding("epoch-down")


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
    """In this process, whatever it has done before or does meanwhile, and in others that order their sets otherwise."""
    seed = 20
    digests = {simulate(seed).digest}
    with _much_else():
        digests.add(simulate(seed).digest)
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


@contextmanager
def _much_else() -> Iterator[None]:
    """A logger was first used while logs were cached, and another thread looks at the clocks."""
    kept, over = structlog.get_config(), threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            SystemClock().now()
            time.perf_counter()

    structlog.configure(
        processors=[lambda *_: "a line"],
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=True,
    )
    ownership.log.info("before")
    assert "bind" in vars(ownership.log)
    structlog.configure(**kept)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        del ownership.log.bind


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
