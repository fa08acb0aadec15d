"""Where a task stands in its run, and tasks and futures whose sets iterate alike in each life."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.runtime.body.loop import RunLoop

PATH_LIMIT = 120
"""Longer paths are shortened to a digest of themselves, so that a key fits every engine's index."""


class Node:
    """A place in the tree of a run's tasks: "" outside of tasks, "0" the body, "0.2" the third task it made.

    Children are numbered in creation order; names are counted here, so branches never share a key (R13).
    """

    __slots__ = ("_children", "_counts", "cleanup", "path")

    def __init__(self, path: str, *, cleanup: bool = False) -> None:
        self.path = path
        self.cleanup = cleanup
        """Clean-up of an abandoned async generator: it may run at any time, so it has no place in the journal."""
        self._children = 0
        self._counts: dict[str, int] = {}

    def child(self) -> Node:
        number = self._children
        self._children += 1
        path = f"{self.path}.{number}" if self.path else str(number)
        if len(path) > PATH_LIMIT:
            path = "~" + blake2b(path.encode(), digest_size=16).hexdigest()
        return Node(path, cleanup=self.cleanup)

    def key(self, name: str) -> str:
        """The key of the next use of ``name`` here: path + "/" + name + "#" + occurrence."""
        occurrence = self._counts.get(name, 0)
        self._counts[name] = occurrence + 1
        return f"{self.path}/{name}#{occurrence}"


class BodyTask(asyncio.Task[Any]):
    """A task of a body. It knows its node, and hashes by creation order.

    Sets of tasks (`asyncio.wait`, `TaskGroup`) iterate by hash; by address they would iterate differently in each
    life. The node hangs on the task rather than on a context variable because tasks may share a Context.
    """

    __slots__ = ("_number", "home", "node")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        loop: RunLoop,
        node: Node,
        number: int,
        context: contextvars.Context,
        name: str,
    ) -> None:
        self.node = node
        self.home = context
        # asyncio registers the new task in one weak set per process: there the small numbers of all runs
        # would collide, so that one hash is the usual one. Nobody else has seen the task yet.
        self._number = object.__hash__(self)
        super().__init__(coroutine, loop=loop, context=context, name=name)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class BodyFuture(asyncio.Future[Any]):
    """A future made by the body's loop; hashes by creation order, like a task."""

    __slots__ = ("_number",)

    def __init__(self, *, loop: RunLoop, number: int) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number
