"""An application that does what it should not.

One file because pods import it by one name, and each misdeed is a few lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

from perdure import App, Context, Retry, WorkflowDefinition, current_step, step, workflow

HEAVY = 2_000_000
LONG_NAME = "schön " * 33 + "ok"
STRANGER: list[asyncio.Future[None]] = []
DONE: list[tuple[str, int]] = []
AT_WORK: list[str] = []
_freed = threading.Event()


def freed() -> threading.Event:
    """Set: the stubborn step ends."""
    return _freed


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise ValueError("no copy")


class Hostile(Exception):
    """Whoever looks at it ends the process."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(5)


# ---- steps ------------------------------------------------------------------------------------


@step
async def number(n: int = 1) -> int:
    return n


@step
async def other(n: int = 1) -> int:
    return n


@step
async def exits() -> None:
    sys.exit(3)


@step
def exits_in_a_thread() -> None:
    sys.exit(3)


@step
async def interrupts() -> None:
    raise KeyboardInterrupt


@step
def interrupts_in_a_thread() -> None:
    raise KeyboardInterrupt


@step
async def closes_itself() -> None:
    raise GeneratorExit


@step
async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@step
async def awaits_what_it_cancelled() -> None:
    sleeping = asyncio.create_task(asyncio.sleep(10))
    sleeping.cancel()
    await sleeping


@step
async def runs_out_of_items() -> None:
    next(iter(()))


@step
def runs_out_of_items_in_a_thread() -> None:
    next(iter(()))


@step
async def recurses() -> None:
    def deeper() -> None:
        deeper()

    deeper()


@step
async def runs_out_of_memory() -> None:
    raise MemoryError("all of it")


@step
async def raises_without_text() -> None:
    raise Mute


@step
async def raises_what_exits_when_read() -> None:
    raise Hostile


@step(retry=Retry(max_attempts=3, base_delay=0.01))
async def raises_what_exits_when_judged() -> None:
    raise Hostile


@step
async def raises_a_book() -> None:
    raise ValueError("x" * 30_000_000)


@step
async def raises_a_long_chain() -> None:
    error = ValueError("first")
    for n in range(3000):
        later = ValueError(n)
        later.__context__, error = error, later
    raise error


@step
async def raises_groups_in_groups() -> None:
    error: Exception = ValueError("innermost")
    for _ in range(2000):
        error = ExceptionGroup("g", [error])
    raise error


@step(retry=Retry(max_attempts=3, base_delay=0.01, retryable=lambda error: sys.exit(1)))
async def has_a_predicate_that_exits() -> None:
    raise ValueError("judge me")


@step
async def returns_an_object() -> Any:
    return object()


@step
async def returns_a_coroutine() -> Any:
    return number.fn()


@step
async def returns_a_generator() -> Any:
    return (n for n in range(3))


@step
async def returns_itself_inside() -> Any:
    itself: list[Any] = []
    itself.append(itself)
    return itself


@step
async def leaves_a_task_that_fails() -> None:
    async def fail() -> None:
        raise RuntimeError("nobody hears this")

    failing = asyncio.create_task(fail())
    await asyncio.wait([failing])


@step(timeout=0.05)
async def swallows_its_time_limit() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(10)
    return "late"


@step
async def blocks_the_loop() -> None:
    time.sleep(0.3)


@step
async def stubborn() -> None:
    """Swallows every cancellation until it is freed."""
    print("stubborn step at work", flush=True)
    AT_WORK.append(current_step().run_id)
    while not freed().is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
    AT_WORK.clear()


STEPS = {
    each.name: each
    for each in (
        exits,
        exits_in_a_thread,
        interrupts,
        interrupts_in_a_thread,
        closes_itself,
        cancels_itself,
        awaits_what_it_cancelled,
        runs_out_of_items,
        runs_out_of_items_in_a_thread,
        recurses,
        runs_out_of_memory,
        raises_without_text,
        raises_what_exits_when_read,
        raises_what_exits_when_judged,
        raises_a_book,
        raises_a_long_chain,
        raises_groups_in_groups,
        has_a_predicate_that_exits,
        returns_an_object,
        returns_a_coroutine,
        returns_a_generator,
        returns_itself_inside,
        leaves_a_task_that_fails,
        swallows_its_time_limit,
        blocks_the_loop,
        stubborn,
    )
}


