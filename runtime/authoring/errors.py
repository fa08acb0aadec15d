"""What can go wrong with what people write: definitions, names, payloads, results, waits.

Everything an error carries is plain JSON data, so that it survives being recorded and raised again elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from perdure.storage.errors import ConfigurationError, InputError, PerdureError

KNOWN_NAMES_SHOWN = 50


class FieldFault(TypedDict):
    """One bad field. ``field``: dotted path, "" for the value itself; ``value``: its repr, shortened."""

    field: str
    message: str
    value: str


class DefinitionError(ConfigurationError):
    """A workflow or step is defined in a way that cannot work; the message names its place."""


class DuplicateDefinitionError(DefinitionError):
    """Two workflows have one name; the message names both places."""


class InvalidName(InputError, ValueError):
    """A name or id that cannot be used; the message says which and why."""


class InvalidDuration(InputError, ValueError):
    """A length of time, or an instant, that cannot be used; the message shows forms that can."""


class UnknownWorkflowError(InputError):
    """No workflow of that name is registered here. ``known``: those that are, sorted."""

    def __init__(self, workflow_name: str, known: Iterable[str]) -> None:
        self.workflow_name = workflow_name
        self.known = sorted(known)
        shown = ", ".join(self.known[:KNOWN_NAMES_SHOWN]) or "none at all"
        more = len(self.known) - KNOWN_NAMES_SHOWN
        super().__init__(
            f"no workflow is named {workflow_name!r}; registered here: {shown}"
            + (f" and {more} more" if more > 0 else "")
        )


class PayloadTooLarge(InputError):
    """A payload, message or result is over the limit. ``size`` and ``limit`` in bytes of encoded text."""

    def __init__(self, what: str, size: int, limit: int, setting: str = "payload_limit") -> None:
        self.what = what
        self.size = size
        self.limit = limit
        super().__init__(
            f"{what} is {size:,} bytes when encoded, over the limit of {limit:,} bytes: store the data elsewhere "
            f"and pass a reference to it (a key, a URL), or raise the setting {setting}"
        )


class WorkflowPayloadError(InputError):
    """A payload does not fit the workflow's type; nothing was stored.

    workflow_name; missing_fields: dotted paths; errors: every bad field, the missing ones included.
    """

    def __init__(
        self, workflow_name: str, errors: Sequence[FieldFault], missing_fields: Sequence[str] = ()
    ) -> None:
        self.workflow_name = workflow_name
        self.missing_fields = list(missing_fields)
        self.errors = list(errors)
        super().__init__(
            f"the payload does not fit workflow {workflow_name!r}: {describe(errors, 'payload')}"
        )


class NonRetryableError(PerdureError):
    """Raise this, or a subclass, in a step: no retry policy tries it again."""


class StepInputError(NonRetryableError):
    """An argument of a step cannot be encoded, so that a replay could not be compared with it."""


class StepResultError(NonRetryableError):
    """What a step returned does not fit its annotation, or cannot be recorded. Never retried."""

    def __init__(self, step_name: str, errors: Sequence[FieldFault]) -> None:
        self.step_name = step_name
        self.errors = list(errors)
        super().__init__(f"the result of step {step_name!r} {describe(errors, 'result')}")


class StepResultTooLarge(StepResultError, PayloadTooLarge):
    """A step's result is over the limit. Never retried."""

    def __init__(self, step_name: str, size: int, limit: int) -> None:
        self.step_name = step_name
        self.errors = []
        what = f"the result of step {step_name!r}"
        PayloadTooLarge.__init__(self, what, size, limit, "step_result_limit")


class WorkflowResultError(NonRetryableError):
    """What a workflow returned does not fit its annotation, or cannot be recorded; the run has failed."""

    def __init__(self, workflow_name: str, errors: Sequence[FieldFault]) -> None:
        self.workflow_name = workflow_name
        self.errors = list(errors)
        super().__init__(f"the result of workflow {workflow_name!r} {describe(errors, 'result')}")


class WorkflowResultTooLarge(WorkflowResultError, PayloadTooLarge):
    """A workflow's result is over the limit; the run has failed."""

    def __init__(self, workflow_name: str, size: int, limit: int) -> None:
        self.workflow_name = workflow_name
        self.errors = []
        what = f"the result of workflow {workflow_name!r}"
        PayloadTooLarge.__init__(self, what, size, limit, "payload_limit")


class StepTimeoutError(PerdureError, TimeoutError):
    """An attempt of a step took longer than its ``timeout`` (seconds). Transient: a policy may try again."""

    def __init__(self, step_name: str, timeout: float) -> None:
        self.step_name = step_name
        self.timeout = timeout
        super().__init__(f"step {step_name!r} did not end within {timeout:g} s")


class SignalTimeoutError(NonRetryableError, TimeoutError):
    """No such signal came before the deadline of the wait."""

    def __init__(self, signal_name: str, timeout: float) -> None:
        self.signal_name = signal_name
        self.timeout = timeout
        super().__init__(f"no signal {signal_name!r} came within {timeout:g} s")


class SignalPayloadError(NonRetryableError):
    """A signal's payload does not fit the type it was awaited with. The signal is consumed."""

    def __init__(
        self, signal_name: str, errors: Sequence[FieldFault], missing_fields: Sequence[str] = ()
    ) -> None:
        self.signal_name = signal_name
        self.missing_fields = list(missing_fields)
        self.errors = list(errors)
        super().__init__(
            f"the payload of signal {signal_name!r} does not fit: {describe(errors, 'payload')}"
        )


class WorkflowCrashLooped(NonRetryableError):
    """A run whose process died again and again without a commit in between; it waits for an operator."""

    def __init__(self, run_id: str, reclaims: int) -> None:
        self.run_id = run_id
        self.reclaims = reclaims
        super().__init__(
            f"run {run_id!r} lost its process {reclaims} times without finishing a step in between: it is suspended; "
            "look for what kills the process, then resume it"
        )


class WorkflowCancelled(PerdureError):
    """The run that was waited for was cancelled."""

    def __init__(self, run_id: str, reason: str | None = None) -> None:
        self.run_id = run_id
        self.reason = reason
        super().__init__(f"run {run_id!r} was cancelled" + (f": {reason}" if reason else ""))


class NondeterminismError(PerdureError):
    """A body did not do on replay what the journal says it did; the run is suspended until `resume`."""


class OutsideStepError(PerdureError, RuntimeError):
    """`current_step` was called where no step is running."""


class OutsideBodyError(PerdureError, RuntimeError):
    """A context was used where its body is not running."""


class RecordedError(PerdureError):
    """A recorded error whose type is not declared here.

    name, module: of the original type; message: its text; attributes: its plain data; traceback: its text.
    Declare the type (``errors=[…]`` on the step or workflow) to get it back as itself.
    """

    def __init__(
        self,
        name: str,
        message: str,
        *,
        module: str = "",
        attributes: dict[str, Any] | None = None,
        traceback: str = "",
    ) -> None:
        self.name = name
        self.message = message
        self.module = module
        self.attributes = attributes or {}
        self.traceback = traceback
        super().__init__(f"{name}: {message}" if message else name)


def describe(errors: Sequence[FieldFault], whole: str) -> str:
    """All bad fields in one line; ``whole`` stands for the value itself."""
    return "; ".join(
        f"{error['field'] or whole}: {error['message']}"
        + (f" (got {error['value']})" if error["value"] else "")
        for error in errors
    )
