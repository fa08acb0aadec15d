"""Hints inside the process and, through the engine's channel, between processes. Never the truth (R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint

Listener = Callable[[Sequence[Hint]], None]


class HintBus:
    """Hands hints to listeners of this process at once and to other processes through ``channel``.

    channel: None = hints stay in this process (and ``local=False`` = nowhere: the safety scans find everything).
    """

    def __init__(self, channel: HintChannel | None, *, local: bool = True) -> None:
        self._channel = channel
        self._local = local
        self._listeners: list[Listener] = []
        self._pending: list[Hint] = []

    async def open(self) -> None:
        if self._channel is not None:
            await self._channel.open(self._deliver)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Returns the function that ends the subscription. Listeners are called on the loop and must be quick."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def publish(self, hints: Sequence[Hint]) -> None:
        """After the commit they speak of. Hints of one turn of the loop travel together."""
        if not hints or not (self._local or self._channel is not None):
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.extend(hints)

    def _flush(self) -> None:
        hints, self._pending = self._pending, []
        if self._local:
            self._deliver(hints)
        if self._channel is not None:
            self._channel.send(hints)

    def _deliver(self, hints: Sequence[Hint]) -> None:
        for listener in list(self._listeners):
            listener(hints)