@workflow(name="one-step")
async def one_step(ctx: Context, name: str) -> str:
    """What the body sees of a step: its result, or its error with its notes and the end of its text."""
    try:
        return f"ok {await ctx.step(STEPS[name])!r}"
    except Exception as error:
        text = str(error)
        notes = " ".join(getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {text[:300]} {text[-60:]} {notes}"


@workflow(name="well-behaved")
async def well_behaved(ctx: Context, n: int) -> int:
    first = await ctx.step(number, n)
    return 1 + sum(await asyncio.gather(ctx.step(number, first), ctx.step(other, n)))


# ---- bodies -----------------------------------------------------------------------------------

BODIES: dict[str, WorkflowDefinition[Any, Any]] = {}


def body(fn: Callable[..., Any]) -> Callable[..., Any]:
    made = workflow(name=fn.__name__.rstrip("_").replace("_", "-"))(fn)
    BODIES[made.name] = made
    return fn


@body
async def exits_(ctx: Context) -> None:
    sys.exit(3)


@body
async def interrupts_(ctx: Context) -> None:
    await ctx.step(number)
    raise KeyboardInterrupt


@body
async def closes_itself_(ctx: Context) -> None:
    await ctx.step(number)
    raise GeneratorExit


@body
async def cancels_itself_(ctx: Context) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await ctx.step(number)


@body
async def recurses_(ctx: Context) -> None:
    def deeper() -> None:
        deeper()

    deeper()


@body
async def runs_out_of_memory_(ctx: Context) -> None:
    raise MemoryError


@body
async def raises_without_text_(ctx: Context) -> None:
    raise Mute


@body
async def raises_a_book_(ctx: Context) -> None:
    raise ValueError("x" * 10_000_000)


@body
async def returns_a_generator_(ctx: Context) -> Any:
    return (n for n in range(3))


@body
async def returns_a_step(ctx: Context) -> Any:
    return ctx.step(number)


@body
async def task_exits(ctx: Context) -> None:
    async def leave() -> None:
        sys.exit(1)

    await asyncio.gather(leave(), ctx.step(number))


@body
async def callback_exits(ctx: Context) -> int:
    asyncio.get_running_loop().call_soon(sys.exit, 1)
    return await ctx.step(number)


@body
async def bare_except_in_a_loop(ctx: Context) -> int:
    @step
    async def fails() -> None:
        raise ValueError("again")

    failures = 0
    while failures < 50:
        try:
            await ctx.step(fails)
        except:  # noqa: E722
            failures += 1
    return failures


@body
async def sleeps_in_the_loop(ctx: Context) -> int:
    time.sleep(0.3)
    return await ctx.step(number)


@body
async def threads(ctx: Context) -> None:
    await asyncio.to_thread(time.sleep, 0.1)


@body
async def another_loop(ctx: Context) -> None:
    asyncio.run(asyncio.sleep(0.1))


@body
async def connects(ctx: Context) -> None:
    await asyncio.open_connection("127.0.0.1", 1)


@body
async def starts_a_process(ctx: Context) -> None:
    await asyncio.create_subprocess_exec("true")


@body
async def context_in_a_step(ctx: Context) -> int:
    @step
    async def inner() -> int:
        return await ctx.step(number)

    return await ctx.step(inner)


@body
async def context_in_a_thread(ctx: Context) -> int:
    async def awaiting(call: Any) -> int:
        return int(await call)

    @step
    def inner() -> int:
        return asyncio.run(awaiting(ctx.step(number)))

    return await ctx.step(inner)


@body
async def context_as_an_argument(ctx: Context) -> None:
    @step
    async def inner(given: Any) -> None: ...

    await ctx.step(inner, ctx)


@body
async def step_of_a_coroutine(ctx: Context) -> None:
    await ctx.step(number(3))  # type: ignore[call-overload]


@body
async def step_of_nothing(ctx: Context) -> None:
    await ctx.step(None)  # type: ignore[call-overload]


@body
async def step_of_a_lambda(ctx: Context) -> None:
    await ctx.step(lambda: 3)


@body
async def wrong_arguments(ctx: Context) -> None:
    await ctx.step(number, 1, 2)  # type: ignore[call-overload]


@body
async def bad_signal_name(ctx: Context) -> None:
    await ctx.wait_signal("a#b")


@body
async def bad_duration(ctx: Context) -> None:
    await ctx.sleep("a while")


@body
async def forgets_a_step(ctx: Context) -> int:
    forgotten = ctx.step(number)
    del forgotten
    return 3


@body
async def awaits_twice(ctx: Context) -> int:
    call = ctx.step(number)
    return await call + await call


@body
async def waits_for_a_stranger(ctx: Context) -> None:
    await STRANGER[0]


@body
async def deep_groups(ctx: Context) -> int:
    async def level(n: int) -> int:
        if n == 0:
            return await ctx.step(number)
        async with asyncio.TaskGroup() as group:
            inner = group.create_task(level(n - 1))
        return inner.result()

    return await level(200)


@body
async def deep_gathers_that_fail(ctx: Context) -> None:
    async def level(n: int) -> None:
        if n == 0:
            raise ValueError("deep")
        await asyncio.gather(level(n - 1))

    await level(300)


@body
async def deep_awaits(ctx: Context) -> int:
    async def level(n: int) -> int:
        return await (level(n - 1) if n else ctx.step(number))

    return await level(500)


@body
async def stops_iterating(ctx: Context) -> int:
    async def numbers() -> AsyncIterator[int]:
        for n in range(5):
            yield await ctx.step(number, n)

    async for n in numbers():
        if n == 2:
            return n
    return -1


@body
async def changes_its_payload(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    payload["a"].append(await ctx.step(number, 2))
    return payload


@body
async def changes_a_list_between_calls(ctx: Context) -> list[list[int]]:
    @step
    async def same(values: list[int]) -> list[int]:
        return values

    values: list[int] = []
    calls = []
    for n in range(3):
        values.append(n)
        calls.append(ctx.step(same, values))
    return await asyncio.gather(*calls)


# ---- runs that last ---------------------------------------------------------------------------


@step
async def spoil(given: dict[str, list[int]]) -> int:
    given["a"].append(9)
    given["b"] = []
    return len(given)


@step
async def same(values: list[int]) -> list[int]:
    return values


@workflow(name="shares")
async def shares(ctx: Context, payload: dict[str, list[int]]) -> list[Any]:
    """Its objects go into steps that change them, before and after a wait."""
    await ctx.step(spoil, payload)
    first = await ctx.step(same, [1])
    first.append(2)
    again = await ctx.step(same, [1])
    await ctx.wait_signal("go")
    return [payload, first, again]


@workflow(name="long")
async def long(ctx: Context, steps: int) -> int:
    total = 0
    for _ in range(steps):
        total += await ctx.step(number)
    await ctx.wait_signal("go")
    return total


@workflow(name="wide")
async def wide(ctx: Context, kind: str) -> int:
    calls = [ctx.step(number) for _ in range(2_000)]
    if kind == "gather":
        return sum(await asyncio.gather(*calls))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return sum(task.result() for task in tasks)


@step
async def bulk() -> str:
    return "x" * HEAVY


@workflow(name="heavy")
async def heavy(ctx: Context, steps: int) -> int:
    texts = await asyncio.gather(*(ctx.step(bulk) for _ in range(steps)))
    await ctx.wait_signal("go")
    return sum(map(len, texts))


@workflow(name="echoes")
async def echoes(ctx: Context, text: str) -> str:
    return text


@workflow(name="listens")
async def listens(ctx: Context, signals: int) -> list[int]:
    return [await ctx.wait_signal("heard", int) for _ in range(signals)]


@workflow(name="keyed", idempotency_key=lambda n: f"key \U0001f511 {n}")
async def keyed(ctx: Context, n: int) -> int:
    return await ctx.step(number, n)


@workflow(name="named")
async def named(ctx: Context, payload: str) -> str:
    same_name = number.with_options(name=LONG_NAME)
    await ctx.step(same_name)
    await ctx.step(same_name)
    assert payload == ctx.run_id
    assert (ctx.tenant, ctx.trace) == (payload, payload)
    return ctx.run_id


@workflow(name="counts")
async def counts(ctx: Context, run_id: str) -> int:
    @step
    async def count(n: int) -> int:
        await asyncio.sleep(0.01)
        DONE.append((run_id, n))
        return n

    for n in range(5):
        await ctx.step(count, n)
    return 5


# ---- cancels ----------------------------------------------------------------------------------


@workflow(name="waits")
async def waits(ctx: Context) -> Any:
    return await ctx.wait_signal("go")


@workflow(name="goes-on")
async def goes_on(ctx: Context) -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await ctx.sleep(1000)
    await ctx.step(number)
    return "all the same"


@workflow(name="compensates")
async def compensates(ctx: Context) -> None:
    try:
        await ctx.sleep(1000)
    finally:
        await ctx.step(number)


@workflow(name="never-ends")
async def never_ends(ctx: Context) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.sleep(1000)


@workflow(name="spins")
async def spins(ctx: Context) -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


@workflow(name="nested")
async def nested(ctx: Context, depth: int) -> Any:
    async def level(n: int) -> Any:
        return await (asyncio.gather(level(n - 1)) if n else ctx.wait_signal("go"))

    return await level(depth)


CANCELLED: list[WorkflowDefinition[Any, Any]] = [waits, goes_on, compensates]


@workflow(name="calls-stubborn")
async def calls_stubborn(ctx: Context) -> None:
    await ctx.step(stubborn)


# ---- other code under a run -------------------------------------------------------------------


def two_versions() -> tuple[WorkflowDefinition[Any, Any], WorkflowDefinition[Any, Any]]:
    """The same workflow with another first step."""

    @workflow(name="edited")
    async def first(ctx: Context) -> int:
        before = await ctx.step(number, 1)
        await ctx.wait_signal("go")
        return before + await ctx.step(number, 1)

    @workflow(name="edited")
    async def second(ctx: Context) -> int:
        before = await ctx.step(other, 1)
        await ctx.wait_signal("go")
        return before + await ctx.step(number, 1)

    return first, second


SOURCE = """
from pydantic import BaseModel
from perdure import Context, step, workflow

class Payload(BaseModel):
    n: int

class Refused(Exception):
    pass

@step(errors=[Refused])
async def refuse(payload: Payload) -> None:
    raise Refused(payload.n)

@workflow(name="reloaded")
async def reloaded(ctx: Context, payload: Payload) -> None:
    refusal = None
    try:
        await ctx.step(refuse, payload)
    except Refused as error:
        refusal = error
    await ctx.wait_signal("go")
    raise refusal
"""


class Loaded:
    """One import of that module."""

    def __init__(self) -> None:
        module = types.ModuleType("reloaded_module")
        sys.modules[module.__name__] = module
        exec(compile(SOURCE, __file__, "exec"), vars(module))
        self.workflow: WorkflowDefinition[Any, Any] = module.reloaded
        self.error: type[Exception] = module.Refused
        self.payload: Callable[..., Any] = lambda n: module.Payload(n=n)


def loaded_twice() -> tuple[Loaded, Loaded]:
    return Loaded(), Loaded()


# ---- for a process of its own -----------------------------------------------------------------

EXITS = ["a task", "a task group", "a callback", "a stop of the loop"]


@step
async def exits_on_the_side(how: str) -> str:
    """Something beside the step tries to end the process."""

    async def leave() -> None:
        sys.exit(7)

    match how:
        case "a task":
            leaving = asyncio.create_task(leave())
            await asyncio.wait([leaving])
        case "a task group":
            async with asyncio.TaskGroup() as group:
                group.create_task(leave())
        case "a callback":
            asyncio.get_running_loop().call_soon(sys.exit, 7)
            await asyncio.sleep(0.05)
        case "a stop of the loop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.05)
    return how


@workflow(name="exits-beside")
async def exits_beside(ctx: Context, how: str) -> str:
    try:
        return await ctx.step(exits_on_the_side, how)
    except Exception as error:
        return f"caught {error}"


@step
async def blocks_for(seconds: float) -> None:
    print("blocking the loop", flush=True)
    time.sleep(seconds)


@workflow(name="calls-blocking")
async def calls_blocking(ctx: Context, seconds: float) -> None:
    await ctx.step(blocks_for, seconds)


@step
def endless_thread() -> None:
    print("endless thread at work", flush=True)
    threading.Event().wait()


@workflow(name="calls-endless-thread")
async def calls_endless_thread(ctx: Context) -> None:
    await ctx.step(endless_thread)


WORKFLOWS: list[WorkflowDefinition[Any, Any]] = [
    well_behaved,
    one_step,
    *BODIES.values(),
    shares,
    long,
    wide,
    heavy,
    echoes,
    listens,
    keyed,
    named,
    counts,
    *CANCELLED,
    never_ends,
    spins,
    nested,
    calls_stubborn,
    exits_beside,
    calls_endless_thread,
    calls_blocking,
]
app = App("careless", workflows=WORKFLOWS)
