"""Spans of runs in one process, and none where nobody has set up a tracer provider."""

import gc
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from perdure import App, Client, Context, Retry, current_step, step, workflow
from perdure.runtime.logs import configure_logs
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.runtime.telemetry import Telemetry
from perdure.runtime.telemetry.tracing import Tracing, remote_context
from perdure.storage.clock import SystemClock

pytestmark = pytest.mark.req("DB7", "WF15")

provider = TracerProvider()  # this module's, never the process's: other tests run untraced
users = provider.get_tracer("users")


@step
def stamp(number: int) -> int:
    """A blocking step whose code traces and logs by itself."""
    logging.getLogger("perdure.shop").info("stamped")
    with users.start_as_current_span("ink"):
        return number + 1


@step(retry=Retry(max_attempts=2, base_delay=0.001))
async def unsteady(number: int) -> int:
    structlog.get_logger("perdure.shop").info("weighed", number=number)
    if current_step().attempt == 1:
        raise ValueError("not yet")
    return number


@workflow(name="seen.parcel", version=3)
async def parcel(ctx: Context, number: int) -> int:
    ctx.log.info("wrapping", number=number)
    number = await ctx.step(unsteady, number)
    await ctx.sleep(0.05)
    return await ctx.step(stamp, number)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return kept


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    root, perdure = logging.getLogger(), logging.getLogger("perdure")
    before = root.handlers[:], root.level, perdure.level
    out = io.StringIO()
    configure_logs(format="json", stream=out)
    yield out
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    perdure.setLevel(before[2])
    structlog.reset_defaults()


@asynccontextmanager
async def running(telemetry: Telemetry | None = None, warm_runs: int = 0) -> AsyncIterator[Runner]:
    settings = Settings(db="sqlite:///:memory:", park_after=0.01, warm_runs=warm_runs)
    runner = Runner(
        App("seen", workflows=[parcel, speechless]), settings, port=False, telemetry=telemetry
    )
    await runner.start()
    try:
        yield runner
    finally:
        await runner.stop()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return int(span.parent.span_id)


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


@pytest.mark.parametrize("warm", [0, 10])
async def test_one_trace_from_the_caller_through_every_step(
    spans: InMemorySpanExporter, warm: int
) -> None:
    async with running(Telemetry(tracing=Tracing(provider)), warm) as runner:
        with users.start_as_current_span("request") as request:
            assert await runner.client.run(parcel, 1, run_id="one") == 2
        info = await runner.client.get("one")
        assert info is not None
        trace_id = f"{request.get_span_context().trace_id:032x}"
        assert info.trace is not None
        assert info.trace.split("-")[1] == trace_id

    [start], runs = named(spans, "start seen.parcel"), named(spans, "run seen.parcel")
    assert parent_of(start) == request.get_span_context().span_id
    # It parked for its sleep: two lives in memory, both below the start; only one that left it replays.
    assert [parent_of(run) for run in runs] == [id_of(start)] * 2
    assert [(run.attributes or {})["perdure.outcome"] for run in runs] == [
        "parked: timer",
        "succeeded",
    ]
    assert [(run.attributes or {})["perdure.replayed"] for run in runs] == [0, 0 if warm else 1]
    first, second = runs
    assert dict(second.attributes or {}) | {"perdure.shard": 0} == {
        "perdure.run_id": "one",
        "perdure.workflow": "seen.parcel",
        "perdure.version": 3,
        "perdure.runner": runner.session.replica_id,
        "perdure.shard": 0,
        "perdure.replayed": 0 if warm else 1,
        "perdure.outcome": "succeeded",
    }
    # A replay makes no span of a step: two attempts in the first life, the blocking step in the second.
    attempts = named(spans, "step unsteady")
    assert [parent_of(span) for span in attempts] == [id_of(first)] * 2
    assert [(span.attributes or {})["perdure.attempt"] for span in attempts] == [1, 2]
    assert [span.status.is_ok for span in attempts] == [False, True]
    [stamped], [ink] = named(spans, "step stamp"), named(spans, "ink")
    assert parent_of(stamped) == id_of(second)
    assert parent_of(ink) == id_of(stamped), "what a thread of a step traces lies below the step"
    of_the_run = [start, *runs, *attempts, stamped, ink]
    assert {f"{span.context.trace_id:032x}" for span in of_the_run if span.context} == {trace_id}
    # Batches serve many runs: traces of their own.
    for name in ("commit", "claim"):
        batches = named(spans, name)
        assert batches
        assert all(span.parent is None for span in batches)
        assert all((span.attributes or {})["perdure.rows"] == 1 for span in batches)
    assert {(s.attributes or {})["perdure.lane"] for s in named(spans, "commit")} == {"small"}


