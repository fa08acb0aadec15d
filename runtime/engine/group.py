"""Group commit: while one batch is under way, the next gathers. An idle one leaves at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

BATCH_ITEMS = 500
BATCH_BYTES = 4 * 1024 * 1024


class GroupCommit(Generic[T]):
    """Feeds ``flush`` with batches, one at a time.

    flush: must deal with every item of its batch and with its own errors.
    size: bytes of an item; a batch ends at 500 items or 4 MiB, a larger item goes alone.
    """

    def __init__(
        self, flush: Callable[[list[T]], Awaitable[None]], *, size: Callable[[T], int]
    ) -> None:
        self._flush = flush
        self._size = size
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._idle.clear()
        self._filled.set()

    @property
    def waiting(self) -> int:
        """Items that no batch has taken yet."""
        return len(self._items)

    async def drained(self) -> None:
        """Returns when nothing is queued or under way."""
        await self._idle.wait()

    async def run(self) -> None:
        """Serves for ever; cancel it to stop (what is under way is the store's to finish, R10)."""
        while True:
            if not self._items:
                self._idle.set()
                self._filled.clear()
                await self._filled.wait()
            await self._flush(self._take())

    def _take(self) -> list[T]:
        batch: list[T] = []
        weight = 0
        while self._items and len(batch) < BATCH_ITEMS:
            weight += self._size(self._items[0])
            if batch and weight > BATCH_BYTES:
                break
            batch.append(self._items.popleft())
        return batch
