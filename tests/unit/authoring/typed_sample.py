"""Checked by mypy, never run: what people write keeps its types. Each ignored line has to be an error.

A superfluous ``type: ignore`` is an error too (strict), so both halves of this file are tests.
"""

import asyncio
from typing import Any, assert_type

from pydantic import BaseModel

from perdure.runtime.authoring.context import Context
from perdure.runtime.authoring.definitions import WorkflowDefinition, workflow
from perdure.runtime.authoring.retry import Retry
from perdure.runtime.authoring.step import step


class Order(BaseModel):
    id: int


class Receipt(BaseModel):
    number: str


@step
async def charge(order: Order, *, twice: bool = False) -> Receipt:
    return Receipt(number=str(order.id))


@step(retry=Retry(max_attempts=5), timeout="3s")
async def pack(order: Order) -> int:
    return order.id


@step
def weigh(text: str) -> float:
    return float(text)


@step(name="weigh again")
def weigh_again(text: str) -> float:
    return float(text)


def plain(a: int) -> list[str]:
    return [str(a)]


async def plain_coroutine(a: int) -> list[str]:
    return [str(a)]


class Billing:
    @step
    async def charge(self, order: Order) -> Receipt:
        return Receipt(number=str(order.id))

    async def bare(self, order: Order) -> Receipt:
        return Receipt(number=str(order.id))


@workflow
async def nothing(ctx: Context) -> None:
    await ctx.sleep(1)


@workflow
async def maybe(ctx: Context, order: Order | None = None) -> int:
    return 0 if order is None else order.id


@workflow(name="orders.fulfil", idempotency_key=lambda order: f"order:{order.id}", version=2)
async def fulfil(ctx: Context, order: Order) -> Receipt:
    receipt = await ctx.step(charge, order, twice=True)
    assert_type(receipt, Receipt)
    assert_type(await ctx.step(weigh, "x"), float)
    assert_type(await ctx.step(weigh_again, text="x"), float)
    assert_type(await ctx.step(plain, 1), list[str])
    assert_type(await ctx.step(plain_coroutine, 1), list[str])
    assert_type(await ctx.step(pack.with_options(name="again", retry=None), order), int)

    billing = Billing()
    assert_type(await ctx.step(billing.charge, order), Receipt)
    assert_type(await ctx.step(billing.bare, order), Receipt)

    count, other = await asyncio.gather(ctx.step(pack, order), ctx.step(charge, order))
    assert_type(count, int)
    assert_type(other, Receipt)
    assert_type(await asyncio.gather(*(ctx.step(pack, order) for _ in range(3))), list[int])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ctx.step(charge, order))
    assert_type(task.result(), Receipt)
    assert_type(await asyncio.wait_for(ctx.step(weigh, "x"), 5), float)

    assert_type(await ctx.wait_signal("approval", Order, timeout="3 days"), Order)
    assert_type(await ctx.wait_signal("approval"), Any)
    assert_type(await charge(order), Receipt)
    assert_type(weigh("1"), float)

    await ctx.step(charge, 1)  # type: ignore[call-overload]
    await ctx.step(charge, order, thrice=True)  # type: ignore[call-arg]
    await ctx.step(weigh)  # type: ignore[call-overload]
    await ctx.step(billing.charge, "order")  # type: ignore[call-overload]
    return receipt


assert_type(fulfil, WorkflowDefinition[Order, Receipt])
assert_type(nothing, WorkflowDefinition[None, None])
assert_type(maybe, WorkflowDefinition[Order | None, int])


@workflow  # type: ignore[arg-type]
def not_a_coroutine(ctx: Context) -> None:
    return None


@workflow  # type: ignore[arg-type]
async def two_payloads(ctx: Context, one: int, two: int) -> None:
    return None
