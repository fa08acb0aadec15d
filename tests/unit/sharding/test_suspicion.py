"""Two tests, far enough apart, and no heartbeat between them."""

from __future__ import annotations

import pytest

from perdure.sharding.suspicion import APART, Suspicion
from tests.unit.sharding.rows import runner

pytestmark = pytest.mark.req("CL5", "CL3")


def lost(suspicion: Suspicion, at: float, *free: int, count: int = 0, ids: int = 3) -> list[int]:
    rows = [runner(number, renew_count=count) for number in range(1, ids + 1)]
    found = suspicion.observe(rows, free, sent=at, answered=at + 0.01)
    return [row.runner_id for row in found]


def test_one_test_is_not_enough_and_two_in_a_hurry_neither() -> None:
    suspicion = Suspicion()
    assert lost(suspicion, 10.0, 2) == []
    assert suspicion.next_test() == pytest.approx(10.01 + APART)
    assert lost(suspicion, 10.0 + APART, 2) == [], "counted from the answer of the first"
    assert lost(suspicion, 10.02 + APART, 2) == [2]


def test_who_has_renewed_in_between_is_suspected_anew() -> None:
    suspicion = Suspicion()
    lost(suspicion, 10.0, 2)
    assert lost(suspicion, 11.0, 2, count=1) == []
    assert lost(suspicion, 11.2, 2, count=1) == []
    assert lost(suspicion, 12.0, 2, count=1) == [2]


def test_who_holds_its_lock_again_is_forgotten() -> None:
    suspicion = Suspicion()
    lost(suspicion, 10.0, 2)
    assert lost(suspicion, 10.2) == []
    assert suspicion.next_test() is None
    assert lost(suspicion, 11.0, 2) == []


def test_an_observer_that_was_away_begins_anew() -> None:
    suspicion = Suspicion()
    lost(suspicion, 10.0, 2)
    suspicion.restart()
    assert lost(suspicion, 11.0, 2) == []


def test_each_has_its_own_time_and_who_is_gone_is_not_remembered() -> None:
    suspicion = Suspicion()
    lost(suspicion, 10.0, 1)
    lost(suspicion, 10.2, 1, 3)
    assert suspicion.next_test() == pytest.approx(10.01 + APART)
    assert lost(suspicion, 10.02 + APART, 1, 3) == [1]
    assert lost(suspicion, 10.7, 1, 3, ids=2) == [1]
    assert lost(suspicion, 10.8, 3) == []
