"""Taking bodies out of memory (R7): silent, complete, and without running what is meant for cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from perdure.runtime.body import Body, MessageWait, unwinding
from tests.unit.body.driving import EPOCH, Life, Work, call_of

pytestmark = pytest.mark.req("SL1")

Main = Callable[[Body], Coroutine[Any, Any, Any]]


def step(body: Body, name: str) -> Any:
    return body.step(call_of(name, Work(name)))


def wait(body: Body, name: str) -> Any:
    return body.wait_message(MessageWait(name, str))


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python could only print: errors of finalisers."""
    lines: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: lines.append(str(args.exc_value)))
    return lines


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture, unraisable: list[str]) -> Iterator[None]:
    """No complaint from asyncio, the garbage collector or the body, unless a test takes it off the list."""
    yield
    gc.collect()
    assert unraisable == []
    assert [record.getMessage() for record in caplog.records] == []


def park(main: Main) -> list[str]:
    """Run until it waits, unwind it, drop everything. Returns the names of what did not end."""
    life = Life(main)
    life.until(lambda: life.quiet > 0 and not life._running and life.body.idle() is not None)
    assert life.ending is None, life.ending
    left = life.body.unwind()
    life.host.run(until=lambda: False, horizon=EPOCH + 1000)
    assert life.ending is None
    return left


def test_handlers_of_cancellations_and_errors_do_not_run() -> None:
    ran: list[str] = []

    async def inner(body: Body) -> None:
        try:
            await wait(body, "s")
        except asyncio.CancelledError:
            ran.append("cancelled")
        finally:
            ran.append("inner finally")
            await step(body, "release")
            ran.append("released")

    async def main(body: Body) -> None:
        try:
            await inner(body)
        except Exception:
            ran.append("failed")
        finally:
            ran.append("outer finally")

    assert park(main) == []
    assert ran == ["inner finally", "outer finally"]


def test_closing_the_outer_frame_would_run_its_error_handler() -> None:
    """Why frames are closed from the innermost outwards."""
    ran: list[str] = []

    async def inner() -> None:
        try:
            await unwinding.Forever()
        finally:
            await unwinding.Forever()

    async def outer() -> None:
        try:
            await inner()
        except Exception as error:
            ran.append(str(error))

    plain = outer()
    plain.send(None)
    plain.close()
    assert ran == ["coroutine ignored GeneratorExit"]
    ran.clear()
    ours = outer()
    ours.send(None)
    assert unwinding.close(ours)
    assert ran == []


def test_async_generators_are_closed_from_the_inside_too() -> None:
    ran: list[str] = []

    async def inner(body: Body) -> None:
        try:
            await wait(body, "s")
        finally:
            ran.append("inner")
            await step(body, "never")

    async def numbers(body: Body) -> AsyncGenerator[int, None]:
        try:
            yield 1
            await inner(body)
            yield 2
        finally:
            ran.append("generator")
            await step(body, "never")

    async def doubled(body: Body) -> AsyncIterator[int]:
        async for number in numbers(body):
            yield number * 2

    async def main(body: Body) -> None:
        try:
            async for _ in doubled(body):
                pass
        except Exception:
            ran.append("failed")
        finally:
            ran.append("main")

    assert park(main) == []
    assert ran == ["inner", "generator", "main"]


def test_generators_that_wait_to_be_iterated_again_are_dropped_in_silence() -> None:
    ran: list[str] = []

    async def numbers(body: Body) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            ran.append("generator")

    async def main(body: Body) -> None:
        async with contextlib.aclosing(numbers(body)) as kept:
            await anext(kept)
            loose = numbers(body)
            await anext(loose)
            await wait(body, "s")

    assert park(main) == []
    assert ran == ["generator"]


