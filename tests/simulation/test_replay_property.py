"""Replay is exact: random bodies, random delays, a kill after any entry, and a second life (R4, R13, R14)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.body.bodies import (
    COMMITS,
    SENT_AT,
    SENT_NAMES,
    SLICES,
    WHENS,
    BigProgram,
    Delays,
    Program,
    check,
    check_seeded,
    guarded,
)
from tests.unit.body.driving import Sent

pytestmark = pytest.mark.req("WF5", "WF6", "WF7", "WF17")

ROOT = Path(__file__).parents[2]

SECONDS = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 5.0])
NAMES = st.sampled_from(["a", "b"])
MODES = st.sampled_from(["ok", "ok", "ok", "ok", "fail", "stubborn", "flaky"])
TIMEOUTS = st.sampled_from([None, 1.0, 2.0])


def _leaves() -> st.SearchStrategy[Program]:
    steps = st.tuples(st.just("step"), NAMES, SECONDS, MODES)
    return st.one_of(
        steps,
        steps,
        st.tuples(st.just("sleep"), SECONDS),
        st.tuples(st.just("nap"), SECONDS),
        st.tuples(st.just("signal"), NAMES, st.sampled_from([None, 0.0, 2.0])),
        st.just(("fail",)),
        st.tuples(st.just("spin"), st.integers(1, 4)),
    )


def _constructs(inner: st.SearchStrategy[Program]) -> st.SearchStrategy[Program]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("seq"), several),
        st.tuples(st.just("loop"), st.integers(1, 3), inner),
        st.tuples(st.just("gather"), several, st.booleans()),
        st.tuples(st.just("group"), several),
        st.tuples(st.just("race"), several, st.sampled_from(WHENS), TIMEOUTS, st.booleans()),
        st.tuples(st.just("first"), several, TIMEOUTS),
        st.tuples(st.just("timeout"), SECONDS, inner),
        st.tuples(st.just("wait_for"), SECONDS, inner),
        st.tuples(st.just("shield"), SECONDS, inner),
        st.tuples(st.just("attempt"), inner, inner, inner),
        st.tuples(st.just("semaphore"), st.integers(1, 2), several),
        st.tuples(st.just("queue"), several),
        st.tuples(st.just("generator"), several, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("forget"), inner),
    )


PROGRAMS = st.one_of(
    st.recursive(_leaves(), _constructs, max_leaves=14),
    st.integers(0, 2**40).map(lambda seed: BigProgram(seed).make()),
).map(lambda program: ("seq", [guarded(program), ("step", "last", 1.0, "ok")]))
MESSAGES = st.lists(
    st.builds(Sent, st.sampled_from(SENT_AT), st.sampled_from(SENT_NAMES)), max_size=5
)
DELAYS = st.tuples(st.integers(0, 9), st.sampled_from(SLICES), st.sampled_from(COMMITS))
CUTS = st.lists(st.floats(0, 1), min_size=1, max_size=2)


def property_test(examples: int) -> Callable[[], None]:
    """The property, ready to be called."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(PROGRAMS, MESSAGES, DELAYS, DELAYS, CUTS)
    def holds(
        program: Program, sent: list[Sent], first: Delays, second: Delays, cuts: list[float]
    ) -> None:
        check(program, sent, first, second, cuts)

    return holds


def test_replay_of_drawn_bodies() -> None:
    property_test(300)()


def test_replay_of_big_bodies() -> None:
    seen = check_seeded(range(200))
    assert all(seen.values()), f"something was never tried: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replay_of_thousands_of_drawn_bodies() -> None:
    property_test(2500)()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replay_of_thousands_of_big_bodies() -> None:
    check_seeded(range(1000, 3500))


def interpreter(version: str) -> str | None:
    """Another Python of that version on this machine."""
    names = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = [str(name) for name in names] + [
        name for name in (shutil.which(f"python{version}"),) if name
    ]
    for name in found:
        probe = [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return name
    return None


def run_elsewhere(version: str, count: int, timeout: float) -> str:
    """The property under another Python, in a process of its own. Skips where there is none."""
    here = ".".join(map(str, sys.version_info[:2]))
    if version == here:
        pytest.skip(f"not applicable: this is Python {version}, the tests above ran on it")
    python = interpreter(version)
    if python is None:
        pytest.skip(
            f"no Python {version} on this machine (looked in ~/.pyenv/versions and on the PATH)"
        )
    answer = subprocess.run(
        [python, "-W", "ignore", str(ROOT / "tests/unit/body/elsewhere.py"), str(count)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_replay_on_other_pythons(version: str) -> None:
    assert f"Python {version}" in run_elsewhere(version, 25, 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_replay_of_many_bodies_on_other_pythons(version: str) -> None:
    assert f"Python {version}" in run_elsewhere(version, 1500, 1700)
