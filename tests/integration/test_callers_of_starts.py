"""What the caller of a start has in its context variables never reaches the body, in whichever life."""

from __future__ import annotations

import contextvars
import decimal
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from perdure import Client, Context, step, workflow
from perdure.runtime.handle import Handle
from perdure.storage.model import RunStatus
from perdure.testing import running
from tests.harness.waiting import until

pytestmark = pytest.mark.req("WF18")

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
lives: list[tuple[str, str, int]] = []
checked: list[str] = []


class Payload(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _check(cls, value: int) -> int:
        checked.append(variable.get())
        return value


@step
async def sees() -> str:
    return variable.get()


@workflow(name="looks-around")
async def looks_around(ctx: Context, payload: Payload) -> None:
    seen = variable.get()
    in_step = await ctx.step(sees)
    lives.append((seen, in_step, decimal.getcontext().prec))
    await ctx.wait_signal("go")


async def started(client: Client, how: str) -> Handle[Any]:
    if how == "start":
        return await client.start(looks_around, Payload(number=1))
    [outcome] = await client.start_many(looks_around, [Payload(number=1)])
    assert outcome.handle is not None
    return outcome.handle


@pytest.mark.parametrize("how", ["start", "start_many"])
async def test_both_lives_see_the_same(how: str) -> None:
    async def parked() -> bool:
        info = await handle.poll()
        return info is not None and info.status is RunStatus.SUSPENDED

    lives.clear()
    precision = decimal.getcontext().prec
    async with running([looks_around], park_after=0, warm_runs=0) as client:
        variable.set("the caller's")
        with decimal.localcontext(prec=5):
            handle = await started(client, how)
            checked.clear()  # the caller's own check of the payload
            await until(parked, what="the wait")
        await handle.signal("go")
        await handle.wait(20)
    assert lives == [("none", "none", precision)] * 2
    assert set(checked) <= {"none"}