async def test_what_a_step_logs_says_which_run_and_span_it_is_of(
    spans: InMemorySpanExporter, log_lines: io.StringIO
) -> None:
    async with running(Telemetry(tracing=Tracing(provider))) as runner:
        await runner.client.run(parcel, 1, run_id="two")
    lines = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    run = {"run_id": "two", "workflow": "seen.parcel"}
    [wrapping] = [line for line in lines if line["event"] == "wrapping"]
    assert wrapping.items() >= {**run, "number": 1, "logger": "perdure.workflow"}.items()
    first_life = named(spans, "run seen.parcel")[0]
    assert int(wrapping["span_id"], 16) == id_of(first_life)
    for event, name in (("weighed", "unsteady"), ("stamped", "stamp")):
        said = [line for line in lines if line["event"] == event]
        traced = named(spans, f"step {name}")
        assert [line["span_id"] for line in said] == [f"{id_of(span):016x}" for span in traced]
        assert [line["attempt"] for line in said] == list(range(1, len(said) + 1))
        assert all(line.items() >= {**run, "step": name}.items() for line in said)
    outside = [line for line in lines if line["event"] == "runner.ready"]
    assert all("run_id" not in line and "span_id" not in line for line in outside)


async def test_without_a_provider_no_span_is_made(
    monkeypatch: pytest.MonkeyPatch, log_lines: io.StringIO
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a span was made for nobody")

    for tracer in (trace.ProxyTracer, trace.NoOpTracer):
        monkeypatch.setattr(tracer, "start_span", forbidden)
    assert Telemetry.detect(SystemClock()).tracing is None
    gc.collect()
    before = sum(isinstance(each, trace.Span) for each in gc.get_objects())
    async with running() as runner:
        assert runner.telemetry.tracing is None
        for _ in range(20):
            await runner.client.run(parcel, 1)
        assert (await runner.client.list())[0].trace is None
        assert sum(isinstance(each, trace.Span) for each in gc.get_objects()) == before
    said = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    [stamped, *_] = [line for line in said if line["event"] == "stamped"]
    assert stamped["step"] == "stamp"
    assert "trace_id" not in stamped


async def test_a_start_that_is_refused_ends_its_span_and_a_given_trace_is_kept(
    spans: InMemorySpanExporter,
) -> None:
    async with running(Telemetry(tracing=Tracing(provider))) as runner:
        client: Client = runner.client
        given = f"00-{7:032x}-{9:016x}-01"
        await client.run(parcel, 1, run_id="three", trace=given)
        assert (await client.get("three")).trace == given  # type: ignore[union-attr]
        assert named(spans, "start seen.parcel") == []
        assert {parent_of(run) for run in named(spans, "run seen.parcel")} == {9}
        # Any text may be a trace; one that is no traceparent leads nowhere, and does no harm.
        await client.run(parcel, 1, run_id="four", trace="ticket 4711")
        assert sum(run.parent is None for run in named(spans, "run seen.parcel")) == 2


async def test_a_trace_nobody_samples_is_not_recorded_on_the_pod_either(
    spans: InMemorySpanExporter,
) -> None:
    starter = TracerProvider(sampler=ALWAYS_OFF)
    async with running(Telemetry(tracing=Tracing(provider))) as runner:
        unsampled = Tracing(starter)
        given = unsampled.traceparent(unsampled.start("seen.parcel", {}))
        await runner.client.run(parcel, 1, run_id="five", trace=given)
    assert [s for s in spans.get_finished_spans() if s.name not in ("commit", "claim")] == []


async def test_many_starts_share_a_span(spans: InMemorySpanExporter) -> None:
    async with running(Telemetry(tracing=Tracing(provider))) as runner:
        started = await runner.client.start_many(parcel, range(3), source="import")
        for each in started:
            assert each.handle is not None
            await each.handle.wait()
    [start] = named(spans, "start seen.parcel")
    assert (start.attributes or {})["perdure.runs"] == 3
    assert {parent_of(run) for run in named(spans, "run seen.parcel")} == {id_of(start)}


class Hostile(SpanProcessor):
    """What an application may put there: it raises at every span."""

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        if span.name.startswith(("step", "start")):
            raise RuntimeError("a processor that does not know what it wants")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("nor at the end")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not to be printed")


@step(retry=Retry(max_attempts=2, base_delay=0.001))
async def unspeakable(number: int) -> int:
    if current_step().attempt == 1:
        raise Unspeakable
    return number


@workflow(name="seen.unspeakable")
async def speechless(ctx: Context, number: int) -> int:
    return await ctx.step(unspeakable, number)


@pytest.mark.parametrize("hostile", [True, False])
async def test_nothing_that_goes_wrong_with_a_span_goes_wrong_with_a_run(
    log_lines: io.StringIO, hostile: bool
) -> None:
    applications = TracerProvider()
    if hostile:
        applications.add_span_processor(Hostile())
    async with running(Telemetry(tracing=Tracing(applications))) as runner:
        assert await runner.client.run(parcel, 1) == 2
        assert await runner.client.run(speechless, 1) == 1
        assert (await runner.client.start_many(parcel, [1]))[0].error is None
    said = [json.loads(line)["event"] for line in log_lines.getvalue().splitlines()]
    assert said.count("tracing.failed") == 1


@pytest.mark.parametrize("text", [None, "", "00-x", f"00-{1:032x}-{2:016x}-01 ", "a" * 500])
def test_only_a_traceparent_leads_somewhere(text: str | None) -> None:
    assert not trace.get_current_span(remote_context(text)).get_span_context().is_valid
