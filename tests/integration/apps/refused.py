"""Workflows whose input, names and results are tested for what is refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from perdure import Context, WorkflowDefinition, step, workflow

BIG = 3_000_000
"""Bytes; over the limits of payloads, results and signals."""


class Order(BaseModel):
    number: int
    name: str


@step
async def grow() -> str:
    return "x" * BIG


@step
async def odd() -> Any:
    return {1, object()}


@workflow(name="ordered")
async def ordered(ctx: Context, order: Order) -> int:
    return order.number


@workflow(name="plain")
async def plain(ctx: Context) -> None: ...


@workflow(name="any")
async def anything(ctx: Context, payload: Any) -> Any:
    return payload


@workflow(name="waits")
async def waits(ctx: Context) -> int:
    return await ctx.wait_signal("number", int)


@workflow(name="fails")
async def fails(ctx: Context) -> None:
    raise ValueError("as it should")


@workflow(name="keyed", idempotency_key=lambda payload: payload)
async def keyed(ctx: Context, payload: Any) -> None: ...


@workflow(name="grows")
async def grows(ctx: Context, how: str) -> Any:
    match how:
        case "step":
            return len(await ctx.step(grow))
        case "odd step":
            return await ctx.step(odd)
        case "odd result":
            return object()
        case _:
            return "x" * BIG


WORKFLOWS: list[WorkflowDefinition[Any, Any]] = [
    ordered,
    plain,
    anything,
    waits,
    fails,
    keyed,
    grows,
]