def test_every_construct_lets_go() -> None:
    ran: list[str] = []
    variable = contextvars.ContextVar("variable", default=0)

    async def child(body: Body, lock: asyncio.Lock) -> None:
        token = variable.set(1)
        try:
            async with lock:
                await wait(body, "s")
        finally:
            variable.reset(token)
            ran.append("child")

    async def main(body: Body) -> None:
        lock, queue = asyncio.Lock(), asyncio.Queue[int]()
        kept = asyncio.create_task(wait(body, "forgotten"))
        sleeping = asyncio.create_task(asyncio.sleep(1000))
        async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
            group.create_task(child(body, lock))
            group.create_task(child(body, lock))
            group.create_task(queue.get())
            await asyncio.gather(asyncio.shield(kept), asyncio.wait_for(sleeping, 2000))

    assert park(main) == []
    assert ran == ["child", "child"]


def test_a_dead_context_suspends_whatever_is_caught() -> None:
    tried: list[str] = []

    async def main(body: Body) -> None:
        while True:
            try:
                await wait(body, "s")
            except BaseException:
                tried.append("caught")

    assert park(main) == ["body"]
    assert 1 < len(tried) <= unwinding.PATIENCE + 1


def test_what_does_not_end_does_not_keep_the_process() -> None:
    """At the interpreter's exit there is no loop to suspend in; the coroutine must not be finalised then."""
    program = """
import asyncio, sys
from tests.unit.body.driving import Life
async def main(body):
    while True:
        try:
            await asyncio.sleep(1000)
        except:
            pass
life = Life(main)
life.until(lambda: life.quiet > 0)
print(life.body.unwind())
"""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **paths},
    )
    assert answer.stdout == "['body']\n"
    assert answer.stderr == ""


async def test_a_dead_context_kept_by_a_host_task_suspends_it_without_turning() -> None:
    life = Life(lambda body: wait(body, "s"))
    life.until(lambda: life.quiet > 0)
    life.body.unwind()
    task = asyncio.create_task(step(life.body, "late"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    assert type(task.get_coro().cr_await.gi_yieldfrom).__name__ == "FutureIter"  # type: ignore[union-attr]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_dead_loop_swallows_what_dying_code_schedules() -> None:
    ran: list[str] = []

    async def later() -> None:
        ran.append("later")

    async def main(body: Body) -> None:
        try:
            await wait(body, "s")
        finally:
            asyncio.create_task(later())  # noqa: RUF006
            asyncio.get_running_loop().call_soon(ran.append, "soon")
            asyncio.get_running_loop().call_later(1, ran.append, "timer")
            assert asyncio.current_task() is not None
            ran.append("finally")

    assert park(main) == []
    assert ran == ["finally"]


def test_deep_chains_of_awaits_end() -> None:
    async def nest(body: Body, depth: int) -> None:
        try:
            if depth:
                await nest(body, depth - 1)
            else:
                await wait(body, "s")
        finally:
            await step(body, "never") if depth % 7 == 0 and depth < 100 else None

    assert park(lambda body: nest(body, 300)) == []


def test_pending_tasks_live_until_they_are_unwound() -> None:
    ran: list[str] = []

    async def forgotten(body: Body) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ran.append("forgotten")

    async def main(body: Body) -> None:
        asyncio.create_task(forgotten(body))  # noqa: RUF006
        await body.sleep(5)
        gc.collect()
        ran.append("awake")
        await wait(body, "s")

    life = Life(main)
    life.until(lambda: len(life.entries) == 1 and life.body.idle() is not None)
    gc.collect()
    assert ran == ["awake"]
    assert life.body.unwind() == []
    assert ran == ["awake", "forgotten"]


def test_tasks_of_many_runs_do_not_collide_in_asyncios_own_set() -> None:
    """All first tasks have the small hash 0 or so; in the one set of the process they must not all probe one slot."""
    lives = [Life(lambda body: wait(body, "s")) for _ in range(300)]
    for life in lives:
        life.run(horizon=1)
    tasks = [life.body._main for life in lives]
    assert {hash(task) for task in tasks} == {0}
    registered = getattr(asyncio.tasks, "_scheduled_tasks", None) or asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    hashes = {hash(reference) for reference in registered.data if reference() in tasks}
    assert len(hashes) == len(lives)
    for life in lives:
        life.body.unwind()
