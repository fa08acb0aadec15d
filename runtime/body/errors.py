"""What a workflow body may not do, said where it is done."""

from __future__ import annotations

import asyncio
import threading

from perdure.storage.errors import PerdureError


class RefusedInBody(PerdureError, RuntimeError):
    """Something that cannot be replayed was used in a workflow body, or the body's context outside of it.

    The message names the construct and says where it belongs. It is raised where the construct is used, so a
    body could catch it; nothing has been started or recorded.
    """


class JournalMismatch(PerdureError):
    """The body did not do what its journal says it did (R14). Never raised inside the body."""


class NoBody(Exception):
    """The body could not be made; the cause says why."""


def where_now() -> str:
    """Which task or thread this is, for messages."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return f"in thread {threading.current_thread().name!r}"
    return "in a callback" if task is None else f"in task {task.get_name()!r} of another loop"
