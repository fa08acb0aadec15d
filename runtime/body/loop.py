"""The event loop of one run: a ready queue, durable timers, and a refusal for everything else.

It never waits: the body turns it until the ready queue is empty and then delivers one entry. What asyncio builds
from futures, tasks and timers (gather, TaskGroup, timeout, locks, queues) works on it unchanged; whatever would
reach the operating system is refused by name.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import heapq
import itertools
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NoReturn

from perdure.runtime.body.errors import RefusedInBody
from perdure.runtime.body.task import BodyFuture, BodyTask, Node
from perdure.runtime.body.unwinding import Nothing, unwind
from perdure.storage.clock import to_instant

log = logging.getLogger("perdure.body")

END_OF_TIME = 253_402_300_799.0
"""31 December 9999. A timer due later never fires and is no time to wake at."""

_CHECK_EVERY = 16
"""Callbacks between two looks at the clock."""

_COMPACT_FROM = 64

_Entered = tuple[asyncio.AbstractEventLoop | None, Any]


class _Collector:
    """Whether the cyclic garbage collector is at work. What it frees, it frees at a random moment."""

    def __init__(self) -> None:
        self.at_work = False
        gc.callbacks.append(self._told)

    def _told(self, phase: str, info: dict[str, int]) -> None:
        self.at_work = phase == "start"


_collector = _Collector()


class Handle:
    """A scheduled callback, as asyncio's own but without its private fields."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class Timer(Handle):
    """A durable timer: when it fires, that is an entry. Setting or cancelling one writes nothing.

    due: run time, whole microseconds, never earlier than asked for. name: of a sleep, for people.
    """

    __slots__ = ("due", "key", "loop", "name", "set_at")

    def __init__(
        self,
        loop: RunLoop,
        key: str,
        due: float,
        handle: tuple[Callable[..., object], tuple[Any, ...], contextvars.Context],
        name: str | None = None,
    ) -> None:
        super().__init__(*handle)
        self.loop = loop
        self.key = key
        self.due = due
        self.name = name
        self.set_at = loop.now

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        if self.callback is not None:
            self.loop.timers.pop(self.key, None)
        super().cancel()


