"""What a body does with its context, over the real body."""

import asyncio
import contextvars
import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from perdure.runtime.authoring.context import Context
from perdure.runtime.authoring.current import current_step
from perdure.runtime.authoring.definitions import workflow
from perdure.runtime.authoring.errors import (
    DefinitionError,
    InvalidDuration,
    InvalidName,
    OutsideBodyError,
    RecordedError,
    SignalPayloadError,
    SignalTimeoutError,
    StepInputError,
    StepResultError,
)
from perdure.runtime.authoring.step import step
from perdure.storage.model import EntryKind
from tests.unit.authoring.living import ENTERED, Life, cancel, message


class Order(BaseModel):
    id: int
    tags: list[str] = []


class Approval(BaseModel):
    by: str
    at: datetime | None = None


class Declined(Exception):
    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"declined: {code}")


class Hidden(Exception):
    pass


@step
async def double(n: int) -> int:
    return n * 2


@step(errors=[Declined])
async def decline(code: int) -> None:
    raise Declined(code)


@step
async def hide() -> None:
    raise Hidden("x")


@step
async def misfit() -> int:
    return "many"  # type: ignore[return-value]


async def both_lives(definition: Any, payload: Any = None, **more: Any) -> tuple[Life, Any]:
    """The result of a first life, which a second one repeats from the journal without executing anything."""
    first = Life(definition, payload, **more)
    result = await first.result()
    second = Life(definition, payload, journal=first.entries, **{**more, "messages": ()})
    assert await second.result() == result
    assert second.executed == []
    assert second.entries == first.entries
    return first, result


@pytest.mark.req("WF1", "WF5")
async def test_a_step_gives_its_typed_result_and_is_not_executed_again():
    @workflow
    async def body(ctx: Context, order: Order) -> list[Any]:
        one = await ctx.step(double, order.id)
        order.tags.append("changed")
        two = await ctx.step(double, n=one)
        return [one, two, order.tags]

    first, result = await both_lives(body, Order(id=3))
    assert result == [6, 12, ["changed"]]
    assert len(first.executed) == 2
    assert [json.loads(e.input or "") for e in first.entries] == [{"n": 3}, {"n": 6}]


@pytest.mark.req("WF6")
async def test_steps_under_gather_overlap():
    meeting = asyncio.Barrier(2)

    async def meet(name: str) -> str:
        await meeting.wait()
        return name

    @workflow
    async def body(ctx: Context) -> list[str]:
        return list(await asyncio.gather(ctx.step(meet, "a"), ctx.step(meet, "b")))

    assert (await both_lives(body))[1] == ["a", "b"]


@pytest.mark.req("WF12")
async def test_a_blocking_step_runs_in_a_thread_with_the_bodys_context_variables():
    language = contextvars.ContextVar("language", default="none")

    @step
    def where() -> list[str]:
        language.set("changed in the step")
        return [threading.current_thread().name, current_step().name]

    @step
    def which() -> str:
        return language.get()

    @workflow
    async def body(ctx: Context) -> list[str]:
        language.set("welsh")
        thread, name = await ctx.step(where)
        return [thread, name, await ctx.step(which), language.get()]

    _, (thread, name, seen, kept) = await both_lives(body)
    assert thread != threading.current_thread().name
    assert (name, seen, kept) == ("where", "welsh", "welsh")


@pytest.mark.req("WF7")
async def test_another_input_on_replay_is_a_nondeterminism_naming_both():
    factor = 1

    @workflow
    async def body(ctx: Context) -> int:
        return await ctx.step(double, factor)

    first = Life(body)
    await first.result()
    factor = 5
    ending = await Life(body, journal=first.entries).ends()
    assert ending.kind == "nondeterminism"
    for words in ("double#0", '{"n":1}', '{"n":5}'):
        assert words in str(ending.error)


