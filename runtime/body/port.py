"""What crosses between a body and the engine that runs it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from perdure.storage.model import Entry, Reason, RunEvent
from perdure.storage.values import value

Decode = Callable[[str | None], Any]


@dataclass(slots=True)
class StepCall:
    """One call of a step, as the body makes it.

    input_text, input_hash: canonical encoding of the arguments and its hash, both recorded with the result; another
    hash on replay is a mismatch, unless ``fits`` says of the recorded one that it may be of the same input. decode:
    from an entry's output to the value, for the live result too.
    recorded_error: from an entry's error to an exception, a fresh instance per call (raised twice, one instance
    would collect tracebacks). target: what the engine's step executor needs; the body never looks at it.
    """

    name: str
    input_text: str | None
    input_hash: int | None
    decode: Decode
    recorded_error: Callable[[str], BaseException]
    target: Any = None
    fits: Callable[[int], bool] | None = None


@dataclass(slots=True)
class MessageWait:
    """One wait for a message. timeout: seconds of run time, None waits for ever."""

    name: str
    decode: Decode
    timeout: float | None = None


@value(frozen=True, slots=True)
class Idle:
    """What a quiescent body waits for.

    wake_at: the earliest timer or retry (database time); None: only a message can wake it.
    untimed: also, or only, waits for something that has no time.
    reason: what the run would be suspended for. pending_starts: steps are ready to start and held back.
    stuck: it waits for nothing the journal knows of (a dead lock, something foreign); only a cancel helps.
    """

    wake_at: float | None
    untimed: bool
    reason: Reason
    pending_starts: bool = False
    stuck: bool = False


@value(frozen=True, slots=True)
class Ending:
    """How a body ended by itself.

    returned: ``value``, also after a cancel. raised: ``error``. cancelled: CancelledError came out of a run that
    was asked to cancel. nondeterminism: ``error`` says what does not fit the journal; nothing was recorded.
    warnings: steps and tasks the body left behind, by name.
    """

    kind: Literal["returned", "raised", "cancelled", "nondeterminism"]
    value: Any = None
    error: BaseException | None = None
    warnings: tuple[str, ...] = ()


class BodyPort(Protocol):
    """What a body asks of the engine. Never called after `Body.unwind` or after ``ended``.

    ``recorded`` and ``event`` are called in the middle of a turn, while the run's loop is the thread's running loop:
    they may only take note. The others are called from a plain host callback, or by the call that caused them.
    """

    def recorded(self, entry: Entry, message_id: str | None) -> None:
        """``entry`` joins the run's next write; it is delivered right after. message_id: the message it takes."""
        ...

    def event(self, event: RunEvent) -> None:
        """``event`` rides on the run's next write."""
        ...

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        """Run the step; every entry recorded before the call is durable (R4). ``context`` is this attempt's own."""
        ...

    def abandon_step(self, key: str) -> None:
        """The body no longer waits for this running step: cancel it."""
        ...

    def want_mail(self) -> None:
        """A timer is due while messages are awaited: read the mailbox, then call `Body.mail`."""
        ...

    def quiescent(self) -> None:
        """Nothing more can be delivered now: write what was recorded, ask `Body.idle`."""
        ...

    def ended(self, ending: Ending) -> None:
        """The body is over and unwound."""
        ...
