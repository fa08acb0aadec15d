"""What the rounds of `python -m benchmarks` have measured, the goals for it, and how both are told."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should be. of: of the value itself, or of its ratio to the round's limit."""

    sign: Literal[">=", "<="]
    figure: float
    of: Literal["value", "ratio"]

    def met(self, found: float) -> bool:
        return found >= self.figure if self.sign == ">=" else found <= self.figure

    def __str__(self) -> str:
        return f"{self.sign} {self.figure:g}"


@dataclass
class Figures:
    """One metric: a value a round, and where there is something to divide it by, a ratio a round.

    digits: of the values printed."""

    unit: str
    goal: Goal | None = None
    digits: int = 2
    values: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def add(self, value: float, limit: float | None = None) -> None:
        self.values.append(value)
        if limit is not None:
            self.ratios.append(value / limit)

    @property
    def judged(self) -> Sequence[float]:
        """What the goal is for."""
        return self.ratios if self.goal is not None and self.goal.of == "ratio" else self.values

    @property
    def met(self) -> bool | None:
        """Whether the median meets the goal; None without a goal, or when nothing was measured."""
        if self.goal is None or not self.judged:
            return None
        return self.goal.met(statistics.median(self.judged))

    def line(self) -> dict[str, Any]:
        """Medians with the lowest and the highest of the rounds. met_in: how many rounds alone met the goal."""
        digits = self.digits or None  # None: a whole number
        values = [round(value, digits) for value in self.values]
        line: dict[str, Any] = {"value": round(statistics.median(self.values), digits)}
        line |= {"unit": self.unit, "lowest": min(values), "highest": max(values)}
        if self.ratios:
            line["ratio"] = round(statistics.median(self.ratios), 3)
            line["lowest_ratio"] = round(min(self.ratios), 3)
            line["highest_ratio"] = round(max(self.ratios), 3)
        if self.goal is not None:
            line |= {"goal": str(self.goal), "of": self.goal.of, "met": self.met}
            line["met_in"] = f"{sum(map(self.goal.met, self.judged))} of {len(self.judged)}"
        return line


Table = dict[tuple[str, str], Figures]
"""(bench, metric) → figures, in the order in which they are printed."""


def missed(table: Table) -> dict[str, str]:
    """Goals that the median of the rounds misses: "bench: metric" → what was found and the goal."""
    found = {}
    for (bench, metric), figures in table.items():
        if figures.met is False:
            median = statistics.median(figures.judged)
            found[f"{bench}: {metric}"] = f"{median:.3g}, goal {figures.goal}"
    return found


def lines(table: Table, about: Mapping[str, Any]) -> list[str]:
    """JSON lines: a figure each, then ``about`` the machine, and last how many goals were met and which were not."""
    told: list[Mapping[str, Any]] = [
        {"bench": bench, "metric": metric, **figures.line()}
        for (bench, metric), figures in table.items()
        if figures.values
    ]
    met = sum(figures.met is True for figures in table.values())
    unmeasured = [
        f"{bench}: {metric}"
        for (bench, metric), figures in table.items()
        if figures.goal is not None and figures.met is None
    ]
    told += [
        {"bench": "machine", **about},
        {"bench": "goals", "met": met, "missed": missed(table), "not measured": unmeasured},
    ]
    return [json.dumps(line, ensure_ascii=False) for line in told]


def spread(values: Sequence[float]) -> float:
    """How far apart the values of one metric are, as a share of their median."""
    return (max(values) - min(values)) / statistics.median(values)
