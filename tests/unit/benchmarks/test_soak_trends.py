"""What grows is told from what goes up and down."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from benchmarks.soak_trends import (
    AGE,
    MIB,
    PER_HOUR,
    Sample,
    Trend,
    slope,
    too_large,
    trends,
    young,
)

MINUTES = 30
EVERY = 10.0
KILL = 60.0


def quiet(at: float) -> Sample:
    """What a soak looks like in which nothing grows: everything varies, and dead tuples go up until a vacuum."""
    draw = random.Random(at)
    pods = {"pod-1": 70 * MIB + draw.randrange(MIB)}
    for number in range(int(at // KILL) - 1, int(at // KILL) + 1):
        if number >= 0:
            age = at - number * KILL
            pods[f"pod-{number + 2}"] = 60 * MIB + int(min(1.0, age / 30) * 8 * MIB)
            pods[f"pod-{number + 2}"] += draw.randrange(MIB)
    return Sample(
        at=at,
        pods=pods,
        connections=30 + draw.randrange(4),
        dead=int(3_000 + 9_000 * math.modf(at / 61)[0]),
        tables=40 * MIB + draw.randrange(MIB),
    )


def series(change: Callable[[Sample], Sample] = lambda sample: sample) -> Sequence[Sample]:
    return [change(quiet(EVERY * n)) for n in range(1, int(MINUTES * 60 / EVERY))]


def growing(samples: Sequence[Sample]) -> list[str]:
    return [trend.name for trend in trends(samples) if not trend.flat]


def test_what_goes_up_and_down_is_flat() -> None:
    assert growing(series()) == []
    assert too_large(series()) is None


def hours(sample: Sample) -> float:
    return sample.at / 3600


def with_pods(sample: Sample, change: Callable[[str, int], float]) -> Sample:
    pods = {name: int(change(name, size)) for name, size in sample.pods.items()}
    return Sample(sample.at, pods, sample.connections, sample.dead, sample.tables)


def born(name: str) -> float:
    return (int(name.partition("-")[2]) - 2) * KILL / 3600


GROWTH: dict[str, Callable[[Sample], Sample]] = {
    "memory of the oldest pod": lambda s: with_pods(
        s, lambda name, size: size + (12 * MIB * hours(s) if name == "pod-1" else 0)
    ),
    "memory of young pods": lambda s: with_pods(
        s, lambda name, size: size + (0 if name == "pod-1" else 12 * MIB * born(name))
    ),
    "connections": lambda s: Sample(
        s.at, s.pods, s.connections + int(10 * hours(s)), s.dead, s.tables
    ),
    "dead tuples": lambda s: Sample(
        s.at, s.pods, s.connections, s.dead + int(45_000 * hours(s)), s.tables
    ),
    "tables": lambda s: Sample(
        s.at, s.pods, s.connections, s.dead, s.tables + int(12 * MIB * hours(s))
    ),
}


@pytest.mark.parametrize("name", GROWTH)
def test_what_grows_half_as_fast_again_as_it_may_is_found(name: str) -> None:
    assert growing(series(GROWTH[name])) == [name]
    assert set(GROWTH) == set(PER_HOUR)


def test_one_peak_is_no_growth() -> None:
    def peak(sample: Sample) -> Sample:
        late = 1700 < sample.at < 1760
        return Sample(
            sample.at, sample.pods, sample.connections + 9 * late, sample.dead, sample.tables
        )

    assert growing(series(peak)) == []


def test_a_pod_that_grows_within_its_short_life_is_found() -> None:
    def leak(name: str, size: int) -> int:
        return size + (80 * MIB if name == "pod-9" else 0)

    found = too_large(series(lambda sample: with_pods(sample, leak)))
    assert found is not None
    assert found.startswith("pod-9 had ")


def test_young_pods_are_compared_at_one_age() -> None:
    points = young(series())
    assert len(points) == MINUTES - 1, "each but those that were there from the beginning"
    assert all(at % KILL <= AGE + EVERY for at, _ in points)


def test_too_few_points_are_not_flat() -> None:
    assert slope([(n, n) for n in range(4)]) is None
    assert not Trend("memory", 0.0, None, 1.0).flat


def test_a_slope_is_growth_an_hour() -> None:
    assert slope([(60.0 * n, 2.0 * n) for n in range(2000)]) == pytest.approx(120)
    assert slope([(60.0 * n, -2.0 * n) for n in range(20)]) == pytest.approx(-120)
