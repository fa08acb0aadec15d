"""``perdure serve --processes N``: a small parent that keeps N pods running on this machine.

Each child is a pod like any other, with its own runner, port and replica id. The parent runs no user code: it starts,
restarts and stops. A child holds a pipe to it and stops by itself should the parent be gone, however it went.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import structlog

from perdure.runtime.cli.stop_signals import CUT_SHORT, TOGETHER
from perdure.runtime.settings import Settings
from perdure.storage.clock import Clock, SystemClock

log = structlog.get_logger("perdure.processes")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a crashed child is started again: doubled at each crash that follows soon."""
STEADY = 60.0
"""Seconds after which a child counts as having run well."""
MISCONFIGURED = (2, 3)
"""Exit codes of a child that will never boot with these settings. That the database is away, or a port is taken, is
not among them: a successor is tried until it passes."""


@dataclass(slots=True)
class Child:
    """One pod. number: from 1 on. start_at: when it is to be started, on the monotonic clock; None: it is there, or
    over."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    pipe: int = -1
    started_at: float = 0.0
    start_at: float | None = 0.0
    pause: float = FIRST_PAUSE / 2


def child_options(settings: Settings, number: int) -> list[str]:
    """What makes a child a pod of its own: its port and its name, and that it has no children."""
    port = settings.runner_port + number - 1 if settings.runner_port else 0
    own = {"processes": "1", "runner_port": str(port)}
    if settings.replica_id is not None:
        own["replica_id"] = f"{settings.replica_id}.{number}"
    return [word for key, value in own.items() for word in ("--set", f"{key}={value}")]


def keep_running(arguments: Sequence[str], settings: Settings) -> int:
    """Run ``perdure ARGUMENTS`` as ``settings.processes`` children until a signal; the exit code.

    0: each ended well after the signal. `CUT_SHORT`: some were cut short. Else that of a child that cannot boot, with
    which all end."""
    command = [sys.executable, "-m", "perdure", *arguments]
    return Processes(command, settings, SystemClock()).run()


class Processes:
    """The parent's loop."""

    def __init__(self, command: Sequence[str], settings: Settings, clock: Clock) -> None:
        self._command = command
        self._settings = settings
        self._children = [Child(number) for number in range(1, settings.processes + 1)]
        self._clock = clock
        self._signals = 0
        self._signal_at = -math.inf
        self._noted = 0
        self._told = 0
        self._broken = False
        self._code = 0
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._wake, False)

    def run(self) -> int:
        numbers = (signal.SIGINT, signal.SIGTERM)
        kept = {number: signal.signal(number, self._tell) for number in (*numbers, signal.SIGCHLD)}
        before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        try:
            return self._loop()
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in kept.items():
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._waker)

    def _loop(self) -> int:
        while True:
            self._pass_on()
            for child in self._children:
                self._reap(child)
            self._pass_on()
            for child in self._children:
                self._start_if_due(child)
            if not any(child.process or child.start_at is not None for child in self._children):
                return self._code
            self._pause()

    def _pause(self) -> None:
        """Until a signal or the next start."""
        due = [child.start_at for child in self._children if child.start_at is not None]
        rest = max(0.0, min(due) - self._clock.monotonic()) if due else None
        select.select([self._wake], [], [], rest)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 512)

    def _start_if_due(self, child: Child) -> None:
        if child.start_at is None or self._clock.monotonic() < child.start_at:
            return
        child.start_at = None
        child.started_at = self._clock.monotonic()
        theirs, child.pipe = os.pipe()
        try:
            # A session of its own: Ctrl-C at the terminal reaches the parent alone, which passes it on once.
            child.process = subprocess.Popen(
                [
                    *self._command,
                    *child_options(self._settings, child.number),
                    "--tied-to",
                    str(theirs),
                ],
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except OSError as error:  # no memory, no process, no descriptor left: there may be again
            os.close(child.pipe)
            self._start_again(child)
            log.error(
                "process.not-started",
                process=child.number,
                error=str(error),
                again_in=child.pause,
            )
            return
        finally:
            os.close(theirs)
        log.info("process.started", process=child.number, pid=child.process.pid)

    def _reap(self, child: Child) -> None:
        if child.process is None or (code := child.process.poll()) is None:
            return
        pid, child.process = child.process.pid, None
        os.close(child.pipe)
        if self._told:
            self._ended(code)
        elif code in MISCONFIGURED:
            log.error("process.misconfigured", process=child.number, pid=pid, code=code)
            self._code = code
            self._broken = True
        else:
            self._start_again(child)
            log.error(
                "process.crashed", process=child.number, pid=pid, code=code, again_in=child.pause
            )

    def _start_again(self, child: Child) -> None:
        steady = self._clock.monotonic() - child.started_at >= STEADY
        child.pause = FIRST_PAUSE if steady else min(2 * child.pause, LONGEST_PAUSE)
        child.start_at = self._clock.monotonic() + child.pause

    def _ended(self, code: int) -> None:
        """After a signal. One that was killed then was cut short as well; not one whom the signal itself could kill: a
        pod listens before it runs anything, until after its end."""
        if code and code != -signal.SIGTERM and self._code == 0:
            self._code = CUT_SHORT if code == CUT_SHORT or code < 0 else code

    def _tell(self, number: int, frame: FrameType | None) -> None:
        # Only noted: it may come between the birth of a child and our knowing of it.
        if number == signal.SIGCHLD:
            return
        now = self._clock.monotonic()
        if now - self._signal_at >= TOGETHER:
            self._signal_at = now
            self._signals += 1

    def _pass_on(self) -> None:
        """What the children have not heard yet. Where one of them cannot boot, the others drain already: the first
        signal of an operator asks for nothing more."""
        if self._told >= self._signals > self._noted:
            log.info("process.told", what="all are stopping already; once more lets go at once")
        self._noted = self._signals
        while self._told < max(self._signals, self._broken):
            self._stop()

    def _stop(self) -> None:
        """Tell the children once: the first time begins their drain, the second lets go at once."""
        self._told += 1
        log.info("process.stopping", told=self._told)
        for child in self._children:
            child.start_at = None
            if child.process is not None:
                child.process.terminate()
