"""Fields whose default factory gives another answer later or elsewhere: what was recorded still fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel, Field, RootModel, field_serializer

from perdure import Context, workflow
from perdure.runtime.authoring.step import StepTarget, step
from perdure.storage.model import RunStatus
from perdure.testing import running
from tests.harness.waiting import until

pytestmark = pytest.mark.req("WF7")

FIRST, SECOND, THIRD = date(2030, 1, 1), date(2030, 1, 2), date(2030, 1, 3)
answer: list[Any] = [FIRST]


def now() -> Any:
    return answer[0]


@dataclass
class Meta:
    day: date = field(default_factory=now)


class Order(BaseModel):
    id: str
    day: date = Field(default_factory=now)
    tags: list[str] = Field(default_factory=list)
    express: bool = False


@dataclass
class Parcel:
    id: str
    day: date = field(default_factory=now)
    meta: Meta = field(default_factory=Meta)


@dataclass(frozen=True)
class Stamp:
    day: date = field(default_factory=now)


class Written(BaseModel):
    id: str
    day: date = Field(default_factory=now)

    @field_serializer("id")
    def _write(self, value: str) -> str:
        return value.upper()


class Orders(RootModel[list[Order]]):
    pass


class Open(BaseModel, extra="allow"):
    day: date = Field(default_factory=now)


@step
async def look(value: Any, more: Any = None) -> None:
    pass


def call(value: Any, more: Any = None) -> tuple[int, StepTarget]:
    args = (value,) if more is None else (value, more)
    return look.encode_input(args, {})[1], StepTarget(look, args, {})


MAKERS: list[Callable[[date], Any]] = [
    lambda day: Order(id="a", day=day),
    lambda day: Parcel("a", day, Meta(day)),
    lambda day: {"b": [Order(id="a", day=day), (Meta(day), 1, None)], "a": 2.5},
    lambda day: {Stamp(day), Stamp(date(2029, 5, 5))},
    lambda day: Written(id="a", day=day),
    lambda day: Orders([Order(id="a", day=day)]),
    lambda day: Open.model_validate({"day": day, "more": Meta(day)}),
    lambda day: [Order(id=str(n), day=(day, THIRD, SECOND)[n % 3]) for n in range(9)],
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("later", [SECOND, THIRD, date(2031, 7, 7)])
def test_what_was_recorded_fits_whatever_the_factory_says_now(
    make: Callable[[date], Any], later: date
) -> None:
    try:
        for one, other in ((FIRST, later), (later, FIRST)):
            answer[0] = one
            recorded, _ = call(make(FIRST))
            answer[0] = other
            _, target = call(make(FIRST))
            assert target.fits(recorded)
    finally:
        answer[0] = FIRST


def test_another_input_is_another_input() -> None:
    recorded, _ = call(Order(id="a", day=FIRST))
    for other in (
        Order(id="b"),
        Order(id="a", tags=["x"]),
        Order(id="a", express=True),
        {"id": "a"} | {"more": 1},
        "a",
    ):
        assert not call(other)[1].fits(recorded)
    kept, _ = call(Order(id="a", day=SECOND))
    assert not call(Order(id="a", day=THIRD))[1].fits(kept)
    mixed, _ = call([Order(id="a"), Order(id="b", day=SECOND)])
    assert not call([Order(id="a", day=THIRD), Order(id="b", day=THIRD)])[1].fits(mixed)


def test_many_moving_fields_are_looked_at_for_a_limited_time() -> None:
    many = [Order(id=str(n), day=date.fromordinal(700_000 + n)) for n in range(500)]
    assert not call(many)[1].fits(1)


def test_the_text_of_a_stable_factory_is_what_it_was() -> None:
    @dataclass
    class Stable:
        id: str
        currency: str = field(default_factory=lambda: "EUR")
        extra: dict[str, int] = field(default_factory=lambda: {"a": 1})

    assert look.encode_input((Stable("x"),), {})[0] == '{"value":{"id":"x"}}'


class Booking(BaseModel):
    id: str
    day: date = Field(default_factory=now)


@step
async def book(order: Booking) -> str:
    return order.day.isoformat()


@workflow(name="books")
async def books(ctx: Context, order: Booking) -> list[str]:
    first = await ctx.step(book, order)
    await ctx.wait_signal("go")
    second = await ctx.step(book, order)
    await ctx.wait_signal("go")
    return [first, second]


@pytest.mark.req("WF6")
async def test_a_run_goes_on_on_another_day() -> None:
    async def parked() -> bool:
        info = await handle.poll()
        return info is not None and info.status is RunStatus.SUSPENDED

    async def second_recorded() -> bool:
        return len(await client.journal(handle.run_id)) == 3

    try:
        async with running([books], park_after=0, warm_runs=0) as client:
            handle = await client.start(books, Booking(id="x"))
            await until(parked, what="the first wait")
            answer[0] = SECOND
            await handle.signal("go")
            await until(second_recorded, what="the second step")
            await until(parked, what="the second wait")
            answer[0] = THIRD
            await handle.signal("go")
            assert await handle.wait(20) == ["2030-01-01", "2030-01-01"]
    finally:
        answer[0] = FIRST
