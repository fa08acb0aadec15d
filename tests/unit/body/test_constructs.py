"""Every row of the table in docs/asyncio-in-workflows.md, executed live and replayed.

One file because the table is one, and every row has to have a case here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure.runtime.body import Body, Ending, RefusedInBody
from perdure.storage.model import EntryKind
from tests.unit.body.driving import Life, Work, call_of, replay

pytestmark = [
    pytest.mark.req("WF5", "WF6", "WF17"),
    # Refused coroutines are dropped as they are; Python says so whenever it finds them.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

DOCUMENT = Path(__file__).parents[3] / "docs" / "asyncio-in-workflows.md"

Case = Callable[[Body], Coroutine[Any, Any, Any]]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Row:
    construct: str
    verdict: str
    remark: str

    @property
    def words(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.remark)


def table() -> list[Row]:
    lines = DOCUMENT.read_text().splitlines()
    cells = [
        [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line.startswith("|")
    ]
    return [Row(*line) for line in cells[2:]]


ROWS = table()


def case(construct: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        assert construct not in CASES
        CASES[construct] = function
        return function

    return keep


async def step(body: Body, tag: str, seconds: float = 1.0) -> str:
    return str(await body.step(call_of("step", Work(tag, seconds=seconds))))


# -- works


@case("`asyncio.gather`")
async def gather(body: Body) -> Any:
    async def failing() -> None:
        await step(body, "f")
        raise KeyError

    both = await asyncio.gather(step(body, "a", 2), failing(), return_exceptions=True)
    return [str(x) for x in both], await asyncio.gather(step(body, "b"), step(body, "c"))


@case("`asyncio.wait`")
async def wait(body: Body) -> Any:
    tasks = {asyncio.create_task(step(body, str(i), 3 - i % 3)) for i in range(9)}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    rest, _ = await asyncio.wait(pending)
    return [t.get_name() for t in done], [t.get_name() for t in pending], [t.result() for t in rest]


@case("`asyncio.TaskGroup`")
async def task_group(body: Body) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(step(body, tag, 2)) for tag in "abc"]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(step(body, "cut off", 50))
            group.create_task(body.step(call_of("step", Work("bad", "fail"))))
    except ExceptionGroup as failed:
        return [task.result() for task in tasks], repr(failed.exceptions)


@case("`asyncio.create_task`")
async def create_task(body: Body) -> Any:
    plain, named = (
        asyncio.create_task(step(body, "a", 2)),
        asyncio.create_task(step(body, "b"), name="mine"),
    )
    return plain.get_name(), named.get_name(), await plain, await named


@case("`asyncio.shield`")
async def shield(body: Body) -> Any:
    inner = asyncio.create_task(step(body, "kept", 5))
    outer = asyncio.ensure_future(asyncio.shield(inner))
    await step(body, "a")
    outer.cancel()
    return await inner


@case("`asyncio.as_completed` of tasks")
async def as_completed(body: Body) -> Any:
    tasks = [asyncio.create_task(step(body, str(seconds), seconds)) for seconds in (3, 1, 2)]
    return [await future for future in asyncio.as_completed(tasks)]


@case("`asyncio.Queue`")
async def queue(body: Body) -> Any:
    got = []
    for queue in (asyncio.Queue[str](1), asyncio.LifoQueue[str](2), asyncio.PriorityQueue[str](2)):

        async def produce(queue: asyncio.Queue[str] = queue) -> None:
            for tag in "bca":
                await queue.put(await step(body, tag))

        producer = asyncio.create_task(produce())
        await step(body, "wait", 3)
        got += [await queue.get() for _ in range(3)]
        await producer
    return got


@case("`asyncio.Event`")
async def event(body: Body) -> Any:
    event, seen = asyncio.Event(), []

    async def listen(name: str) -> None:
        await event.wait()
        seen.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(listen("first"))
        group.create_task(listen("second"))
        await step(body, "a")
        event.set()
    return seen


@case("`asyncio.Lock`")
async def lock(body: Body) -> Any:
    lock, order = asyncio.Lock(), []

    async def enter(tag: str) -> None:
        async with lock:
            order.append(await step(body, tag, 2))

    await asyncio.gather(*(enter(tag) for tag in "abc"))
    return order, body.now()


@case("`asyncio.Condition`")
async def condition(body: Body) -> Any:
    condition, seen = asyncio.Condition(), []

    async def listen(name: str) -> None:
        async with condition:
            await condition.wait()
            seen.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(listen("first"))
        group.create_task(listen("second"))
        await step(body, "a")
        async with condition:
            condition.notify_all()
    return seen


@case("`asyncio.Semaphore`")
async def semaphore(body: Body) -> Any:
    order = []
    for semaphore in (asyncio.Semaphore(2), asyncio.BoundedSemaphore(2)):

        async def enter(tag: str, seconds: float, semaphore: asyncio.Semaphore = semaphore) -> None:
            async with semaphore:
                order.append(await step(body, tag, seconds))

        await asyncio.gather(enter("a", 3), enter("b", 1), enter("c", 1))
    return order


@case("`asyncio.Barrier`")
async def barrier(body: Body) -> Any:
    barrier = asyncio.Barrier(2)

    async def meet(tag: str, seconds: float) -> tuple[int, str]:
        got = await step(body, tag, seconds)
        return await barrier.wait(), got

    return await asyncio.gather(meet("a", 2), meet("b", 1))


@case("`asyncio.current_task`, `asyncio.all_tasks`")
async def own_tasks(body: Body) -> Any:
    task = asyncio.create_task(step(body, "a"))
    names = [task.get_name() for task in sorted(asyncio.all_tasks(), key=hash)]
    current = asyncio.current_task()
    assert current is not None
    await task
    return names, current.get_name()


@case("`asyncio.sleep(0)`")
async def no_sleep(body: Body) -> Any:
    order = []

    async def other() -> None:
        order.append("other")

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    order.append("body")
    await task
    return order


@case("`asyncio.timeout(0)`")
async def no_time(body: Body) -> Any:
    try:
        async with asyncio.timeout(0):
            await step(body, "a")
    except TimeoutError:
        return "expired"


@case("`loop.call_soon`")
async def call_soon(body: Body) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, "set")
    loop.call_soon_threadsafe(gc.isenabled)
    return await future, await step(body, "a")


@case("`loop.time`")
async def loop_time(body: Body) -> Any:
    times = [asyncio.get_running_loop().time()]
    await step(body, "a", 2.5)
    times.append(asyncio.get_running_loop().time())
    assert times[1] == times[0] + 2.5
    return times


@case("async generators")
async def generators(body: Body) -> Any:
    noted = []

    async def numbers() -> AsyncGenerator[str, None]:
        try:
            for i in range(5):
                yield await step(body, str(i))
        finally:
            noted.append(await step(body, "clean-up"))

    async with contextlib.aclosing(numbers()) as kept:
        async for text in kept:
            noted.append(text)
            if len(noted) == 2:
                break
    return noted, [text async for text in numbers()]


@case("context variables")
async def context_variables(body: Body) -> Any:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("body")

    async def child() -> str:
        variable.set("child")
        await step(body, "a")
        return variable.get()

    return await asyncio.create_task(child()), variable.get()


# -- durable


@case("`asyncio.sleep`")
async def sleep(body: Body) -> Any:
    return await asyncio.sleep(5, "slept"), body.now()


@case("`asyncio.timeout`, `asyncio.timeout_at`")
async def timeout(body: Body) -> Any:
    expired = []
    for scope in (asyncio.timeout(2), asyncio.timeout_at(body.now() + 4)):
        try:
            async with scope:
                await step(body, "long", 50)
        except TimeoutError:
            expired.append(body.now())
    return expired


@case("`asyncio.wait_for`")
async def wait_for(body: Body) -> Any:
    quick = await asyncio.wait_for(step(body, "quick"), 5)
    try:
        await asyncio.wait_for(step(body, "long", 50), 5)
    except TimeoutError:
        return quick, body.now()


@case("`asyncio.wait(timeout=…)`")
async def wait_timeout(body: Body) -> Any:
    tasks = [asyncio.create_task(step(body, str(s), s)) for s in (1, 5, 9)]
    done, pending = await asyncio.wait(tasks, timeout=6)
    return len(done), [await task for task in pending]


@case("`asyncio.as_completed(timeout=…)` of tasks")
async def as_completed_timeout(body: Body) -> Any:
    tasks = [asyncio.create_task(step(body, str(s), s)) for s in (1, 5)]
    got = []
    try:
        for future in asyncio.as_completed(tasks, timeout=3):
            got.append(await future)  # noqa: PERF401
    except TimeoutError:
        return got, await tasks[1]


@case("`loop.call_later`, `loop.call_at`")
async def call_later(body: Body) -> Any:
    loop = asyncio.get_running_loop()
    noted: list[str] = []
    cancelled = loop.call_later(1, noted.append, "never")
    loop.call_at(loop.time() + 2, noted.append, "at")
    loop.call_later(1, noted.append, "later")
    cancelled.cancel()
    await step(body, "a", 3)
    return noted, cancelled.cancelled()


@case("anyio's task groups, `move_on_after`, `sleep`")
async def with_anyio(body: Body) -> Any:
    got: list[str] = []

    async def note(tag: str, seconds: float) -> None:
        got.append(await step(body, tag, seconds))

    async with anyio.create_task_group() as group:
        group.start_soon(note, "a", 3)
        group.start_soon(note, "b", 1)
    with anyio.move_on_after(2) as scope:
        await anyio.sleep(10)
    return got, scope.cancelled_caught, body.now()


# -- refused


@case("`asyncio.as_completed` of coroutines")
async def as_completed_coroutines(body: Body) -> Any:
    for future in asyncio.as_completed([step(body, "a"), step(body, "b")]):
        await future


@case("`asyncio.eager_task_factory`")
async def eager(body: Body) -> Any:
    factory: Any = vars(asyncio)["eager_task_factory"]
    await factory(asyncio.get_running_loop(), step(body, "a"))


@case("`asyncio.Task(…)`")
async def bare_task(body: Body) -> Any:
    await asyncio.Task(step(body, "a"))


@case("`loop.set_task_factory`")
async def task_factory(body: Body) -> Any:
    asyncio.get_running_loop().set_task_factory(None)


@case("`asyncio.to_thread`")
async def to_thread(body: Body) -> Any:
    await asyncio.to_thread(time.sleep, 0)


@case("`loop.run_in_executor`")
async def executor(body: Body) -> Any:
    await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0)


@case("`loop.getaddrinfo`")
async def resolve(body: Body) -> Any:
    await asyncio.get_running_loop().getaddrinfo("localhost", 1)


@case("`asyncio.open_connection`")
async def connect(body: Body) -> Any:
    await asyncio.open_connection("127.0.0.1", 1)


@case("`asyncio.start_server`")
async def serve(body: Body) -> Any:
    await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)


@case("`asyncio.create_subprocess_exec`")
async def subprocess_exec(body: Body) -> Any:
    await asyncio.create_subprocess_exec("true")


@case("`asyncio.create_subprocess_shell`")
async def subprocess_shell(body: Body) -> Any:
    await asyncio.create_subprocess_shell("true")


@case("`loop.add_signal_handler`")
async def signals(body: Body) -> Any:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)


@case("`loop.add_reader`")
async def reader(body: Body) -> Any:
    with socket.socket() as plain:
        asyncio.get_running_loop().add_reader(plain, print)


@case("`loop.run_until_complete`")
async def run_until_complete(body: Body) -> Any:
    loop = asyncio.get_running_loop()
    loop.run_until_complete(loop.create_future())


@case("`loop.stop`")
async def stop(body: Body) -> Any:
    asyncio.get_running_loop().stop()


@case("the context in the clean-up of an abandoned async generator")
async def abandoned_generator(body: Body) -> Any:
    refused: list[BaseException] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            try:
                await step(body, "clean-up")
            except RefusedInBody as error:
                refused.append(error)

    async for _ in numbers():
        break
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    raise refused[0]


@case("the context outside of its body")
async def context_outside(body: Body) -> Any:
    caught: list[BaseException] = []

    async def step_function() -> None:
        await body.sleep(1)

    def thread() -> None:
        try:
            asyncio.run(step_function())
        except RefusedInBody as error:
            caught.append(error)

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join()
    raise caught[0]


@case("a lock, queue or future of a body used by other code")
async def used_by_others(body: Body) -> Any:
    loop: Any = asyncio.get_running_loop()
    before = (None, (None, None))
    loop.leave(before)  # as if a host callback ran now
    try:
        future = asyncio.Future[int](loop=loop)
        future.add_done_callback(print)
        future.set_result(1)
    finally:
        loop.enter()


# -- the run fails, Python's own errors, warnings


@case("a thread that wakes the body")
async def thread_wakes(body: Body) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RefusedInBody):
            loop.call_soon_threadsafe(future.set_result, 1)

    thread = threading.Thread(target=wake)
    thread.start()
    thread.join()
    await future


@case("`asyncio.run`, `asyncio.Runner`")
async def runner(body: Body) -> Any:
    coroutine = asyncio.sleep(0)
    try:
        with contextlib.suppress(RuntimeError):
            asyncio.run(coroutine)
        asyncio.Runner().run(coroutine)
    finally:
        coroutine.close()


@case("a future of another loop")
async def foreign_future(body: Body) -> Any:
    other = asyncio.new_event_loop()
    try:
        await other.create_future()
    finally:
        other.close()


@case("`SystemExit`, `KeyboardInterrupt`")
async def exits(body: Body) -> Any:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    try:
        await asyncio.create_task(interrupted())
    except KeyboardInterrupt:
        sys.exit(3)


@case("a step called and not awaited, or still running at the end")
async def left_behind(body: Body) -> Any:
    body.kept = [step_call(body, "forgotten"), asyncio.create_task(step_call(body, "running"))]  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await step(body, "a", 0.5)


def step_call(body: Body, tag: str) -> Coroutine[Any, Any, Any]:
    return body.step(call_of(tag, Work(tag, seconds=50)))


# -- the table


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert [row.construct for row in ROWS] == list(CASES)


def ending_of(life: Life) -> Ending:
    life.run()
    assert life.ending is not None, life.body.stuck_at()
    return life.ending


def check_works(row: Row, life: Life, ending: Ending) -> None:
    assert ending.kind == "returned", ending.error
    timers = [entry for entry in life.entries if entry.kind is EntryKind.TIMER]
    assert bool(timers) == (row.verdict == "durable")


def check_words(row: Row, life: Life, ending: Ending) -> None:
    error = ending.error
    assert error is not None
    assert isinstance(error, RefusedInBody) == (row.verdict != "Python's own error")
    for words in row.words:
        assert words in str(error)


def check_failed(row: Row, life: Life, ending: Ending) -> None:
    assert ending.kind == "raised"
    if row.words:
        check_words(row, life, ending)
    else:
        assert isinstance(ending.error, SystemExit)


def check_warning(row: Row, life: Life, ending: Ending) -> None:
    assert ending.kind == "returned"
    for words in row.words:
        assert any(words in warning for warning in ending.warnings), ending.warnings


VERDICTS: dict[str, Callable[[Row, Life, Ending], None]] = {
    "works": check_works,
    "durable": check_works,
    "refused": check_words,
    "Python's own error": check_words,
    "fails the run": check_failed,
    "warning": check_warning,
}


@pytest.mark.parametrize("row", ROWS, ids=[row.construct for row in ROWS])
def test_row(row: Row) -> None:
    if "eager" in row.construct and sys.version_info < (3, 12):
        pytest.skip("not applicable: Python 3.11 has no eager tasks")
    main = CASES[row.construct]
    first = Life(main)
    ending = ending_of(first)
    VERDICTS[row.verdict](row, first, ending)
    for upto in (len(first.entries), len(first.entries) // 2, 0):
        again = replay(main, first, upto)
        other = ending_of(again)
        assert (other.kind, type(other.error)) == (ending.kind, type(ending.error)), other.error
        VERDICTS[row.verdict](row, again, other)
        if upto == len(first.entries):
            assert other.value == ending.value
            assert again.entries == first.entries
            assert again.started == []


def test_later_pythons_new_loop_methods_are_refused_too() -> None:
    async def main(body: Body) -> list[str]:
        loop = asyncio.get_running_loop()
        allowed = []
        for name in dir(asyncio.AbstractEventLoop):
            if name.startswith("_"):
                continue
            method = getattr(type(loop), name)
            if "refused" not in method.__qualname__:
                allowed.append(name)
        return allowed

    assert Life(main).run().result() == [
        "call_at",
        "call_exception_handler",
        "call_later",
        "call_soon",
        "call_soon_threadsafe",
        "create_future",
        "create_task",
        "default_exception_handler",
        "get_debug",
        "get_exception_handler",
        "get_task_factory",
        "is_closed",
        "is_running",
        "set_debug",
        "set_exception_handler",
        "time",
    ]


def test_an_async_generator_freed_by_the_collector_is_not_cleaned_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted: list[str] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            noted.append("clean-up")

    async def main(body: Body) -> None:
        generator = numbers()
        await anext(generator)
        circle: list[Any] = [generator]
        circle.append(circle)
        del generator, circle
        gc.collect()
        await step(body, "a")

    Life(main).run().result()
    assert noted == []
    assert "dropped at a random moment" in caplog.text
    assert "aclosing" in caplog.text


def test_wait_for_is_built_differently_before_python_3_12() -> None:
    """Why the document says not to change Python's minor version under runs that are in the middle of one."""
    keys = Life(lambda body: asyncio.wait_for(step(body, "a"), 5)).run().keys()
    assert keys == ["0.0/step#0" if sys.version_info < (3, 12) else "0/step#0"]


def test_timeout_is_built_alike_in_all_pythons() -> None:
    async def main(body: Body) -> None:
        async with asyncio.timeout(5):
            await step(body, "a")

    assert Life(main).run().keys() == ["0/step#0"]
