"""Hints between simulated processes: lost, doubled, late and out of order."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint

from .loop import VirtualLoop

Receive = Callable[[Sequence[Hint]], None]


class HintNet:
    """lost, doubled, late: parts of one."""

    def __init__(self, loop: VirtualLoop, chance: Random, seen: Counter[str]) -> None:
        self._loop = loop
        self._chance = chance
        self._seen = seen
        self.lost = self.doubled = self.late = 0.0
        self._listeners: list[tuple[Post, Receive, contextvars.Context]] = []

    def channel(self) -> HintChannel:
        return Post(self)

    def clear(self) -> None:
        self.lost = self.doubled = self.late = 0.0

    def add(self, post: Post, receive: Receive) -> None:
        # Delivered in the lane of whoever listens: a paused process hears it afterwards, a lost one never.
        self._listeners.append((post, receive, contextvars.copy_context()))

    def remove(self, post: Post) -> None:
        self._listeners = [each for each in self._listeners if each[0] is not post]

    def carry(self, sender: Post, hints: Sequence[Hint]) -> None:
        chance = self._chance
        for post, receive, context in self._listeners:
            if post is sender:
                continue
            for hint in hints:
                copies = 1
                lot = chance.random()
                if lot < self.lost:
                    self._seen["hint lost"] += 1
                    continue
                if lot < self.lost + self.doubled:
                    self._seen["hint doubled"] += 1
                    copies = 2
                for _ in range(copies):
                    delay = chance.uniform(0.0005, 0.003)
                    if chance.random() < self.late:
                        self._seen["hint late"] += 1
                        delay = chance.uniform(0.1, 6.0)
                    self._loop.call_later(delay, receive, (hint,), context=context)


class Post(HintChannel):
    """One process's end."""

    def __init__(self, net: HintNet) -> None:
        self._net = net

    async def open(self, receive: Receive) -> None:
        self._net.add(self, receive)

    def send(self, hints: Sequence[Hint]) -> None:
        self._net.carry(self, hints)

    async def close(self) -> None:
        self._net.remove(self)
