"""What became of a write, judged from what is read afterwards: every combination, each with its own reason."""

from __future__ import annotations

import pytest

from perdure.storage.errors import DataRefused
from perdure.storage.model import (
    Entry,
    EntryKind,
    Finish,
    Park,
    Reason,
    RunStatus,
    RunWrite,
    Verdict,
)
from perdure.storage.recorded import MESSAGE_LIMIT, error_summary
from perdure.storage.verdicts import FenceSeen, check_batch, judge

pytestmark = pytest.mark.req("CL4")

MINE, OTHER, BATCH, EARLIER = 10, 11, 70, 69
STEP, PARK, END = None, Park(None, 0, Reason.SIGNAL), Finish(RunStatus.SUCCEEDED)


def sent(outcome: Park | Finish | None) -> RunWrite:
    return RunWrite("r", MINE, 4, [Entry(3, EntryKind.STEP, "k", 1.0)], outcome=outcome)


def fence(claim: int | None, revision: int, batch: int, next_seq: int = 3) -> FenceSeen:
    return FenceSeen(claim, revision, batch, next_seq)


@pytest.mark.parametrize(
    ("outcome", "seen", "ended_by", "verdict"),
    [
        # my batch is on the fence: durable
        (STEP, fence(MINE, 5, BATCH, 4), None, Verdict.COMMITTED),
        (STEP, fence(OTHER, 6, BATCH, 4), None, Verdict.FENCED),  # and then taken over
        (PARK, fence(None, 5, BATCH, 4), None, Verdict.PARKED),
        (PARK, fence(OTHER, 6, BATCH, 4), None, Verdict.PARKED),  # and woken by somebody
        (PARK, fence(MINE, 5, BATCH, 4), None, Verdict.PARK_REFUSED),
        # not there, and nothing has moved
        (STEP, fence(MINE, 4, EARLIER), None, Verdict.AGAIN),
        (PARK, fence(MINE, 4, EARLIER), None, Verdict.AGAIN),
        (END, fence(MINE, 4, EARLIER), None, Verdict.AGAIN),
        # mine, but not as I know it
        (STEP, fence(MINE, 5, EARLIER), None, Verdict.RELOAD),
        (STEP, fence(MINE, 4, EARLIER, 9), None, Verdict.RELOAD),
        # not mine
        (STEP, fence(OTHER, 4, EARLIER), None, Verdict.FENCED),
        (PARK, fence(None, 4, EARLIER), None, Verdict.FENCED),
        (END, fence(OTHER, 5, EARLIER), None, Verdict.FENCED),
        # the run has ended
        (END, None, BATCH, Verdict.COMMITTED),
        (END, None, EARLIER, Verdict.FENCED),
        (END, None, None, Verdict.FENCED),
        (STEP, None, BATCH, Verdict.FENCED),
    ],
)
def test_verdicts(
    outcome: Park | Finish | None, seen: FenceSeen | None, ended_by: int | None, verdict: Verdict
) -> None:
    assert judge(sent(outcome), BATCH, seen, ended_by) is verdict


def test_a_batch_holds_one_write_per_run_and_journals_without_gaps() -> None:
    check_batch([])
    check_batch([sent(STEP), RunWrite("s", MINE, 1)])
    with pytest.raises(DataRefused, match="two writes of one run"):
        check_batch([sent(STEP), sent(END)])
    gap = [Entry(seq, EntryKind.STEP, "k", 1.0) for seq in (3, 5)]
    with pytest.raises(DataRefused, match="entry 5 stands where 4 comes next"):
        check_batch([RunWrite("r", MINE, 4, gap)])


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (None, (None, None)),
        ('{"type": "Boom", "message": "no"}', ("Boom", "no")),
        ('{"type": 5, "message": null}', (None, None)),
        ("plain words", (None, "plain words")),
        ("[1]", (None, "[1]")),
        ('{"message": "' + "x" * 900 + '"}', (None, "x" * MESSAGE_LIMIT)),
    ],
)
def test_lists_show_type_and_message_of_a_recorded_error(
    error: str | None, summary: tuple[str | None, str | None]
) -> None:
    assert error_summary(error) == summary
