"""Low-water marks, the suspect lane, and whether runners differ: what a claim is told, without a database."""

from __future__ import annotations

from dataclasses import replace

from perdure.runtime.engine.borrowing import runners_differ
from perdure.runtime.engine.low_water import LowWaterMarks
from perdure.runtime.engine.suspects import SuspectLane, is_suspect
from perdure.storage.model import FLOOR_MARGIN, ClaimedRun, RunnerRow, Topology

RUN = ClaimedRun(
    run_id="r",
    slot=1,
    claim_id=1,
    epoch=1,
    revision=1,
    next_seq=1,
    entered_at=0.0,
    reclaim_count=0,
    wake_seq=0,
    workflow="w",
    version=1,
    payload="{}",
    payload_format=1,
    seed=1,
    created_at=0.0,
    source="app",
    parent_id=None,
    trace=None,
    taken_over=False,
)


def test_the_floor_is_the_lowest_mark_of_the_shards_asked() -> None:
    marks = LowWaterMarks(5.0)
    assert marks.floor([1]) is None
    marks.raise_to(100.0, [1, 2])
    marks.raise_to(160.0, [2])
    assert marks.floor([1, 2]) == 100.0 - FLOOR_MARGIN
    assert marks.floor([2]) == 160.0 - FLOOR_MARGIN
    assert marks.floor([2, 3]) is None
    assert marks.floor([]) is None


def test_a_mark_is_void_once_somebody_else_may_have_held_the_shard() -> None:
    marks = LowWaterMarks(5.0)
    marks.raise_to(100.0, [1, 2])
    marks.forget([2, 7])
    assert marks.floor([1]) == 100.0 - FLOOR_MARGIN
    assert marks.floor([1, 2]) is None


def test_a_mark_may_fall_with_a_clock_that_was_set_back() -> None:
    marks = LowWaterMarks(5.0)
    marks.raise_to(100.0, [1])
    marks.raise_to(70.0, [1])
    assert marks.floor([1]) == 70.0 - FLOOR_MARGIN


def test_a_run_is_suspected_from_its_second_fall_on() -> None:
    falls = [
        replace(RUN, reclaim_count=count, taken_over=taken)
        for count, taken in ((0, False), (1, True), (1, False), (2, True), (2, False))
    ]
    assert [is_suspect(run) for run in falls] == [False, False, True, True, True]


def test_the_lane_has_one_place_and_says_when_it_is_free() -> None:
    freed: list[int] = []
    lane = SuspectLane(lambda: freed.append(lane.free))
    assert lane.free == 1
    lane.enter("a")
    assert lane.free == 0
    lane.leave("b")
    assert (lane.free, freed) == (0, [])
    lane.leave("a")
    lane.leave("a")
    assert (lane.free, freed) == (1, [1])


def test_dead_runners_do_not_count_among_those_that_differ() -> None:
    def topology(*known: tuple[bool, list[str]]) -> Topology:
        rows = [
            RunnerRow(n, f"pod-{n}", "a:1", 0.0, 9.0, 1, dead=dead, workflows=names)
            for n, (dead, names) in enumerate(known)
        ]
        return Topology(rows, [], 0.0)

    assert not runners_differ(None, ["a"])
    assert not runners_differ(topology((False, ["b", "a"]), (True, ["c"])), ["a", "b"])
    assert runners_differ(topology((False, ["a"])), ["a", "b"])
    assert runners_differ(topology((False, ["a", "b", "c"])), ["a", "b"])
