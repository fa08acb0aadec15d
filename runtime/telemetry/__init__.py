"""Seeing what happens: counts that are always kept, and OpenTelemetry where the application has set it up.

tally          plain numbers of one process, bumped on the hot path: no lock, no object
instruments    what each number is called, for OpenTelemetry's metrics and for /metrics
tracing        spans of starts, runs, steps and batches; made only where a tracer provider is set up
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perdure.runtime.telemetry.tally import Tally
from perdure.storage.clock import Clock, SystemClock
from perdure.storage.model import ClaimedRun, NewRun

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from perdure.runtime.telemetry.tracing import Tracing

__all__ = ["Tally", "Telemetry"]


@dataclass(slots=True)
class Telemetry:
    """What one process counts and traces. tracing: None where no OpenTelemetry SDK is set up; then no span is made.

    replica: the pod's name, known once its port is bound; spans of runs carry it.
    """

    tally: Tally = field(default_factory=Tally)
    tracing: Tracing | None = None
    replica: str = ""
    clock: Clock = field(default_factory=SystemClock)

    @classmethod
    def detect(cls, clock: Clock) -> Telemetry:
        """With spans if a tracer provider is set up now: an application does that before its pod or client starts."""
        # Without an import of ours: whoever has set up a provider has imported the API.
        if "opentelemetry.trace" not in sys.modules:
            return cls(clock=clock)
        from perdure.runtime.telemetry.tracing import Tracing

        return cls(tracing=Tracing.detect(), clock=clock)

    # -- starts
    @contextmanager
    def starting(self, runs: Sequence[NewRun]) -> Iterator[Sequence[NewRun]]:
        """Around the storing of runs of one workflow: they carry the trace of a span that lasts as long.

        A trace that the caller gave is left as it is."""
        tracing = self.tracing
        if tracing is None or not runs or runs[0].trace is not None:
            yield runs
            return
        what = {"perdure.run_id": runs[0].run_id} if len(runs) == 1 else {"perdure.runs": len(runs)}
        span = tracing.start(runs[0].workflow, {"perdure.workflow": runs[0].workflow, **what})
        traceparent = tracing.traceparent(span)
        try:
            yield [replace(run, trace=traceparent) for run in runs]
        except BaseException as error:
            tracing.failed(span, error)
            raise
        tracing.started(span)

    # -- batches: once a statement, so that they may do more than count
    def now(self) -> int:
        """Nanoseconds of this machine's clock, as spans take them."""
        return int(self.clock.now() * 1e9)

    def committed(self, sent: int, runs: int, lane: str) -> None:
        """A commit of so many runs' writes was answered. sent: `now` before it."""
        self.tally.commit_seconds.add((self.now() - sent) / 1e9)
        self.tally.commit_runs.add(runs)
        if self.tracing is not None:
            self.tracing.batch("commit", sent, rows=runs, lane=lane)

    def claimed(self, sent: int, runs: int) -> None:
        """A claim was answered. One that brought nothing is counted and not traced."""
        self.tally.claims += 1
        self.tally.claimed += runs
        self.tally.claim_seconds.add((self.now() - sent) / 1e9)
        if runs and self.tracing is not None:
            self.tracing.batch("claim", sent, rows=runs)

    # -- runs in memory
    def entered(
        self, run: ClaimedRun, shard: int, replayed: int, context: contextvars.Context
    ) -> Span | None:
        """A body is about to be begun in ``context``, with so many entries to replay."""
        self.tally.entered += 1
        self.tally.replayed += replayed
        if self.tracing is None:
            return None
        attributes: dict[str, str | int] = {
            "perdure.run_id": run.run_id,
            "perdure.workflow": run.workflow,
            "perdure.version": run.version,
            "perdure.runner": self.replica,
            "perdure.shard": shard,
            "perdure.replayed": replayed,
        }
        span = self.tracing.run(run.workflow, attributes, run.trace)
        self.tracing.inside(span, context)
        return span

    def left(self, span: Span, outcome: str, error: str | None = None) -> None:
        """The run of that span is not in memory any more."""
        assert self.tracing is not None
        self.tracing.end_run(span, outcome, error)
