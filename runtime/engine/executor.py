"""Running step functions on the host loop (blocking ones in daemon threads), with retries and time-outs.

The first attempt is a direct call. A short back-off is waited out here; a longer one than ``park_after``, and every
failed attempt of a run that was taken over, becomes an entry, so the attempt number never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from perdure.runtime.authoring.current import StepInfo, enter_step, leave_step
from perdure.runtime.authoring.errors import StepTimeoutError
from perdure.runtime.authoring.failures import encode_failure
from perdure.runtime.authoring.retry import next_delay
from perdure.runtime.authoring.step import StepDefinition, StepTarget
from perdure.runtime.authoring.weight import is_heavy
from perdure.runtime.body import StepCall
from perdure.runtime.engine.copies import Original
from perdure.runtime.engine.threads import DaemonThreads, StepThreads
from perdure.runtime.inspection import failure_summary
from perdure.runtime.telemetry import Telemetry
from perdure.storage.clock import Randomness

if TYPE_CHECKING:
    from perdure.runtime.engine.activation import Activation


T = TypeVar("T")

log = structlog.get_logger("perdure.step")


@dataclass(slots=True)
class RunningStep:
    """A step function at work. ``wanted`` turns False when the body or the runner gave it up."""

    info: StepInfo
    call: StepCall
    context: contextvars.Context | None = None
    """What the attempts after the first begin in; None: there is no retry."""
    task: asyncio.Task[None] | None = None
    wanted: bool = True

    def stop(self, *, lost_ownership: bool) -> None:
        """The function gets `CancelledError`; a thread cannot be stopped, its result is thrown away."""
        self.wanted = False
        self.info.lost_ownership = lost_ownership
        if self.task is not None:
            self.task.cancel(
                "lost ownership" if lost_ownership else "the run no longer waits for it"
            )


class StepExecutor:
    """Starts step functions and reports what came of them to the activation, on the host loop.

    may_start: awaited before each attempt; returns while the runner's lease is trusted, so that a runner that was
    frozen or cut off does not begin what another has taken over meanwhile (R2).
    """

    def __init__(
        self,
        host: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        randomness: Randomness,
        *,
        park_after: float,
        result_limit: int,
        may_start: Callable[[], Awaitable[None]],
        threads: StepThreads | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._may_start = may_start
        self._result_limit = result_limit
        self._host = host
        self._original = Original(host)
        self._now = now
        self._randomness = randomness
        self._park_after = park_after
        self._threads = threads or DaemonThreads()
        telemetry = telemetry or Telemetry()
        self._tally = telemetry.tally
        self._tracing = telemetry.tracing
        self._try = self._attempt if telemetry.tracing is None else self._traced_attempt

    def start(
        self,
        run: Activation,
        key: str,
        call: StepCall,
        attempt: int,
        context: contextvars.Context,
        began_at: float | None = None,
    ) -> RunningStep:
        """began_at: when the first attempt began, if this is not it; retry budgets count from there."""
        target: StepTarget = call.target
        info = StepInfo(run_id=run.run.run_id, key=key, name=call.name, attempt=attempt)
        step = RunningStep(info, call)
        if self._tracing is not None and run.span is not run.first_span:
            self._tracing.moved(context, run.first_span, run.span)
        if target.definition.retry is not None:
            step.context = context.copy()
        # Not by the host's task factory: an eager one would run the step before the run knows that it has one.
        step.task = asyncio.Task(
            self._work(run, step, target, began_at), loop=self._host, name=key, context=context
        )
        return step

    async def _work(
        self, run: Activation, step: RunningStep, target: StepTarget, began_at: float | None
    ) -> None:
        """Whatever happens, the run hears of the end of a step it waits for, and the host's loop of nothing (R7)."""
        try:
            await self._attempts(run, step, target, began_at)
        except BaseException as error:
            if step.wanted:
                now = self._now()
                info = step.info
                run.step_done(info.key, info.attempt, None, encode_failure(error), now)

    async def _attempts(
        self, run: Activation, step: RunningStep, target: StepTarget, began_at: float | None
    ) -> None:
        definition, info = target.definition, step.info
        await self._may_start()
        started_at = self._now()
        on_record = began_at is not None  # an entry has a number: later attempts never go below it
        began_at = started_at if began_at is None else began_at
        output, error = await self._try(target, step)
        while True:
            self._tally.attempts += 1
            if error is not None:
                self._tally.attempts_failed += 1
            if not step.wanted:
                return
            if error is None:
                run.step_done(info.key, info.attempt, output, None, started_at)
                return
            delay = self._delay(definition, info.attempt, self._now() - began_at, error)
            text = encode_failure(error)  # with what a predicate of the policy has to say
            _tell(info, text, delay)
            if delay is None:
                run.step_done(info.key, info.attempt, None, text, started_at)
                return
            if delay > self._park_after or run.record_attempts or on_record:
                run.attempt_failed(info.key, info.attempt, text, self._now() + delay, began_at)
                return
            if not await _rested(step, delay):
                return
            info.attempt += 1
            await self._may_start()
            output, error = await self._another(target, step)

    async def _another(
        self, target: StepTarget, step: RunningStep
    ) -> tuple[str | None, BaseException | None]:
        """A further attempt, in a task of its own: it does not see the context variables that one before has set."""
        assert step.context is not None
        return await asyncio.Task(
            self._try(target, step),
            loop=self._host,
            name=step.info.key,
            context=step.context.copy(),
        )

    def _delay(
        self,
        definition: StepDefinition[Any, Any],
        attempt: int,
        elapsed: float,
        error: BaseException,
    ) -> float | None:
        if definition.retry is None:
            return None
        try:
            return next_delay(
                definition.retry,
                attempt=attempt,
                elapsed=elapsed,
                error=error,
                fraction=self._randomness.fraction(),
            )
        except (
            BaseException
        ):  # an error whose own code raises when it is looked at: it is final, and recorded
            return None

    async def _attempt(
        self, target: StepTarget, step: RunningStep
    ) -> tuple[str | None, BaseException | None]:
        """The encoded output, or what went wrong. `SystemExit` is a failure of the step, never the pod's end (R7)."""
        definition = target.definition
        token = enter_step(step.info)
        try:
            if definition.timeout is None and not definition.is_blocking:  # most steps
                args, kwargs = target.arguments()
                value = await definition.fn(*args, **kwargs)
            else:
                value = await self._call(definition, target)
            self._original.end_copy()
            if is_heavy(value):
                return await self._encode_apart(definition, step.call, value), None
            return definition.encode_output(value, limit=self._result_limit), None
        except BaseException as error:
            self._original.end_copy(error)
            return None, error
        finally:
            leave_step(token)

    async def _encode_apart(
        self, definition: StepDefinition[Any, Any], call: StepCall, value: object
    ) -> str:
        """A large result is encoded in a thread, and decoded for the body there as well: on this loop it would keep
        everybody waiting."""

        def both() -> tuple[str, Any]:
            text = definition.encode_output(value, limit=self._result_limit)
            return text, definition.decode_output(text)

        text, decoded = await self.in_thread(both, f"step {definition.name!r}")
        decode = call.decode
        call.decode = lambda output: decoded if output is text else decode(output)
        return text

    async def _traced_attempt(
        self, target: StepTarget, step: RunningStep
    ) -> tuple[str | None, BaseException | None]:
        assert self._tracing is not None
        begun = self._tracing.step(step.info)
        output, error = await self._attempt(target, step)
        self._tracing.end_step(begun, error)
        return output, error

    async def _call(self, definition: StepDefinition[Any, Any], target: StepTarget) -> Any:
        if definition.timeout is None:
            return await self._invoke(definition, target)
        deadline = asyncio.timeout(definition.timeout)
        try:
            async with deadline:
                return await self._invoke(definition, target)
        except TimeoutError as error:
            if deadline.expired():
                raise StepTimeoutError(definition.name, definition.timeout) from error
            raise

    async def _invoke(self, definition: StepDefinition[Any, Any], target: StepTarget) -> Any:
        args, kwargs = target.arguments()
        if not definition.is_blocking:
            return await definition.fn(*args, **kwargs)
        return await self.in_thread(
            lambda: definition.fn(*args, **kwargs), f"step {definition.name!r}"
        )

    async def in_thread(self, function: Callable[[], T], what: str) -> T:
        """What ``function`` returns or raises, in a thread, in a copy of this context."""
        future: asyncio.Future[tuple[Any, BaseException | None]] = self._host.create_future()

        def landed(value: Any, error: BaseException | None) -> None:
            # As a value: a future refuses to hold some errors, and hands others to the loop.
            if not future.done():
                future.set_result((value, error))

        def done(value: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the host loop is closed: nobody is left
                self._host.call_soon_threadsafe(landed, value, error)

        context = contextvars.copy_context()
        self._threads.submit(context, function, done)
        value: T
        value, error = await future
        if isinstance(error, StopIteration):  # no coroutine can raise it
            raise RuntimeError(f"{what} raised StopIteration") from error
        if error is not None:
            raise error
        return value


def _tell(info: StepInfo, failure: str, delay: float | None) -> None:
    """Into the pod's log: an attempt that is followed by another is news, the last one is a warning."""
    facts = {"run_id": info.run_id, "step": info.name, "attempt": info.attempt}
    if delay is None:
        log.warning("step.failed", **facts, error=failure_summary(failure))
    else:
        log.info(
            "step.retrying",
            **facts,
            error=failure_summary(failure),
            again_in=round(delay, 3),
        )


async def _rested(step: RunningStep, delay: float) -> bool:
    """Wait out a short back-off; False when the step is no longer wanted."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(delay)
    return step.wanted
