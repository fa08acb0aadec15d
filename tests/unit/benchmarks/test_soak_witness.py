"""A step that its run's cancel cut short has no entry, and needs none; anything else does."""

from __future__ import annotations

import pytest

from benchmarks.soak_witness import interrupted_by_cancels
from tests.harness.audit import AuditRow
from tests.harness.sidelog import Execution

CANCEL = AuditRow(1, "steps", "I", 0.0, run_id="a", kind="cancel", step_key="")


def execution(started: float, how: str = "cancelled", run: str = "a") -> Execution:
    return Execution(
        run=run,
        key="0/add#0",
        attempt=1,
        input="1",
        pid=7,
        runner="pod-1",
        started=started,
        ended=started + 0.1,
        how=how,
    )


def test_the_last_execution_of_a_step_is_explained_by_the_cancel() -> None:
    earlier, last = execution(1.0), execution(2.0)
    assert interrupted_by_cancels([CANCEL], [last, earlier], {}) == {last}


@pytest.mark.parametrize(
    ("rows", "ended", "accounted"),
    [
        pytest.param([], execution(1.0), {}, id="the run was not cancelled"),
        pytest.param([CANCEL], execution(1.0, run="b"), {}, id="another run was"),
        pytest.param([CANCEL], execution(1.0, how="returned"), {}, id="it came to its end"),
        pytest.param([CANCEL], execution(1.0), {("a", "0/add#0"): 1}, id="it is recorded"),
    ],
)
def test_what_a_cancel_does_not_explain(
    rows: list[AuditRow], ended: Execution, accounted: dict[tuple[str, str], int]
) -> None:
    assert interrupted_by_cancels(rows, [ended], accounted) == set()
