"""A client's write is sent again until its outcome is known, and never told for unwritten when it may be written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from perdure.runtime.outcomes import Repeated
from perdure.storage.clock import Clock, SeededRandomness
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    StorageError,
    UnknownOutcome,
)

pytestmark = pytest.mark.req("CL11")

LOST = UnknownOutcome("lost")
AWAY = DatabaseUnavailable("away")
LOCKED = ConflictError("locked")


class Steps(Clock):
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self._at = 0.0

    def now(self) -> float:
        return self.monotonic()

    def monotonic(self) -> float:
        self._at += 1.0
        return self._at


def sending(*answers: StorageError | str) -> Callable[[], Awaitable[str]]:
    """Answers one after the other, the last one for ever."""
    left = list(answers)

    async def send() -> str:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, StorageError):
            raise answer
        return answer

    return send


async def outcome(*answers: StorageError | str) -> str:
    write = Repeated(Steps(), SeededRandomness(1), patience=4.0)
    return await write.answer(sending(*answers))


async def test_the_first_answer_that_comes_is_it():
    assert await outcome("done") == "done"
    assert await outcome(AWAY, LOST, LOCKED, "done") == "done"


@pytest.mark.parametrize("failure", [AWAY, LOCKED, LOST])
async def test_what_fails_to_the_end_of_patience_is_raised(failure: StorageError):
    with pytest.raises(type(failure)) as raised:
        await outcome(failure)
    assert raised.value is failure


@pytest.mark.parametrize("later", [AWAY, LOCKED])
async def test_once_an_answer_was_lost_no_later_failure_says_otherwise(later: StorageError):
    with pytest.raises(UnknownOutcome) as raised:
        await outcome(LOST, later)
    assert raised.value is LOST
    assert raised.value.__cause__ is later


async def test_refused_data_is_not_sent_again():
    with pytest.raises(DataRefused):
        await outcome(DataRefused("no"), "done")


async def test_a_lost_answer_is_remembered_beside_a_later_one():
    write = Repeated(Steps(), SeededRandomness(1), patience=4.0)
    assert await write.answer(sending(LOST, "gone")) == "gone"
    assert write.lost is LOST
