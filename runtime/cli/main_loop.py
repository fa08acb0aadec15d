"""The event loop of a pod's process: what user code does to it ends neither the loop nor, at the end, hangs it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from perdure.runtime.cli.exit_codes import FAILED, LINGER, Ending, meaning

T = TypeVar("T")

log = structlog.get_logger("perdure.cli")


def run_to_end(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on a loop of its own and return or raise as it does; soon afterwards the process ends, with what
    it returned as exit code, or with that of the error."""
    loop = host_loop()
    asyncio.set_event_loop(loop)
    code, why = FAILED, None
    try:
        code = drive(loop, loop.create_task(main, name="pod"))
        return code
    except BaseException as error:
        code, why = meaning(error)
        raise
    finally:
        ending = Ending(code, why)
        _let_go(loop)
        asyncio.set_event_loop(None)
        loop.close()
        ending.unsaid = None


def host_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, or where it is not installed asyncio's own, with a line that says so."""
    try:
        import uvloop
    except ImportError as error:
        log.warning(
            "loop.plain",
            error=str(error),
            what="uvloop cannot be had here: this pod runs on asyncio's own loop, which is slower",
        )
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def drive(loop: asyncio.AbstractEventLoop, main: asyncio.Task[T]) -> T:
    """Turn the loop until ``main`` has ended. A `SystemExit` or `KeyboardInterrupt` that user code raises in a task or
    callback of its own is that task's failure, and stops nothing else (R7); nor does a stop of the loop."""
    while True:
        try:
            return loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:
            # Until the pod listens to signals, Ctrl-C is a KeyboardInterrupt.
            ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if main.done() or (ours and isinstance(error, KeyboardInterrupt)):
                raise
            _say(error)
        except RuntimeError as error:  # somebody has called the loop's stop()
            if main.done() or loop.is_closed():
                raise
            _say(error)


def _say(error: BaseException) -> None:
    log.error(
        "loop.exit-refused",
        what="a task or callback of the application tried to end the process; it goes on",
        error=repr(error),
    )


def _let_go(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left on the loop; whoever swallows that is given up."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        rest = loop.create_task(_ended(left))
        drive(loop, rest)


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=LINGER / 2)