class RunLoop(asyncio.AbstractEventLoop):
    """See the module. ``now`` is run time: the time of the last delivered entry; the body moves it.

    name: of the run, for logs. foreign_wake: told (in the host's thread) that another thread tried to wake the body.
    """

    def __init__(self, *, name: str, now: float, foreign_wake: Callable[[Exception], None]) -> None:
        self.name = name
        self.now = now
        self.dead = False
        self.inside = False
        self.replaying = False
        self.ready: collections.deque[Handle] = collections.deque()
        self.timers: dict[str, Timer] = {}
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cleanup_numbers = itertools.count(1)
        self._outside = Node("")
        # asyncio itself holds tasks weakly; then the garbage collector would decide when a forgotten one dies
        # and run its ``finally`` inside another run's turn.
        self._tasks: list[BodyTask] = []
        self._compact_at = _COMPACT_FROM
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] | None = None
        """None until there is one: most bodies have none."""
        self._handler: Callable[[asyncio.AbstractEventLoop, Any], object] | None = None
        self._foreign_wake = foreign_wake
        self._thread = threading.get_ident()

    # -- callbacks
    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        # Not ``context or …``: an empty Context is falsy, and the task would run in another copy at each turn.
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        if self.inside:
            if not self.dead:
                self.ready.append(handle)
        elif not self.dead:
            raise RefusedInBody(
                f"run {self.name}: a future, event, lock or queue of its workflow body was set by other code: "
                "only the body itself may; let a step return the value, or send a signal"
            )
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        if threading.get_ident() == self._thread:
            return self.call_soon(callback, *args, context=context)
        error = RefusedInBody(
            f"run {self.name}: a thread wakes its workflow body "
            f"({getattr(callback, '__qualname__', callback)}): put the thread in a step"
        )
        self._foreign_wake(error)
        raise error

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        if when <= self.now:  # no entry: this depends on run time alone
            return self.call_soon(callback, *args, context=context)
        return self.set_timer(when, callback, args, context)

    def set_timer(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...] = (),
        context: contextvars.Context | None = None,
        name: str | None = None,
    ) -> Timer:
        """A timer that is an entry when it fires, even when it is due already."""
        key = self.node().key("timer")
        context = contextvars.copy_context() if context is None else context
        timer = Timer(self, key, _instant(when), (callback, args, context), name)
        if self.dead:
            return timer
        if not self.inside:
            raise RefusedInBody(f"run {self.name}: a timer was set outside of its workflow body")
        self.timers[key] = timer
        if timer.due < END_OF_TIME:
            heapq.heappush(self._heap, (timer.due, next(self._numbers), timer))
            if len(self._heap) > _COMPACT_FROM + 2 * len(self.timers):
                self._heap = [item for item in self._heap if item[2].callback is not None]
                heapq.heapify(self._heap)
        return timer

    def first_timer(self) -> Timer | None:
        """The timer that is due first; among equals the one that was set first."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    # -- futures and tasks
    def create_future(self) -> BodyFuture:
        return BodyFuture(loop=self, number=next(self._numbers))

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        eager_start: bool | None = None,
    ) -> BodyTask:
        if self.dead:
            coro.close()
            coro = Nothing()
        if _in_as_completed():
            _refuse_coroutine(
                coro,
                "as_completed() over coroutines starts them in no fixed order: give it tasks "
                "(asyncio.create_task or TaskGroup.create_task)",
            )
        if eager_start:
            _refuse_coroutine(coro, "eager tasks in a workflow body: leave eager_start out")
        node = self.node().child()
        return self._add_task(
            coro,
            node,
            next(self._numbers),
            contextvars.copy_context() if context is None else context,
            f"task {node.path}" if name is None else str(name),
        )

    def _add_task(
        self,
        coro: Coroutine[Any, Any, Any],
        node: Node,
        number: int,
        context: contextvars.Context,
        name: str,
    ) -> BodyTask:
        task = BodyTask(coro, loop=self, node=node, number=number, context=context, name=name)
        if len(self._tasks) >= self._compact_at:
            self._tasks = self.pending_tasks()
            self._compact_at = max(_COMPACT_FROM, 2 * len(self._tasks))
        self._tasks.append(task)
        return task

    def pending_tasks(self) -> list[BodyTask]:
        """In creation order: parents before their children."""
        return [task for task in self._tasks if not task.done()]

    def node(self) -> Node:
        """Where the running code stands. Raises RefusedInBody where that has no fixed place."""
        task = asyncio.current_task(self)
        if task is None:
            return self._outside
        if not isinstance(task, BodyTask):
            raise RefusedInBody(
                f"task {task.get_name()!r} was not made by this body's loop (asyncio.Task(…), an eager task factory): "
                "its place is not the same on replay; use asyncio.create_task or TaskGroup.create_task"
            )
        if task.node.cleanup and not self.dead:
            raise RefusedInBody(
                "an abandoned async generator awaits the workflow's context or a timer in its clean-up, which "
                "happens at no fixed time: iterate it inside `async with contextlib.aclosing(…)`"
            )
        return task.node

    # -- turning
    def enter(self) -> _Entered:
        """Become the thread's running loop. Nest it around every turn; give the result to `leave`."""
        before = (asyncio._get_running_loop(), sys.get_asyncgen_hooks())
        self.inside = True
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=self._note_generator, finalizer=self._drop_generator)
        return before

    def leave(self, before: _Entered) -> None:
        self.inside = False
        asyncio._set_running_loop(before[0])
        sys.set_asyncgen_hooks(*before[1])

    def turn(self, end: float) -> bool:
        """Run callbacks until none is ready (True: quiescent) or `time.perf_counter` passes ``end`` (False)."""
        ready = self.ready
        count = 0
        while ready:
            handle = ready.popleft()
            callback = handle.callback
            if callback is not None:
                try:
                    handle.context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    pass  # out of a task: the task holds it, it is that task's failure (R7)
                except BaseException as error:
                    self.call_exception_handler(
                        {"message": f"exception in callback {callback!r}", "exception": error}
                    )
            count += 1
            if not count % _CHECK_EVERY and time.perf_counter() > end:
                return False
        return True

    def _note_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if self._generators is None:
            self._generators = weakref.WeakSet()
        self._generators.add(generator)

    def _drop_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """An async generator nobody iterates any more. Python may call this anywhere, in any thread."""
        if self.dead:
            return
        if _collector.at_work or not self.inside or threading.get_ident() != self._thread:
            # The moment would not be the same on replay.
            log.warning(
                "run %s: async generator %s was dropped at a random moment, its clean-up does not run: "
                "iterate it inside `async with contextlib.aclosing(…)`",
                self.name,
                getattr(generator, "__qualname__", generator),
            )
            return
        # Numbered apart, so that a collection at another moment does not shift the numbers of real tasks.
        number = -next(self._cleanup_numbers)
        node = Node("cleanup", cleanup=True)
        self._add_task(
            generator.aclose(), node, number, contextvars.copy_context(), f"cleanup {-number}"
        )

    def unwind(self) -> list[str]:
        """Close all pending tasks; the loop is dead from here on. Returns the names of those that do not end."""
        self.dead = True
        try:
            return self._close_pending()
        finally:
            self.ready.clear()
            self.timers.clear()
            self._heap.clear()
            self._tasks.clear()

    def _close_pending(self) -> list[str]:
        if not (self._generators or self.pending_tasks()):  # most bodies, at their end
            return []
        before = self.enter()
        # Held: dropped half-closed they would finalise on their own.
        generators = list(self._generators or ())
        try:
            return unwind(self, self._tasks)
        finally:
            self.leave(before)
            del generators

    # -- the rest of what asyncio asks of a loop
    def time(self) -> float:
        return self.now

    def is_running(self) -> bool:
        return self.inside

    def is_closed(self) -> bool:
        return self.dead

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        return None

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, Any], object] | None:
        return self._handler

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, Any], object] | None
    ) -> None:
        self._handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        log.error(
            "run %s: %s", self.name, context.get("message"), exc_info=context.get("exception")
        )

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Silent on replay (it was said in the life that was live) and in a dead loop."""
        if self.dead or self.replaying:
            return
        if self._handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._handler(self, context)
        except BaseException:
            log.exception("run %s: its exception handler failed on %s", self.name, context)


def _instant(when: float) -> float:
    """``when`` as a whole microsecond that is not earlier."""
    if math.isnan(when):
        raise ValueError("a time to wait until is NaN; give a number of seconds")
    if when >= END_OF_TIME:
        return END_OF_TIME
    instant = to_instant(when)
    return instant if instant >= when else to_instant(instant + 1e-6)


def _in_as_completed() -> bool:
    """Whether the caller's caller is `asyncio.as_completed` making tasks of coroutines.

    It puts the coroutines in a set first, so the tasks would be made in the order of addresses.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name not in ("ensure_future", "_ensure_future"):
        return False
    for _ in range(3):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        name = frame.f_code.co_qualname
        if name.startswith(("as_completed", "_AsCompletedIterator")):
            return frame.f_globals is vars(asyncio.tasks)
    return False


def _refuse_coroutine(coro: Coroutine[Any, Any, Any], why: str) -> NoReturn:
    coro.close()
    raise RefusedInBody(why)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refused(self: RunLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedInBody(
            f"loop.{name}() in a workflow body: threads, sockets, subprocesses, operating system signals and other "
            "loops cannot be replayed; put it in a step"
        )

    refused.__name__ = name
    return refused


def _refuse_the_rest() -> None:
    """Whatever asyncio's loops can do and a body's cannot, later Python versions included."""
    for name in dir(asyncio.AbstractEventLoop):
        if not name.startswith("_") and name not in vars(RunLoop):
            setattr(RunLoop, name, _refusal(name))


_refuse_the_rest()
