"""SIGTERM and SIGINT of a pod, heard by a thread that never runs user code.

Python runs its signal handlers in the main thread, between two instructions: code that blocks it delays them. The byte
that the interpreter writes at the very moment of the signal (`signal.set_wakeup_fd`) is read here, in a thread like the
keeper's. It also keeps the deadline of the stop, so that no main loop and no thread of a step can outlast it. Only the
commands listen to signals; a runner inside an application never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import structlog

from perdure.storage.clock import Clock, SystemClock

T = TypeVar("T")

USUAL: Mapping[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
NUMBERS = tuple(USUAL)
CUT_SHORT = 4
"""Exit code of a pod that ended before its running steps did."""
ORDERLY = 2.0
"""Seconds the main loop has to end in order once the deadline is over, or a second signal came."""
TOGETHER = 0.3
"""Seconds within which signals count as one: ``timeout`` signals a process and then its group, and means one."""
GONE = 255
"""What stands for the end of the parent among the numbers of signals."""
LEAVING = 3.0
"""Seconds for the last word to the database when the process is cut."""

log = structlog.get_logger("perdure.cli")

_listening: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class StopSignals:
    """Counts signals, in whatever state the main thread is; and ends the process when the stop takes too long.

    grace: seconds from the first signal on in which running steps may end. begin: called at the first signal. leave:
    called before the process is cut: hand the shards to others. Both are called in a thread of their own.
    Made on the loop that waits; in another thread than the main one no signal can be heard.
    """

    def __init__(
        self,
        *,
        grace: float = 60.0,
        begin: Callable[[], object] = lambda: None,
        leave: Callable[[], object] = lambda: None,
        exit_now: Callable[[int], Any] = os._exit,
        clock: Clock | None = None,
    ) -> None:
        self.count = 0
        self._grace = grace
        self._begin = begin
        self._leave = leave
        self._exit_now = exit_now
        self._clock = clock or SystemClock()
        self._deadline: float | None = None
        self._heard_at = -math.inf
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mine, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        # Python has signal handlers in its main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                signal.signal(number, self._handle)
            self._attach()
        _listening.add(self)
        threading.Thread(target=self._listen, name="perdure-signals", daemon=True).start()

    def close(self) -> None:
        """The pod has ended in order: nobody cuts it any more, and further signals change nothing."""
        self._deadline = None
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")

    def _forget(self) -> None:
        """In a process that a step forked off: its signals are its own. With our handlers it would not end when it is
        told to, and by the descriptor they write to we would hear it."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for number, usual in USUAL.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, usual)
        self._mine.close()
        self._theirs.close()

    def _parent_gone(self) -> None:
        with contextlib.suppress(OSError):
            self._theirs.send(bytes([GONE]))

    # -- in the main thread
    def _attach(self) -> bool:
        """Have the interpreter write to us. False: it wrote to somebody else, or to nobody."""
        before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        return before == self._theirs.fileno()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # An event loop sets its own descriptor each time it begins to run; the byte of this signal went there.
        if not self._attach():
            with contextlib.suppress(OSError):
                self._theirs.send(bytes([number]))

    async def _until(self, count: int) -> None:
        while self.count < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def unless(self, count: int, work: Awaitable[T]) -> tuple[bool, T | None]:
        """(True, its answer) when ``work`` ended first (raises what it raised), (False, None) when ``count`` signals
        did; then ``work`` is cancelled and has ended."""
        task = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self._until(count))
        try:
            await asyncio.wait((task, told), return_when=asyncio.FIRST_COMPLETED)
            return (True, task.result()) if task.done() else (False, None)
        finally:
            for each in (task, told):
                each.cancel()
            await asyncio.wait((task, told))

    # -- in the thread
    def _listen(self) -> None:
        while True:
            deadline = self._deadline
            rest = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            if select.select([self._mine], [], [], rest)[0]:
                for number in self._mine.recv(64):
                    if number == 0:
                        return
                    if number in NUMBERS or (number == GONE and not self.count):
                        self._hear()
            elif self._deadline is not None:
                self._cut()
                return

    def _hear(self) -> None:
        now = self._clock.monotonic()
        if now - self._heard_at < TOGETHER:
            return
        self._heard_at = now
        self.count += 1
        if self.count == 1:
            self._deadline = now + self._grace + ORDERLY
        else:
            self._deadline = min(self._deadline or now, now + ORDERLY)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.set)
        if self.count == 1:
            self._aside(self._begin)

    def _cut(self) -> None:
        self._aside(self._last_words).join(LEAVING)
        self._exit_now(CUT_SHORT)

    def _last_words(self) -> None:
        """In a thread that may hang: whoever blocks the main loop may have the log's lock, too."""
        leaving = self._aside(self._leave)
        log.error(
            "pod.cut",
            what="its main loop did not come to an end in time; others take over what was running",
        )
        leaving.join()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def _aside(self, work: Callable[[], object]) -> threading.Thread:
        """Whatever it waits for, the signals are heard."""
        thread = threading.Thread(target=work, name="perdure-stopping", daemon=True)
        thread.start()
        return thread


def ignore_signals() -> None:
    """The pod has ended, and its exit code stands: at its own end Python would put back what a signal does usually,
    which is to kill."""
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def parent_gone() -> None:
    """The process that keeps this one is gone: stop cleanly, unless that has begun already. Never a second signal: the
    parent may have passed a first one on before it was killed."""
    listening = list(_listening)
    for signals in listening:
        signals._parent_gone()
    if not listening:
        os.kill(os.getpid(), signal.SIGTERM)


class _Forks:
    """What happens around a fork by user code. A signal to the copy waits until its handlers are its own."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def before(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS if _listening else ())

    def in_original(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def in_copy(self) -> None:
        for signals in list(_listening):
            signals._forget()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)


_forks = _Forks()
os.register_at_fork(
    before=_forks.before,
    after_in_parent=_forks.in_original,
    after_in_child=_forks.in_copy,
)
