"""Taking a suspended body out of memory without letting it notice more than it must (R7).

Each pending coroutine is closed: it gets GeneratorExit, never CancelledError, so handlers written for
cancellation (compensations) do not run. Frames are closed from the innermost outwards. ``coroutine.close()`` on an
outer frame would do less well: when an inner ``finally`` awaits something, Python throws the RuntimeError "coroutine
ignored GeneratorExit" into the outer frame, whose ``except Exception`` then runs as if a step had failed; the inner
frame is left to its finaliser, which says the same on ``sys.unraisablehook``. Innermost first, every frame gets the
GeneratorExit itself, and only our own call ever sees that RuntimeError.

Synchronous code in ``finally`` and ``except BaseException`` does run: Python cannot drop a suspended coroutine
without it. (In an async generator suspended in an ``await`` too.)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import types
from collections.abc import Coroutine, Generator, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.runtime.body.loop import RunLoop
    from perdure.runtime.body.port import StepCall
    from perdure.runtime.body.steps import StepWait
    from perdure.runtime.body.task import BodyTask

PATIENCE = 64
"""How often one task may wait for something new while it is being closed, before it is given up."""

_NOT_THEIRS = (str(Path(asyncio.__file__).parent), str(Path(__file__).parent))

# Objects that stand between frames and show what they drive only to the garbage collector.
_LINKS = ("async_generator_asend", "async_generator_athrow", "anext_awaitable", "coroutine_wrapper")


class Forever:
    """Awaiting it suspends until closed: what a dead context does. Raising could be caught and would spin.

    In a task of another loop (a step that was given the context) it waits there for a future nobody sets, so that the
    task can be cancelled and does not keep that loop busy. It also works where no loop runs: when Python finalises a
    coroutine that swallowed every close, at the end of the process for instance.
    """

    def __init__(self, own: asyncio.AbstractEventLoop | None = None) -> None:
        self._own = own

    def __await__(self) -> Generator[Any, None, None]:
        while True:
            loop = asyncio._get_running_loop()
            if loop is None or loop is self._own:
                yield
            else:
                yield from loop.create_future()


class Nothing(Coroutine[Any, Any, None]):
    """Stands in for a coroutine that was handed to a dead loop."""

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, *args: Any) -> Any:
        raise StopIteration

    def close(self) -> None:
        return None

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def unwind(loop: RunLoop, tasks: Iterable[BodyTask]) -> list[str]:
    """Close every pending task, parents first, each in its own Context. Returns the names of those that go on.

    The loop must be dead and entered: then whatever the dying code schedules is swallowed.
    """
    survivors = []
    for task in tasks:
        if task.done():
            continue
        coroutine = task.get_coro()
        if not task.home.run(_close_as, loop, task, coroutine):
            survivors.append(task.get_name())
            _keep_for_ever(coroutine)
    return survivors


def _keep_for_ever(coroutine: object) -> None:
    """One reference nobody gives back. A finaliser would run the code inside somebody else's turn, or, at the
    interpreter's exit, where no loop is left to suspend in: ``while True: try: await … except: …`` would never exit.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _close_as(loop: RunLoop, task: BodyTask, coroutine: object) -> bool:
    """Close with ``task`` as the current task, which libraries check when they leave a scope."""
    try:
        asyncio.tasks._enter_task(loop, task)
    except RuntimeError:
        # From Python 3.14 on a thread has one running task, and the host's may be it: close without.
        return close(coroutine)
    try:
        return close(coroutine)
    finally:
        asyncio.tasks._leave_task(loop, task)


def close(outermost: object) -> bool:
    """Close a suspended coroutine and all it awaits, innermost first. False: it does not end."""
    stack = [outermost]
    closed: list[object] = []
    patience = PATIENCE
    while stack:
        frame = stack[-1]
        deeper = awaited(frame)
        if deeper is not None and not _finished(deeper) and not any(x is deeper for x in closed):
            stack.append(deeper)
        elif _close_one(frame):
            closed.append(stack.pop())
        else:
            patience -= 1
            if patience == 0:
                return False
    return True


def _close_one(frame: Any) -> bool:
    """GeneratorExit into one frame; what comes out does not matter. False: it awaits something new."""
    if type(frame).__name__ in _LINKS[:2]:
        try:
            frame.throw(GeneratorExit)
        except BaseException:
            return True
        return False
    try:
        frame.close()
    except RuntimeError as error:
        if isinstance(frame, types.CoroutineType | types.GeneratorType):
            return _finished(frame)
        return "ignored GeneratorExit" not in str(error)
    except BaseException:
        return True
    return True


def awaited(frame: object) -> object | None:
    """What a suspended frame waits for, if that can be closed itself: a coroutine, a generator, a link to one."""
    inner: object | None = None
    if isinstance(frame, types.CoroutineType):
        inner = frame.cr_await
    elif isinstance(frame, types.GeneratorType):
        inner = frame.gi_yieldfrom
    elif type(frame).__name__ in _LINKS:
        inner = _driven(frame)
    return inner if _closable(inner) else None


def _driven(link: object) -> object | None:
    inner: object
    for inner in gc.get_referents(link):
        if isinstance(inner, types.AsyncGeneratorType):
            awaiting: object | None = inner.ag_await
            return awaiting
        if _closable(inner):
            return inner
    return None


def _closable(thing: object) -> bool:
    return (
        isinstance(thing, types.CoroutineType | types.GeneratorType)
        or type(thing).__name__ in _LINKS
    )


def _finished(frame: object) -> bool:
    if isinstance(frame, types.CoroutineType):
        return frame.cr_frame is None
    if isinstance(frame, types.GeneratorType):
        return frame.gi_frame is None
    return False


def left_behind(
    not_awaited: Iterable[StepCall], waits: Mapping[str, StepWait], tasks: Iterable[BodyTask]
) -> tuple[str, ...]:
    """Sentences for what a body's end cuts off: calls of steps, steps by key, tasks."""
    warnings = [
        f"step {call.name!r} was called and never awaited: it did not run" for call in not_awaited
    ]
    warnings += [
        f"step {wait.call.name!r} ({key}) was still "
        f"{'running' if wait.running else 'waiting to start'} when the body ended: "
        "it is cancelled, nothing of it is recorded"
        for key, wait in waits.items()
    ]
    warnings += [
        f"{task.get_name()!r} was still pending when the body ended, at {position(task.get_coro())}"
        for task in tasks
    ]
    return tuple(warnings)


def position(coroutine: object) -> str:
    """Where a suspended coroutine waits, in code that is neither asyncio's nor ours: "function (file:line)"."""
    best = "its end"
    frame: object | None = coroutine
    while frame is not None:
        code_frame = getattr(frame, "cr_frame", None) or getattr(frame, "gi_frame", None)
        if isinstance(code_frame, types.FrameType):
            code = code_frame.f_code
            if best == "its end" or not code.co_filename.startswith(_NOT_THEIRS):
                place = f"{PurePath(code.co_filename).name}:{code_frame.f_lineno}"
                best = f"{code.co_qualname} ({place})"
        frame = awaited(frame)
    return best