async def test_a_declared_error_is_caught_by_its_type_and_others_by_name():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        found: list[Any] = []
        try:
            await ctx.step(decline, 7)
        except Declined as error:
            found += [type(error).__name__, error.code, str(error)]
        try:
            await ctx.step(hide)
        except RecordedError as error:
            found += [error.name, error.message]
        return found

    _, result = await both_lives(body)
    assert result == ["Declined", 7, "declined: 7", "Hidden", "x"]


@pytest.mark.req("WF1")
async def test_a_result_that_does_not_fit_fails_the_step():
    @workflow
    async def body(ctx: Context) -> str:
        try:
            await ctx.step(misfit)
        except StepResultError as error:
            return f"{error.step_name}: {error.errors[0]['value']}"
        return "fits"

    first, result = await both_lives(body)
    assert result == "misfit: 'many'"
    assert first.entries[0].status == "error"


async def test_what_cannot_be_a_step_call_is_refused_at_the_call():
    @workflow
    async def body(ctx: Context) -> list[str]:
        refused: list[str] = []
        calls = [
            lambda: ctx.step(double, object()),  # type: ignore[call-overload]
            lambda: ctx.step(double),  # type: ignore[call-overload]
            lambda: ctx.step(5),  # type: ignore[call-overload]
            lambda: ctx.step(lambda: 1),
            lambda: ctx.sleep("soon"),
            lambda: ctx.sleep(-1),
            lambda: ctx.sleep(1, name=" a"),
            lambda: ctx.sleep_until(datetime(2030, 1, 1)),  # noqa: DTZ001
            lambda: ctx.wait_signal("a/b"),
            lambda: ctx.wait_signal("a", timeout="soon"),
            lambda: ctx.wait_signal("a", Context),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                refused.append(type(error).__name__)
        return refused

    first, result = await both_lives(body)
    assert first.entries == []
    assert result == [
        StepInputError.__name__,
        TypeError.__name__,
        DefinitionError.__name__,
        InvalidName.__name__,
        InvalidDuration.__name__,
        InvalidDuration.__name__,
        InvalidName.__name__,
        InvalidDuration.__name__,
        InvalidName.__name__,
        InvalidDuration.__name__,
        DefinitionError.__name__,
    ]


@pytest.mark.req("WF18")
async def test_the_context_knows_its_run():
    @workflow(name="facts", version=7)
    async def body(ctx: Context) -> dict[str, Any]:
        return {
            "run_id": ctx.run_id,
            "workflow": ctx.workflow,
            "version": ctx.version,
            "attempt": ctx.attempt,
            "created_at": ctx.created_at.isoformat(),
            "source": ctx.source,
            "parent_id": ctx.parent_id,
            "trace": ctx.trace,
            "tenant": ctx.tenant,
        }

    facts = {
        "version": 7,
        "attempt": 2,
        "source": "rpc",
        "parent_id": "p",
        "trace": "t",
        "tenant": "acme",
    }
    life, result = await both_lives(body, **facts)
    created = datetime.fromtimestamp(ENTERED - 5, UTC).isoformat()
    assert result == {"run_id": "run-1", "workflow": "facts", "created_at": created, **facts}
    assert repr(life.context) == "<context of 'facts' run 'run-1'>"


# -- waiting
@pytest.mark.req("SL1", "WF11")
async def test_sleeping_moves_run_time_by_what_was_asked():
    @workflow
    async def body(ctx: Context) -> list[float]:
        began = ctx.now()
        await ctx.sleep("7 days", name="patience")
        await ctx.sleep(timedelta(hours=1))
        await ctx.sleep_until(began + timedelta(days=8))
        await ctx.sleep_until(began)
        return [(ctx.now() - began).total_seconds()]

    first, result = await both_lives(body)
    assert result == [pytest.approx(8 * 86_400, abs=5)]
    assert [entry.kind for entry in first.entries] == [EntryKind.TIMER] * 3
    assert "patience" in str(first.events[0].detail)


@pytest.mark.req("WF11")
async def test_time_chance_and_uuids_are_the_same_on_replay():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        seen: list[Any] = [ctx.now(), ctx.random(), str(ctx.uuid())]
        await ctx.step(double, 1)
        return [*(str(x) for x in seen), str(ctx.now()), ctx.random(), str(ctx.uuid())]

    _, result = await both_lives(body)
    assert result[1] != result[4]
    assert result[2] != result[5]
    assert 0 <= result[4] < 1
    assert result[2][14] == "4"  # version
    _, other = await both_lives(body, seed=43)
    assert other[4] != result[4]
    assert str(datetime.fromtimestamp(ENTERED, UTC)) == result[0]


@pytest.mark.req("WF11")
async def test_chance_inside_a_step_is_refused():
    @workflow
    async def body(ctx: Context) -> list[str]:
        async def roll() -> str:
            try:
                return str(ctx.random())
            except OutsideBodyError as error:
                return str(error)

        async def name() -> str:
            try:
                return str(ctx.uuid())
            except OutsideBodyError as error:
                return str(error)

        return [await ctx.step(roll), await ctx.step(name)]

    _, result = await both_lives(body)
    assert "ctx.random() was called inside a step" in result[0]
    assert "ctx.uuid() was called inside a step" in result[1]


@pytest.mark.req("SL2")
async def test_a_signal_is_validated_and_the_oldest_comes_first():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        first = await ctx.wait_signal("approval", Approval, timeout="3 days")
        second = await ctx.wait_signal("approval", Approval)
        return [first.by, first.at is not None, second.by, await ctx.wait_signal("other")]

    stored = [
        message("approval", Approval(by="anna", at=datetime(2030, 1, 1, tzinfo=UTC)), number=1),
        message("other", {"a": [1]}, number=2),
        message("approval", {"by": "berta"}, number=3),
    ]
    _, result = await both_lives(body, messages=stored)
    assert result == ["anna", True, "berta", {"a": [1]}]


@pytest.mark.req("SL2")
async def test_a_signal_that_does_not_come_is_a_timeout():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        began = ctx.now()
        try:
            await ctx.wait_signal("approval", Approval, timeout="3 days")
        except SignalTimeoutError as error:
            waited = (ctx.now() - began).total_seconds()
            return [error.signal_name, error.timeout, waited, isinstance(error, TimeoutError)]
        return []

    _, result = await both_lives(body)
    assert result == ["approval", 259_200.0, pytest.approx(259_200, abs=5), True]


@pytest.mark.req("SL2")
async def test_a_timeout_around_an_endless_wait_is_the_bodys_own():
    @workflow
    async def body(ctx: Context) -> str:
        try:
            async with asyncio.timeout(60):
                await ctx.wait_signal("approval")
        except SignalTimeoutError:
            return "signal"
        except TimeoutError:
            return "own"
        return "none"

    assert (await both_lives(body))[1] == "own"


@pytest.mark.req("SL2")
async def test_a_signal_that_does_not_fit_names_its_fields_and_is_consumed():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        try:
            await ctx.wait_signal("approval", Approval)
        except SignalPayloadError as error:
            bad = [error.signal_name, error.missing_fields, error.errors[1]["field"]]
        return [*bad, (await ctx.wait_signal("approval", Approval)).by]

    stored = [
        message("approval", {"at": "soon"}, number=1),
        message("approval", {"by": "berta"}, number=2),
    ]
    _, result = await both_lives(body, messages=stored)
    assert result == ["approval", ["by"], "at", "berta"]


@pytest.mark.req("SL2")
async def test_a_signal_without_payload_is_none():
    @workflow
    async def body(ctx: Context) -> list[Any]:
        return [await ctx.wait_signal("go"), await ctx.wait_signal("go", int | None)]

    stored = [message("go", None, number=1), message("go", None, number=2)]
    assert (await both_lives(body, messages=stored))[1] == [None, None]


async def test_the_body_sees_that_it_was_cancelled():
    @workflow
    async def body(ctx: Context) -> list[bool]:
        before = ctx.cancelled
        try:
            await ctx.sleep("1 day")
        except asyncio.CancelledError:
            return [before, ctx.cancelled]
        return []

    life = Life(body, messages=[cancel()])
    assert await life.result() == [False, True]
