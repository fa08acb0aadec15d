"""What a soak samples while it goes on, and whether it grows: judged by its slope over time, not by its level.

The first third of the time is left out: caches fill, and the first ended runs have yet to be deleted. A slope is the
median of the slopes between all pairs of samples, which a single peak does not move.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 2**20
HOUR = 3600.0
MOST_POINTS = 300
AGE = 40.0
"""Seconds of life at which a young pod is compared with those before it: shorter than from kill to kill."""
TIMES, ROOM = 1.25, 8 * MIB
"""What any pod may have: so many times the memory of the one that is never killed, and so much more."""

PER_HOUR = {
    "memory of the oldest pod": 8 * MIB,
    "memory of young pods": 8 * MIB,
    "connections": 6,
    "dead tuples": 30_000,
    "tables": 8 * MIB,
}
"""The most that each may grow. With ten runs a second on three pods and a kill a minute that is: 700 bytes of a pod's
memory for each run it executes; an eighth of a MiB from one young pod to the next; a connection for each tenth kill; a
twelfth of the row versions that die; and a sixteenth of the rows that are written."""


@dataclass(frozen=True, slots=True)
class Sample:
    """pods: bytes of each by its name, in the order of their start. dead: tuples. tables: bytes, the audit's left out.

    at: seconds since the soak began."""

    at: float
    pods: Mapping[str, int]
    connections: int
    dead: int
    tables: int


@dataclass(frozen=True, slots=True)
class Trend:
    """level: its median. per_hour: how much it grows. limit: the most that may be. None: too few points to tell."""

    name: str
    level: float
    per_hour: float | None
    limit: float

    @property
    def flat(self) -> bool:
        return self.per_hour is not None and self.per_hour <= self.limit

    def __str__(self) -> str:
        unit, size = (" MiB", MIB) if self.limit >= MIB else ("", 1)
        if self.per_hour is None:
            return f"{self.name}: too few points"
        return (
            f"{self.name} {self.level / size:,.1f}{unit} ({self.per_hour / size:+,.1f} an hour,"
            f" at most {self.limit / size:+,.0f})"
        )


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of what :data:`PER_HOUR` names."""
    later = [sample for sample in samples if sample.at >= samples[-1].at / 3]
    series: dict[str, Sequence[tuple[float, float]]] = {
        "memory of the oldest pod": oldest(later),
        "memory of young pods": [each for each in young(samples) if each[0] >= later[0].at],
        "connections": [(sample.at, sample.connections) for sample in later],
        "dead tuples": [(sample.at, sample.dead) for sample in later],
        "tables": [(sample.at, sample.tables) for sample in later],
    }
    return [
        Trend(name, level(points), slope(points), PER_HOUR[name]) for name, points in series.items()
    ]


def too_large(samples: Sequence[Sample]) -> str | None:
    """A pod of any age far larger than the one that is never killed, if there is one."""
    bound = TIMES * level(oldest(samples)) + ROOM
    size, name = max((size, name) for sample in samples for name, size in sample.pods.items())
    if size <= bound:
        return None
    return f"{name} had {size / MIB:.1f} MiB, more than {bound / MIB:.1f}"


def oldest(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """(moment, bytes) of the pod that was there first."""
    name = next(iter(samples[0].pods))
    return [(sample.at, sample.pods[name]) for sample in samples if name in sample.pods]


def young(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """(moment, bytes) of each pod when it was :data:`AGE` old; without those that were there from the beginning."""
    born: dict[str, float] = {}
    points: dict[str, tuple[float, float]] = {}
    for sample in samples:
        for name, size in sample.pods.items():
            if sample.at - born.setdefault(name, sample.at) >= AGE:
                points.setdefault(name, (sample.at, size))
    return [point for name, point in points.items() if name not in samples[0].pods]


def level(points: Sequence[tuple[float, float]]) -> float:
    return statistics.median(value for _, value in points) if points else 0.0


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Growth an hour. None with fewer than five points."""
    if len(points) < 5:
        return None
    size = -(-len(points) // MOST_POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    thinned = [(statistics.fmean(at for at, _ in part), level(part)) for part in parts]
    pairs = itertools.combinations(thinned, 2)
    return HOUR * statistics.median(
        (after - before) / (end - start) for (start, before), (end, after) in pairs if end > start
    )
