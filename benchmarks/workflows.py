"""What the benchmarks run: steps that do nothing, so that what is measured is what a step costs."""

from __future__ import annotations

from perdure import App, Context, step, workflow

LARGE = 2 * 1024 * 1024 - 64
"""Bytes of a large result: as much as the limit lets through."""


@step
async def add(number: int) -> int:
    return number + 1


@step
async def write_much(number: int) -> str:
    return "x" * LARGE


@workflow(name="bench.one")
async def one(ctx: Context, number: int) -> int:
    return await ctx.step(add, number)


@workflow(name="bench.ten")
async def ten(ctx: Context, number: int) -> int:
    for _ in range(10):
        number = await ctx.step(add, number)
    return number


@workflow(name="bench.large")
async def large(ctx: Context, steps: int) -> int:
    """Writes so many large results, one after the other."""
    return sum([len(await ctx.step(write_much, n)) for n in range(steps)])


@workflow(name="bench.nobody")
async def nobody(ctx: Context, number: int) -> None:
    """Started, and executed by nobody."""


app = App("bench", workflows=[one, ten, large])
