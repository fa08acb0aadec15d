"""Goals of `make bench` are judged by numbers, and what misses one is said."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import Figures, Goal, Table, lines, missed, spread
from benchmarks.rounds import empty_table

FAST = Goal(">=", 0.2, of="ratio")
CHEAP = Goal("<=", 75, of="value")


def figures(goal: Goal | None, values: list[float], limit: float | None = None) -> Figures:
    found = Figures("1/s", goal)
    for value in values:
        found.add(value, limit)
    return found


def test_the_median_of_the_rounds_is_judged() -> None:
    assert figures(FAST, [1900, 2000, 2100], 10_000).met is True
    assert figures(FAST, [1900, 1999, 2900], 10_000).met is False
    assert figures(CHEAP, [70, 75, 200]).met is True
    assert figures(CHEAP, [70, 75.1, 200]).met is False


def test_what_has_no_goal_or_no_figure_is_neither_met_nor_missed() -> None:
    assert figures(None, [1, 2, 3]).met is None
    assert figures(CHEAP, []).met is None
    assert figures(FAST, [1000]).met is None, "a goal for the ratio, and nothing to divide by"


def test_a_line_has_the_noise_of_value_and_ratio() -> None:
    line = figures(FAST, [1900, 2500, 2100], 10_000).line()
    assert (line["value"], line["lowest"], line["highest"]) == (2100, 1900, 2500)
    assert (line["ratio"], line["lowest_ratio"], line["highest_ratio"]) == (0.21, 0.19, 0.25)
    assert (line["goal"], line["of"], line["met"]) == (">= 0.2", "ratio", True)
    assert line["met_in"] == "2 of 3"


def test_the_last_line_lists_the_goals_that_were_missed() -> None:
    table: Table = {
        ("fast", "runs"): figures(FAST, [1000], 10_000),
        ("cheap", "cpu"): figures(CHEAP, [60]),
        ("traced", "cpu"): figures(CHEAP, []),
        ("limit", "commits"): figures(None, [10_000]),
    }
    *told, machine, goals = map(json.loads, lines(table, {"cores": 2}))
    assert [line["bench"] for line in told] == ["fast", "cheap", "limit"]
    assert machine == {"bench": "machine", "cores": 2}
    assert goals["met"] == 1
    assert goals["missed"] == missed(table) == {"fast: runs": "0.1, goal >= 0.2"}
    assert goals["not measured"] == ["traced: cpu"]


def test_every_goal_is_one_that_can_be_judged() -> None:
    for place, empty in empty_table().items():
        if empty.goal is not None:
            empty.add(1.0, 1.0)
            assert empty.met is not None, place


@pytest.mark.parametrize(("values", "wanted"), [([10, 10, 10], 0.0), ([9, 10, 12], 0.3)])
def test_spread_is_a_share_of_the_median(values: list[float], wanted: float) -> None:
    assert spread(values) == pytest.approx(wanted)
