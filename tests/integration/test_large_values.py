"""Large values are encoded and decoded off the event loop, and are otherwise like any other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, field_serializer, field_validator

from perdure import Context, StepResultTooLarge, step, workflow
from perdure.runtime.authoring.weight import HEAVY, is_heavy
from tests.integration.in_process import runner_on

_threads: dict[str, set[int]] = {"written": set(), "read": set()}


class Row(BaseModel):
    """Notes in which threads rows are written and read."""

    number: int
    text: str = "0123456789"

    @field_serializer("number")
    def _written(self, number: int) -> int:
        _threads["written"].add(threading.get_ident())
        return number

    @field_validator("number")
    @classmethod
    def _read(cls, number: int) -> int:
        _threads["read"].add(threading.get_ident())
        return number


@step
async def rows(count: int) -> list[Row]:
    return [Row.model_construct(number=n) for n in range(count)]


@workflow(name="many rows")
async def many_rows(ctx: Context, count: int) -> list[Row]:
    found = await ctx.step(rows, count)
    assert [row.number for row in found] == list(range(count))
    return found


@step
async def too_much(count: int) -> list[str]:
    return ["x" * 1000] * count


@workflow(name="too many")
async def too_many(ctx: Context, count: int) -> str:
    try:
        await ctx.step(too_much, count)
    except StepResultTooLarge as error:
        return f"refused: {error}"
    return "taken"


@pytest.mark.req("WF1", "ST1")
async def test_large_results_leave_the_loop_alone(migrated_url: str) -> None:
    here = threading.get_ident()
    async with runner_on(migrated_url, [many_rows, too_many]) as runner:
        for noted in _threads.values():
            noted.clear()
        small = await runner.client.run(many_rows, 3, timeout=20)
        assert [row.number for row in small] == [0, 1, 2]
        assert _threads == {"written": {here}, "read": {here}}

        for noted in _threads.values():
            noted.clear()
        count = 20_000
        large = await runner.client.run(many_rows, count, timeout=60)
        assert [row.number for row in large] == list(range(count))
        assert here not in _threads["written"] | _threads["read"]

        assert (await runner.client.run(too_many, 3_000, timeout=20)).startswith("refused: ")
        assert await runner.client.run(too_many, 500, timeout=20) == "taken"


@dataclass
class Box:
    items: list[Any]


@pytest.mark.parametrize(
    ("value", "heavy"),
    [
        (1, False),
        ("x" * HEAVY, False),
        ("x" * (HEAVY + 1), True),
        (["x" * 300] * 1_000, True),
        (["x" * 300] * 500, False),
        ({str(n): n for n in range(30_000)}, True),
        ({"a": {"b": [[1, 2, 3]] * 50_000}}, True),
        (Box([Row.model_construct(number=n) for n in range(20_000)]), True),
        (Box([]), False),
        ([], False),
        (object(), False),
    ],
)
def test_weights_are_guessed_well_enough(value: object, heavy: bool) -> None:
    assert is_heavy(value) is heavy
