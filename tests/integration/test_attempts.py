"""Each attempt of a step begins with what the body gave it, whatever the attempts before have done to that."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from perdure import Context, Retry, step, workflow
from perdure.testing import running

pytestmark = pytest.mark.req("ST1")

AGAIN = Retry(base_delay=0.01, jitter=False, max_attempts=3)
LATER = Retry(base_delay=0.2, jitter=False, max_attempts=3)
"""Longer than the tests' park_after: the failed attempt is recorded."""

seen: list[Any] = []
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
goes_on = threading.Event()


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()
    goes_on.clear()


@dataclass
class Basket:
    items: list[int] = field(default_factory=list)


def taken(items: list[int], basket: Basket, more: dict[str, int]) -> int:
    seen.append((list(items), list(basket.items), dict(more)))
    items.clear()
    basket.items.append(9)
    more["b"] = 2
    if len(seen) < 3:
        raise ConnectionError
    return len(seen)


@step(retry=AGAIN)
async def takes(items: list[int], basket: Basket, *, more: dict[str, int]) -> int:
    return taken(items, basket, more)


@step(retry=AGAIN)
def takes_in_a_thread(items: list[int], basket: Basket, *, more: dict[str, int]) -> int:
    return taken(items, basket, more)


@step(retry=LATER)
async def takes_later(items: list[int], basket: Basket, *, more: dict[str, int]) -> int:
    return taken(items, basket, more)


def body_with(fn: Callable[..., Any], basket_type: type[Basket] = Basket) -> Any:
    @workflow(name="takes")
    async def body(ctx: Context) -> int:
        found: int = await ctx.step(fn, [1, 2], basket_type([3]), more={"a": 1})
        return found

    return body


@dataclass
class _Outer:
    """Holds a class that pickle does not find."""

    @staticmethod
    def local() -> type[Basket]:
        @dataclass
        class Local(Basket):
            pass

        return Local


@pytest.mark.parametrize("fn", [takes, takes_in_a_thread, takes_later])
@pytest.mark.parametrize("basket_type", [Basket, _Outer.local()])
async def test_an_attempt_does_not_see_what_the_one_before_left(
    fn: Callable[..., Any], basket_type: type[Basket]
) -> None:
    # A long time in memory after the attempt is recorded: the next one is made of the same call.
    park_after = 0.1 if fn is takes_later else 5.0
    body = body_with(fn, basket_type)
    async with running([body], park_after=park_after) as client:
        assert await client.run(body, timeout=20) == 3
    assert seen == [([1, 2], [3], {"a": 1})] * 3


@step(retry=AGAIN, timeout="50ms")
def changes_on(items: list[int]) -> list[int]:
    if not seen:
        seen.append(list(items))
        goes_on.wait(10)  # past its time limit; then it goes on in its thread
        items.append(99)
        return items
    goes_on.set()
    seen.append(list(items))
    return items


@pytest.mark.req("ST3")
async def test_an_attempt_that_timed_out_changes_nothing_of_the_next() -> None:
    @workflow(name="changes-on")
    async def body(ctx: Context) -> list[int]:
        return await ctx.step(changes_on, [1])

    async with running([body]) as client:
        assert await client.run(body, timeout=20) == [1]
    assert seen == [[1], [1]]


@step(retry=AGAIN)
async def sets() -> list[str]:
    seen.append(variable.get())
    variable.set(f"attempt {len(seen)}")
    if len(seen) < 3:
        raise ConnectionError
    return seen


@pytest.mark.req("WF12")
async def test_an_attempt_does_not_see_context_variables_of_the_one_before() -> None:
    @workflow(name="sets")
    async def body(ctx: Context) -> list[str]:
        variable.set("the body's")
        return await ctx.step(sets)

    async with running([body]) as client:
        assert await client.run(body, timeout=20) == ["the body's"] * 3


@step(retry=AGAIN)
async def waits() -> None:
    seen.append("began")
    if len(seen) < 2:
        raise ConnectionError
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


@pytest.mark.req("ST2")
async def test_a_later_attempt_is_cancelled_with_its_run() -> None:
    @workflow(name="waits")
    async def body(ctx: Context) -> None:
        await ctx.step(waits)

    async with running([body]) as client:
        handle = await client.start(body)
        async with asyncio.timeout(20):
            while len(seen) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await handle.cancel("enough")
        with pytest.raises(Exception, match="enough"):
            await handle.wait(20)
    assert seen == ["began", "began", "cancelled"]
