"""What a workflow's body does durable things with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from random import Random
from typing import Any, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from perdure.runtime.authoring.annotations import codec_for_type
from perdure.runtime.authoring.codec import ValueCodec, ValueFault
from perdure.runtime.authoring.current import step_or_none
from perdure.runtime.authoring.durations import Duration, to_seconds, to_unix
from perdure.runtime.authoring.errors import (
    OutsideBodyError,
    SignalPayloadError,
    SignalTimeoutError,
)
from perdure.runtime.authoring.names import check_signal_name, check_timer_name
from perdure.runtime.authoring.run_log import RunLog
from perdure.runtime.authoring.step import INPUT_LIMIT, StepTarget, step_of
from perdure.runtime.body import MessageWait, StepCall
from perdure.storage.values import value

P = ParamSpec("P")
T = TypeVar("T")


class RunBody(Protocol):
    """What a context needs of the body it belongs to (see `perdure.runtime.body.Body`)."""

    cancelled: bool

    @property
    def silent(self) -> bool: ...

    def now(self) -> float: ...

    def step(self, call: StepCall) -> Coroutine[Any, Any, Any]: ...

    def wait_message(self, wait: MessageWait) -> Coroutine[Any, Any, Any]: ...

    def sleep(self, seconds: float, name: str | None = None) -> Coroutine[Any, Any, None]: ...

    def sleep_until(self, instant: float, name: str | None = None) -> Coroutine[Any, Any, None]: ...


@value(frozen=True, slots=True)
class RunFacts:
    """What is known of a run whenever its body is entered. ``created_at``: Unix seconds, the same on every entry.

    attempt: 1, and one more for each time the run lost its process since its last finished step.
    seed: of the run's random numbers. parent_id: of the run that started it, if one did.
    """

    run_id: str
    workflow: str
    version: int
    attempt: int
    created_at: float
    seed: int
    source: str = "app"
    parent_id: str | None = None
    trace: str | None = None
    tenant: str | None = None


class Context:
    """The first argument of a workflow's body. It works inside that body only, not in steps.

    run_id, workflow, version: what runs. source: who started it. attempt, parent_id, trace, tenant: see `RunFacts`.
    """

    __slots__ = ("_body", "_facts", "_input_limit", "_log", "_random")

    def __init__(
        self, body: RunBody, facts: RunFacts, *, input_limit: int | None = INPUT_LIMIT
    ) -> None:
        """input_limit: how much of a step's input is recorded, in bytes; None: nothing, not even its length."""
        self._body = body
        self._facts = facts
        self._input_limit = input_limit
        self._random: Random | None = None
        self._log: RunLog | None = None

    def __repr__(self) -> str:
        return f"<context of {self.workflow!r} run {self.run_id!r}>"

    # -- facts
    @property
    def run_id(self) -> str:
        return self._facts.run_id

    @property
    def workflow(self) -> str:
        return self._facts.workflow

    @property
    def version(self) -> int:
        return self._facts.version

    @property
    def attempt(self) -> int:
        return self._facts.attempt

    @property
    def created_at(self) -> datetime:
        """When the run was started, in UTC."""
        return datetime.fromtimestamp(self._facts.created_at, UTC)

    @property
    def source(self) -> str:
        return self._facts.source

    @property
    def parent_id(self) -> str | None:
        return self._facts.parent_id

    @property
    def trace(self) -> str | None:
        return self._facts.trace

    @property
    def tenant(self) -> str | None:
        return self._facts.tenant

    @property
    def cancelled(self) -> bool:
        """Whether the run has been asked to cancel, as far as the body has been told."""
        return self._body.cancelled

    @property
    def log(self) -> RunLog:
        """Log lines of the body: each is written once, not again on a replay."""
        if self._log is None:
            self._log = RunLog(self._body, self._facts)
        return self._log

    # -- steps
    # None, not Any, inside the coroutine types: with Any, mypy gives up on `asyncio.gather` of different results.
    @overload
    def step(
        self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[None, None, T]: ...

    @overload
    def step(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[None, None, T]: ...

    def step(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Run a step, or take its recorded result: ``receipt = await ctx.step(charge, order)``.

        fn: a step or a plain function; a plain ``def`` runs in a thread. The arguments are encoded and copied now: what
        either side does to them later, the other does not see. The step begins when it is awaited.
        Awaiting raises what the step raised, StepResultError if its result does not fit.
        Raises StepInputError, TypeError for arguments the function does not take, DefinitionError.
        """
        definition = step_of(fn)
        text, digest = definition.encode_input(args, kwargs, limit=self._input_limit or 0)
        target = StepTarget(definition, args, kwargs)
        return self._body.step(
            StepCall(  # positional: each step comes here
                definition.name,
                None if self._input_limit is None else text,
                digest,
                definition.decode_output,
                definition.decode_error,
                target,
                target.fits,
            )
        )

    # -- waiting
    def sleep(self, duration: Duration, name: str | None = None) -> Coroutine[None, None, None]:
        """Sleep durably: the run leaves memory and wakes on time, also after a restart.

        duration: seconds, a timedelta or text such as "7 days". name: shown on the timer's events.
        Raises InvalidDuration, InvalidName.
        """
        seconds = to_seconds(duration, "sleep")
        return self._body.sleep(seconds, None if name is None else check_timer_name(name))

    def sleep_until(
        self, instant: datetime, name: str | None = None
    ) -> Coroutine[None, None, None]:
        """Sleep durably until an aware datetime; one that has passed does not wait.

        Raises InvalidDuration, InvalidName.
        """
        due = to_unix(instant, "sleep_until")
        return self._body.sleep_until(due, None if name is None else check_timer_name(name))

    @overload
    def wait_signal(
        self, name: str, type: type[T], timeout: Duration | None = None
    ) -> Coroutine[None, None, T]: ...

    @overload
    def wait_signal(
        self, name: str, type: Any = Any, timeout: Duration | None = None
    ) -> Coroutine[Any, Any, Any]: ...

    def wait_signal(
        self, name: str, type: Any = Any, timeout: Duration | None = None
    ) -> Coroutine[Any, Any, Any]:
        """The payload of the oldest unread signal of that name, waiting durably for one; each is taken once.

        type: what the payload is validated as, default any JSON value. timeout: a duration from now, default none.
        Awaiting raises SignalTimeoutError, and SignalPayloadError if the payload does not fit (it is consumed).
        Raises InvalidName, InvalidDuration, DefinitionError.
        """
        check_signal_name(name)
        seconds = None if timeout is None else to_seconds(timeout, "timeout")
        codec = codec_for_type(type, f"wait_signal({name!r})")
        return self._wait_signal(name, codec, seconds)

    async def _wait_signal(self, name: str, codec: ValueCodec, seconds: float | None) -> Any:
        def decode(text: str | None) -> Any:
            try:
                return codec.decode("null" if text is None else text)
            except ValueFault as fault:
                raise SignalPayloadError(name, fault.errors, fault.missing) from fault

        try:
            return await self._body.wait_message(MessageWait(name, decode, seconds))
        except TimeoutError:
            if seconds is None:
                raise
            raise SignalTimeoutError(name, seconds) from None

    # -- time and chance, the same on every replay
    def now(self) -> datetime:
        """Run time in UTC: that of the last thing the run waited for."""
        return datetime.fromtimestamp(self._body.now(), UTC)

    def random(self) -> float:
        """A random number in [0, 1)."""
        return self._chance("random").random()

    def uuid(self) -> UUID:
        """A random UUID (version 4)."""
        return UUID(int=self._chance("uuid").getrandbits(128), version=4)

    def _chance(self, what: str) -> Random:
        if step_or_none() is not None:
            raise OutsideBodyError(
                f"ctx.{what}() was called inside a step, where replays would not repeat it: use the module {what}"
            )
        if self._random is None:
            self._random = Random(self._facts.seed)
        return self._random
