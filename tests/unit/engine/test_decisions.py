"""Every choice of the engine, as a table."""

from __future__ import annotations

import json

import pytest

from perdure.runtime.body import Ending, Idle
from perdure.runtime.engine.decisions import (
    LookAgain,
    ParkNow,
    failure_of,
    finish_of,
    hold_of,
    park_decision,
)
from perdure.storage.model import Reason, RunStatus

NOW = 1000.0
TIMER, SIGNAL = Reason.TIMER, Reason.SIGNAL


def decide(idle: Idle, *, quiet_since: float = NOW, leaving: bool = False):
    return park_decision(idle, now=NOW, quiet_since=quiet_since, park_after=5.0, leaving=leaving)


@pytest.mark.req("SL1")
def test_a_far_timer_parks_at_once() -> None:
    assert decide(Idle(NOW + 5.1, False, TIMER)) == ParkNow(NOW + 5.1, TIMER)


@pytest.mark.req("SL1")
def test_a_near_timer_stays_in_memory() -> None:
    assert decide(Idle(NOW + 5.0, False, TIMER)) is None
    assert decide(Idle(NOW + 1.0, True, SIGNAL), quiet_since=NOW - 60) is None


@pytest.mark.req("SL2")
def test_a_wait_nobody_can_time_parks_after_some_quiescence() -> None:
    waits = Idle(None, True, SIGNAL)
    assert decide(waits, quiet_since=NOW - 2) == LookAgain(NOW + 3)
    assert decide(waits, quiet_since=NOW - 5) == ParkNow(None, SIGNAL)


@pytest.mark.req("SL2")
def test_a_signal_with_a_far_deadline_parks_until_the_deadline() -> None:
    waits = Idle(NOW + 3600, True, SIGNAL)
    assert decide(waits, quiet_since=NOW - 6) == ParkNow(NOW + 3600, SIGNAL)


@pytest.mark.req("CL5")
def test_a_leaving_shard_parks_whatever_is_idle() -> None:
    assert decide(Idle(NOW + 1, False, TIMER), leaving=True) == ParkNow(NOW + 1, TIMER)
    assert decide(Idle(None, True, SIGNAL), leaving=True) == ParkNow(None, SIGNAL)
    ready = Idle(None, False, Reason.RETRY, pending_starts=True)
    assert decide(ready, leaving=True) == ParkNow(NOW, Reason.RETRY)


def test_a_step_ready_to_start_is_never_parked_otherwise() -> None:
    assert decide(Idle(NOW + 60, False, TIMER, pending_starts=True)) is None


def final(ending: Ending, *, cancelled: bool = False, result: str | None = None):
    return finish_of(ending, result=result, cancelled=cancelled, reason="why", parent_id=None)


@pytest.mark.req("WF1", "SL5")
def test_how_a_body_ended_decides_the_status() -> None:
    returned = Ending("returned", value=1)
    assert final(returned, result="1").status is RunStatus.SUCCEEDED
    assert final(returned, result="1").reason is None
    after_cancel = final(returned, result="1", cancelled=True)
    assert (after_cancel.status, after_cancel.result, after_cancel.reason) == (
        RunStatus.CANCELLED,
        "1",
        "why",
    )
    assert final(Ending("cancelled"), cancelled=True).status is RunStatus.CANCELLED
    failed = final(Ending("raised", error=ValueError("no")), cancelled=True)
    assert failed.status is RunStatus.FAILED
    assert json.loads(failed.error or "")["type"] == "ValueError"


def test_a_failure_keeps_its_traceback_text() -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError as error:
        record = json.loads(failure_of(error, parent_id=None).error or "")
    assert "test_a_failure_keeps_its_traceback_text" in record["traceback"]


def test_only_holds_suspend_without_a_wake_up() -> None:
    assert hold_of(Reason.CRASH_LOOP, 3).wake_at is None
    with pytest.raises(AssertionError):
        hold_of(Reason.TIMER, 3)
