"""What is written next, as pure functions: no clock, no I/O, no state."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.runtime.authoring.failures import encode_failure
from perdure.runtime.body import Ending, Idle
from perdure.storage.model import Finish, Park, Reason, RunStatus


@dataclass(frozen=True, slots=True)
class ParkNow:
    """Commit a park that wakes at ``wake_at`` (None: only a message wakes it)."""

    wake_at: float | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to write yet; decide again at this instant (database time)."""

    at: float


def park_decision(
    idle: Idle, *, now: float, quiet_since: float, park_after: float, leaving: bool
) -> ParkNow | LookAgain | None:
    """Whether a quiescent run leaves memory, and until when.

    A run whose earliest wait lies more than ``park_after`` seconds away parks at once; waits nobody can time park
    after ``park_after`` of quiescence; a shard being handed over parks whatever is idle, due now when a step is
    ready to start. None: one of its own timers fires soon enough.
    """
    if leaving:
        return ParkNow(now if idle.pending_starts else idle.wake_at, idle.reason)
    if idle.pending_starts:
        return None
    far = idle.wake_at is None or idle.wake_at - now > park_after
    if not far:
        return None
    if not idle.untimed:
        return ParkNow(idle.wake_at, idle.reason)
    patience_ends = quiet_since + park_after
    if now >= patience_ends:
        return ParkNow(idle.wake_at, idle.reason)
    return LookAgain(patience_ends)


def finish_of(
    ending: Ending,
    *,
    result: str | None,
    cancelled: bool,
    reason: str | None,
    parent_id: str | None,
) -> Finish:
    """The final write of a body that ended by itself. A value returned after a cancel is kept, the status is not."""
    if ending.kind == "returned":
        status = RunStatus.CANCELLED if cancelled else RunStatus.SUCCEEDED
        return Finish(
            status, result=result, reason=reason if cancelled else None, parent_id=parent_id
        )
    if ending.kind == "cancelled" and cancelled:
        return Finish(RunStatus.CANCELLED, reason=reason, parent_id=parent_id)
    assert ending.error is not None, "a body that raised has an error"
    return failure_of(ending.error, parent_id=parent_id)


def failure_of(error: BaseException, *, parent_id: str | None) -> Finish:
    return Finish(RunStatus.FAILED, error=encode_failure(error), parent_id=parent_id)


def hold_of(reason: Reason, seen: int) -> Park:
    """A suspension that runs no user code until an operator resumes it."""
    assert reason.hold, reason
    return Park(None, seen, reason)
