"""What the code of a step can know about itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

from perdure.runtime.authoring.errors import OutsideStepError


@dataclass(slots=True)
class StepInfo:
    """The step that is running. ``attempt`` starts at 1; ``lost_ownership``: another runner has the run now."""

    run_id: str
    key: str
    name: str
    attempt: int = 1
    lost_ownership: bool = False

    @property
    def idempotency_key(self) -> str:
        """The same on every attempt and replay of this step, and nobody else's: run id, ":" and step key."""
        return f"{self.run_id}:{self.key}"


_current: ContextVar[StepInfo] = ContextVar("perdure_current_step")
_run: ContextVar[tuple[str, str]] = ContextVar("perdure_current_run")


def current_step() -> StepInfo:
    """The step this code runs in, also in its threads and tasks. Raises OutsideStepError elsewhere."""
    try:
        return _current.get()
    except LookupError:
        raise OutsideStepError(
            "current_step() was called where no step is running: call it inside the function given to ctx.step, "
            "or in what that function calls"
        ) from None


def step_or_none() -> StepInfo | None:
    """The step this code runs in, None outside of steps."""
    return _current.get(None)


def enter_step(info: StepInfo) -> Token[StepInfo]:
    """Make ``info`` the current step of this context, until `leave_step`."""
    return _current.set(info)


def leave_step(token: Token[StepInfo]) -> None:
    _current.reset(token)


@contextmanager
def entering_step(info: StepInfo) -> Iterator[StepInfo]:
    """Make ``info`` the current step of this context."""
    token = enter_step(info)
    try:
        yield info
    finally:
        leave_step(token)


def enter_run(run_id: str, workflow: str) -> None:
    """What is done in this context from here on, and in copies of it, belongs to that run."""
    _run.set((run_id, workflow))


def where_now() -> dict[str, str | int]:
    """The facts that log lines of this context carry: run_id, workflow, step, attempt."""
    facts: dict[str, str | int] = {}
    run = _run.get(None)
    if run is not None:
        facts["run_id"], facts["workflow"] = run
    step = _current.get(None)
    if step is not None:
        facts["step"], facts["attempt"] = step.name, step.attempt
    return facts
