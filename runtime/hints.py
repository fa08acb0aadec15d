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

    def __init__(self, channel: HintChannel | None = None, *, local: bool = True) -> None:
        self._channels = [] if channel is None else [channel]
        self._local = local
        self._listeners: list[Listener] = []
        self._pending: list[Hint] = []

    def add(self, channel: HintChannel) -> None:
        """One more way to other processes, before `open`."""
        self._channels.append(channel)

    async def open(self) -> None:
        for channel in self._channels:
            await channel.open(self._deliver)

    async def close(self) -> None:
        """What was said before is sent first: a client that starts a run and goes is heard."""
        self._flush()
        for channel in self._channels:
            await channel.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Returns the function that ends the subscription. Listeners are called on the loop and must be quick."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def publish(self, hints: Sequence[Hint]) -> None:
        """After the commit they speak of. Hints of one turn of the loop travel together."""
        if not hints or not (self._local or self._channels):
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.extend(hints)

    def _flush(self) -> None:
        hints, self._pending = self._pending, []
        if not hints:
            return
        if self._local:
            self._deliver(hints)
        for channel in self._channels:
            channel.send(hints)

    def _deliver(self, hints: Sequence[Hint]) -> None:
        for listener in list(self._listeners):
            listener(hints)
