"""What an error means for whoever started the command: its exit code, and the line that says why.

0 done · 1 it failed (the line says why), or the database or the port cannot be had just now · 2 wrong input or
configuration · 3 the schema is missing or does not fit (the line has the command to run) · 4 a pod was cut short
(`stop_signals`) · 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import threading

from perdure.runtime.cli.output import CommandFailed, say_error
from perdure.runtime.errors import RunNotFound
from perdure.storage.errors import (
    CannotConnect,
    ConfigurationError,
    InputError,
    PerdureError,
    PortTaken,
    SchemaError,
)

OK, FAILED, WRONG_INPUT, WRONG_SCHEMA, INTERRUPTED = 0, 1, 2, 3, 130

LINGER = 2.0
"""Seconds that tasks and threads of the application may hold up the process once its command is over."""


def meaning(error: BaseException) -> tuple[int, str | None]:
    """Exit code, and what is to be said; None: nothing, or Python says it with a traceback."""
    match error:
        case SchemaError():
            return WRONG_SCHEMA, str(error)
        case CannotConnect() | PortTaken():
            return FAILED, str(error)
        case InputError() | RunNotFound() | ConfigurationError():
            return WRONG_INPUT, str(error)
        case CommandFailed() | PerdureError():
            return FAILED, str(error)
        case KeyboardInterrupt():
            return INTERRUPTED, None
        case _:
            return FAILED, None


class Ending:
    """Ends the process `LINGER` seconds from now with this code, unless it has ended by itself: what the application
    has left, a thread or a callback that never ends, must neither keep it nor change its code.

    unsaid: what nobody has said yet; set it to None once somebody else does."""

    def __init__(self, code: int, unsaid: str | None = None) -> None:
        self._code = code
        self.unsaid = unsaid
        timer = threading.Timer(LINGER, self._cut)
        timer.daemon = True
        timer.start()

    def _cut(self) -> None:
        if self.unsaid is not None:
            say_error(self.unsaid)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._code)


def threads_left() -> bool:
    """Whether there are threads that Python would wait for before it ends."""
    own = (threading.main_thread(), threading.current_thread())
    return any(not thread.daemon and thread not in own for thread in threading.enumerate())
