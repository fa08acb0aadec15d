"""OpenTelemetry spans: one trace from the starter through every step on every pod.

    start orders.fulfil      where the client is; its traceparent is stored with the run
      run orders.fulfil      each time the run is in a pod's memory, on whatever pod
        step charge          each attempt; what the step's own code traces lies below it, also in threads
    commit, claim            one span a batch, each in a trace of its own: it serves many runs

A replay makes no step spans: those steps are not executed. Instances exist only where a tracer provider is set up.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from perdure.runtime.authoring.current import StepInfo

log = structlog.get_logger("perdure.telemetry")

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NOWHERE = Context()
"""Batches belong to no run's trace."""
_OFF = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)

Token = contextvars.Token[Context]
Attributes = Mapping[str, str | int | float | bool]


P = ParamSpec("P")
R = TypeVar("R")


def _harmless(
    method: Callable[Concatenate[Tracing, P], R],
) -> Callable[Concatenate[Tracing, P], R | None]:
    """None instead of an error: what an exporter, a sampler or a text of the application does wrong stops no run."""

    def careful(self: Tracing, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.say(error)
            return None

    careful.__doc__ = method.__doc__
    return careful


class Tracing:
    """Makes the spans of one process. None of its methods raises; a span that could not be made is None."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("perdure")
        self._said = False

    @classmethod
    def detect(cls) -> Tracing | None:
        """None while no provider is set up: the API's stand-in would make spans that nobody sees."""
        provider = trace.get_tracer_provider()
        return None if isinstance(provider, _OFF) else cls(provider)

    def say(self, error: Exception) -> None:
        """Once: it may be so for every span."""
        if not self._said:
            self._said = True
            log.warning("tracing.failed", error=repr(error), exc_info=error)

    # -- starts
    @_harmless
    def start(self, workflow: str, attributes: Attributes) -> Span:
        """Of a start, below whatever its caller traces. Ended by `started` or `failed`."""
        return self._tracer.start_span(
            f"start {workflow}", kind=SpanKind.PRODUCER, attributes=attributes
        )

    @_harmless
    def traceparent(self, span: Span | None) -> str | None:
        """The span as others continue it, in W3C form."""
        if span is None:
            return None
        own = span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    @_harmless
    def started(self, span: Span | None) -> None:
        """It is stored, or was there before."""
        if span is not None:
            span.end()

    # -- runs
    @_harmless
    def run(self, workflow: str, attributes: Attributes, traceparent: str | None) -> Span:
        """Of a run in memory, on the trace its start has stored; without one in a trace of its own."""
        return self._tracer.start_span(
            f"run {workflow}",
            context=remote_context(traceparent),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
        )

    @_harmless
    def inside(self, span: Span | None, context: contextvars.Context) -> None:
        """Make the span the current one of a context that nobody else uses."""
        if span is not None:
            context.run(otel_context.attach, trace.set_span_in_context(span, _NOWHERE))

    @_harmless
    def moved(self, context: contextvars.Context, first: Span | None, now: Span | None) -> None:
        """A warm body goes on in a later span than the one it was begun in: so do the steps it starts now.

        context: of one attempt. What the body traces itself stays as it is."""
        if now is not None and context.run(trace.get_current_span) is first:
            context.run(otel_context.attach, trace.set_span_in_context(now, _NOWHERE))

    @_harmless
    def end_run(self, span: Span, outcome: str, error: str | None) -> None:
        """outcome: the final status, "parked", or why it left memory otherwise."""
        span.set_attribute("perdure.outcome", str(outcome))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    # -- steps
    @_harmless
    def step(self, info: StepInfo) -> tuple[Span, Token]:
        """Of one attempt, made the current span of the task that calls this. Which run it is of its parent says."""
        attributes: dict[str, str | int] = {
            "perdure.step_key": info.key,
            "perdure.attempt": info.attempt,
        }
        span = self._tracer.start_span(f"step {info.name}", attributes=attributes)
        return span, otel_context.attach(trace.set_span_in_context(span))

    @_harmless
    def end_step(self, begun: tuple[Span, Token] | None, error: BaseException | None) -> None:
        """In the task that began it: the next attempt's span does not lie below this one."""
        if begun is None:
            return
        span, token = begun
        otel_context.detach(token)
        if error is None:
            span.end()
        else:
            self.failed(span, error)

    # -- batches
    @_harmless
    def batch(self, name: str, began: int, *, rows: int, lane: str = "") -> None:
        """One statement that served ``rows`` runs and was answered now. began: `Telemetry.now` before it was sent."""
        attributes: dict[str, str | int] = {"perdure.rows": rows}
        if lane:
            attributes["perdure.lane"] = lane
        span = self._tracer.start_span(
            name, context=_NOWHERE, kind=SpanKind.CLIENT, attributes=attributes, start_time=began
        )
        span.end()

    @_harmless
    def failed(self, span: Span | None, error: BaseException) -> None:
        """End a span with the error it ran into."""
        if span is None:
            return
        try:
            if span.is_recording():
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                span.record_exception(error)
        except BaseException as fault:  # an error whose own text is code of the application (R7)
            self.say(
                RuntimeError(f"an error could not be put into its span: {type(fault).__name__}")
            )
        finally:
            span.end()


def remote_context(traceparent: str | None) -> Context:
    """Where a stored traceparent leads; nowhere if it is none (a start may say any text)."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return _NOWHERE
    parent = SpanContext(
        trace_id=int(found[1], 16),
        span_id=int(found[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(found[3], 16)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), _NOWHERE)
