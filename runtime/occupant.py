"""Who keeps the main loop from answering, found out from another thread by looking at the main thread's stack.

It costs nothing while nobody asks, and also names code that never gave control back since the runner began.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

from perdure.runtime.body import Body
from perdure.runtime.engine.executor import StepExecutor

_OURS = str(Path(__file__).parents[1])
_TURN = Body._run_slice.__code__
_STEP = StepExecutor._attempt.__code__


def occupant(thread: int) -> str | None:
    """What the thread is executing, such as "the body of run R, at poll (app.py:12)"; None: nothing in particular.

    thread: its `threading.get_ident`."""
    frame = sys._current_frames().get(thread)
    place: str | None = None
    while frame is not None:
        if frame.f_code is _TURN:
            return f"the body of run {frame.f_locals['self']._name}{_at(place)}"
        if frame.f_code is _STEP:
            info: Any = frame.f_locals["step"].info
            return f"step {info.name} of run {info.run_id}{_at(place)}"
        if place is None:
            place = _position(frame)
        frame = frame.f_back
    return place


def _at(place: str | None) -> str:
    return "" if place is None else f", at {place}"


def _position(frame: FrameType) -> str | None:
    """Where that is, in code that is not ours: "function (file:line)"."""
    code = frame.f_code
    own = code.co_filename.startswith(_OURS) or "/asyncio/" in code.co_filename
    return (
        None if own else f"{code.co_qualname} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
    )
