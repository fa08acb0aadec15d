"""What two looks at a server say about what happened in between."""

from __future__ import annotations

import pytest

from perdure.storage.postgres.position import Position, what_changed

pytestmark = pytest.mark.req("CL11")
KNOWN = Position("7001", 3, 5_000)


@pytest.mark.parametrize("flushed", [5_000, 5_001, None])
def test_the_same_server_further_on_is_nothing_new(flushed: int | None) -> None:
    assert what_changed(KNOWN, Position("7001", 3, flushed)) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Position("7002", 3, 9_000), "another server: system identifier 7002, before 7001"),
        (Position("7001", 4, 5_000), "time line 4, before 3; its log is no shorter"),
        (Position("7001", 4, 4_000), "time line 4, before 3; commits are lost"),
        (Position("7001", 2, 9_000), "time line 2, before 3"),
        (Position("7001", 3, 4_999), "an older copy of the server: commits are lost: its log ends at 4999"),
        (Position("unknown", 3, 4_999), "an older copy"),
        (Position("unknown", 4, 9_000), "a fail-over"),
    ],
)  # fmt: skip
def test_another_server_and_an_older_copy_are_told(found: Position, words: str) -> None:
    assert words in str(what_changed(KNOWN, found))


def test_what_is_not_known_is_no_change() -> None:
    assert what_changed(KNOWN, Position("unknown", 3, 6_000)) is None
    assert what_changed(KNOWN, Position("7001", None, None)) is None
    assert what_changed(Position("7001", None, None), KNOWN) is None


@pytest.mark.parametrize(
    ("written", "may_be"),
    [("7001/3", True), ("7001/4", False), ("7002/3", False), ("7001/unknown", True), ("unknown/3", True)],
)  # fmt: skip
def test_what_is_written_of_a_server_is_compared_as_far_as_it_is_known(
    written: str, may_be: bool
) -> None:
    assert KNOWN.may_be(written) is may_be
    assert Position("7001", None, None).may_be(written) is (written != "7002/3")
