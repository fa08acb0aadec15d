"""An event loop on virtual time, with lanes: callbacks of one process or thread that can be paused or lost together.

Time stands still while anything is ready and then jumps to the next timer. Nothing here asks the operating system
for anything, so the same seed gives the same order of callbacks on every machine.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MOST_CALLBACKS = 3_000_000
"""Of one simulation; one that needs more turns for ever."""


class Lane:
    """What runs as one thread of one process. Its handles know it by their context."""

    __slots__ = ("backlog", "dead", "name", "owner", "paused")

    def __init__(self, name: str, owner: Any = None) -> None:
        self.name = name
        self.owner = owner
        self.dead = False
        self.paused = False
        self.backlog: list[Handle] = []

    def __repr__(self) -> str:
        return f"<lane {self.name}>"


WORLD = Lane("world")
LANE: contextvars.ContextVar[Lane] = contextvars.ContextVar("simulated_lane", default=WORLD)


class Handle:
    """A scheduled callback."""

    __slots__ = ("args", "callback", "context", "due", "lane", "number")

    def __init__(
        self,
        number: int,
        due: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self.number = number
        self.due = due
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.context = context
        self.lane: Lane = context.get(LANE) or WORLD

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.due

    def __lt__(self, other: Handle) -> bool:
        return (self.due, self.number) < (other.due, other.number)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **named: Any) -> None:
        self.number = number
        super().__init__(coro, **named)

    def __hash__(self) -> int:
        return self.number


class NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address."""

    def __init__(self, number: int, **named: Any) -> None:
        self.number = number
        super().__init__(**named)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module. What it does not have (threads, sockets, signals) raises NotImplementedError.

    now: virtual seconds. errors: what callbacks raised and nobody caught."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.errors: list[str] = []
        self.callbacks = 0
        self._ready: deque[Handle] = deque()
        self._timers: list[Handle] = []
        self._numbers = itertools.count(1)
        self._running = False
        self._over = False
        self._tasks: list[
            NumberedTask
        ] = []  # held: what a lost process left behind ends with its world

    # -- running
    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Until ``coro`` has ended. Raises what it raised, RuntimeError when nothing can happen any more."""
        main: asyncio.Task[T] = self.create_task(coro)
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while not main.done():
                if not self._turn() and not main.done():
                    raise RuntimeError("nothing can happen any more: no timer is set")
        finally:
            self._running = False
            asyncio._set_running_loop(before)
        return main.result()

    def _turn(self) -> bool:
        """Everything that is ready, then time moves to the next timer and makes it ready. False: there is none."""
        ready = self._ready
        while ready:
            handle = ready.popleft()
            callback, lane = handle.callback, handle.lane
            if callback is None or lane.dead:
                continue
            if lane.paused:
                lane.backlog.append(handle)
                continue
            self.callbacks += 1
            try:
                handle.context.run(callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.errors.append(f"callback {callback!r} raised {error!r}")
        if self.callbacks > MOST_CALLBACKS:
            raise RuntimeError(f"{MOST_CALLBACKS} callbacks and no end: something turns for ever")
        timers = self._timers
        while timers and (timers[0].callback is None or timers[0].lane.dead):
            heapq.heappop(timers)
        if not timers:
            return False
        self.now = max(self.now, timers[0].due)
        while timers and timers[0].due <= self.now:
            ready.append(heapq.heappop(timers))
        return True

    def pause(self, lane: Lane) -> None:
        lane.paused = True

    def go_on(self, lane: Lane) -> None:
        """What became ready during the pause runs now, in its order."""
        if lane.paused:
            lane.paused = False
            backlog, lane.backlog = lane.backlog, []
            self._ready.extend(backlog)

    def close(self) -> None:
        """What is left never runs. Its finalisers may still call this loop; nothing comes of it."""
        self._over = True
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()

    # -- what asyncio asks of a loop
    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        used = contextvars.copy_context() if context is None else context
        handle = Handle(next(self._numbers), self.now, callback, args, used)
        if not self._over:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        used = contextvars.copy_context() if context is None else context
        handle = Handle(next(self._numbers), when, callback, args, used)
        if not self._over:
            heapq.heappush(self._timers, handle)
        return handle

    def create_future(self) -> NumberedFuture:
        return NumberedFuture(next(self._numbers), loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> NumberedTask:
        number = next(self._numbers)
        named: dict[str, Any] = {"loop": self, "name": name or f"task {number}"}
        if context is not None:
            named["context"] = context
        task = NumberedTask(coro, number, **named)
        if self._over:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        else:
            self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._over:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False
