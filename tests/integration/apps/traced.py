"""An application that traces: its pods and its starter write their spans to one file, a line each.

`python -m tests.integration.apps.traced URL` starts one parcel below a span of its own and prints its run id.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from perdure import App, Client, Context, step, workflow
from tests.harness.waiting import until

SPANS = "TEST_SPANS"
"""The file."""
GATE = "TEST_GATE"
"""A file: the slow step ends once it exists."""


class FileExporter(SpanExporter):
    """One JSON object a span, in one write each, so that processes can share the file."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Path(os.environ[SPANS]).open("a") as file:
            for span in spans:
                assert span.context is not None
                line = {
                    "name": span.name,
                    "pid": os.getpid(),
                    "trace": f"{span.context.trace_id:032x}",
                    "id": f"{span.context.span_id:016x}",
                    "parent": f"{span.parent.span_id:016x}" if span.parent else None,
                    "attributes": dict(span.attributes or {}),
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
        return SpanExportResult.SUCCESS


if SPANS in os.environ:  # not in the tests' own process
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)
tracer = trace.get_tracer("parcels")


@step
def weigh(number: int) -> int:
    with tracer.start_as_current_span("scales"):
        return number + 1


@step
async def carry(number: int) -> int:
    await until(Path(os.environ[GATE]).exists, what="the gate", deadline=60)
    return number + 1


@workflow(name="traced.parcel")
async def parcel(ctx: Context, number: int) -> int:
    number = await ctx.step(weigh, number)
    return await ctx.step(carry, number)


app = App("traced", workflows=[parcel])


async def main(url: str) -> None:
    async with Client(url, workflows=[parcel]) as client:
        with tracer.start_as_current_span("request"):
            handle = await client.start(parcel, 1)
    print(handle.run_id)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
