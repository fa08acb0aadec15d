"""What the code of a step can know about itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


@contextmanager
def entering_step(info: StepInfo) -> Iterator[StepInfo]:
    """Make ``info`` the current step of this context."""
    token = _current.set(info)
    try:
        yield info
    finally:
        _current.reset(token)
