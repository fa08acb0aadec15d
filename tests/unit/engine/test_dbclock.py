"""The estimate of the database's clock: never early, as good as the quickest answer, soon right after a jump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.runtime.dbclock import DatabaseClock


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return 5.0

    def monotonic(self) -> float:
        return self.at


def ask(clock: DatabaseClock, hand: HandClock, offset: float, there: float, back: float) -> None:
    """One question: ``there`` and ``back`` seconds on the way, answered by a database ``offset`` ahead."""
    asked = clock.mark()
    hand.at += there
    db_now = hand.at + offset
    hand.at += back
    clock.observe(db_now, asked)


latency = st.floats(0, 2, allow_nan=False)


@pytest.mark.req("SL1")
@given(st.floats(-1e4, 1e9), st.lists(st.tuples(latency, latency, st.floats(0, 30)), min_size=1))
def test_it_is_never_early_and_late_by_the_best_answer(
    offset: float, answers: list[tuple[float, float, float]]
) -> None:
    hand = HandClock()
    clock = DatabaseClock(hand)
    best, aged = float("inf"), 0.0
    for there, back, rest in answers:
        ask(clock, hand, offset, there, back)
        best = min(best, back)
        late = hand.at + offset - clock.now()
        assert late >= -1e-5
        assert late <= best + 1e-4 * aged + 1e-5
        hand.at += rest
        aged += there + back + rest + 10


@given(st.sampled_from([-30.0, 30.0]), latency, latency)
def test_a_jump_of_the_database_is_followed_at_once(jump: float, there: float, back: float) -> None:
    hand = HandClock()
    clock = DatabaseClock(hand)
    ask(clock, hand, 1000.0, 0.001, 0.001)
    ask(clock, hand, 1000.0 + jump, there, back)
    assert abs(hand.at + 1000.0 + jump - clock.now()) <= back + 1e-5


def test_before_the_first_answer_it_is_wall_time() -> None:
    assert DatabaseClock(HandClock()).now() == 5.0


@pytest.mark.req("SL1")
@pytest.mark.parametrize("jump", [30.0, -30.0, 0.5])
def test_a_clock_that_was_set_is_told_once_with_how_far(jump: float) -> None:
    hand = HandClock()
    clock = DatabaseClock(hand)
    told: list[float] = []
    clock.on_jump(told.append)
    for _ in range(3):
        ask(clock, hand, 1e6, 0.01, 0.01)
        hand.at += 0.5
    assert told == []
    for _ in range(3):
        ask(clock, hand, 1e6 + jump, 0.01, 0.01)
        hand.at += 0.5
    assert told == [pytest.approx(jump, abs=0.05)]
