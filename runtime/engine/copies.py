"""Copies of the process, which user code makes when it forks: they end where its code ends.

A copy has our connections' sockets, our claims and our event loop. Going on past the step that forked it, it would
write the run as we do, over the same connection. So the loop of a copy never turns, and a step that returns in one
ends it, as ``sys.exit()`` in it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
import weakref

_copied = 0
"""How often this process is a copy of one that this module was in."""
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class Original:
    """The process that made this. loop: the one that its runner lives on."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._generation = _copied
        if loop is not None:
            _loops.add(loop)

    def end_copy(self, error: BaseException | None = None) -> None:
        """To be called where user code has ended, with what it raised: in a copy this does not return."""
        if self._generation != _copied:
            _end(error)


def _end(error: BaseException | None = None) -> None:
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _in_copy() -> None:
    global _copied
    _copied += 1
    for loop in list(_loops):
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon(_end)


os.register_at_fork(after_in_child=_in_copy)
