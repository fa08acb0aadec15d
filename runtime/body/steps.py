"""The steps a body has called: awaited, ready to start, to be tried again, or abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure.runtime.body.port import BodyPort, StepCall
from perdure.storage.clock import from_micros
from perdure.storage.model import Entry


@dataclass(eq=False, slots=True)
class StepWait:
    """A step the body waits for. attempt, retry_at: of the next attempt, after failed ones that were recorded.

    barrier: the entries up to this seq must be durable before it starts (R4).
    """

    key: str
    call: StepCall
    future: asyncio.Future[Any]
    context: contextvars.Context
    barrier: int
    attempt: int = 1
    retry_at: float = -math.inf
    running: bool = False


class Arrival(NamedTuple):
    """What became of an attempt of a step, not yet an entry. retry_at: it failed and is to be tried again then."""

    key: str
    attempt: int
    output: str | None
    error: str | None
    started_at: float | None
    retry_at: float | None


class Steps:
    """Which steps wait for what. ``port`` starts them; ``durable`` is the seq of the last durable entry.

    waits: all that the body awaits, by key. called: those since the last time nothing was deliverable.
    ready: may start once their barrier is durable, unless ``held_back``; an OrderedDict because it is emptied from the
    front. gone: abandoned before a result came; an entry of such a key is skipped, live and on replay.
    dropped: running ones that were abandoned in this turn.
    """

    def __init__(self, port: BodyPort, durable: int) -> None:
        self.waits: dict[str, StepWait] = {}
        self.called: dict[str, StepWait] = {}
        self.ready: OrderedDict[str, StepWait] = OrderedDict()
        self.gone: dict[str, StepCall] = {}
        self.dropped: list[str] = []
        self.running = 0
        self.durable = durable
        self.held_back = False
        self._port = port
        self._retries: list[tuple[float, int, StepWait]] = []
        self._retry_numbers = itertools.count()

    def add(self, wait: StepWait) -> None:
        self.waits[wait.key] = self.called[wait.key] = wait

    def settle(self, clock: Callable[[], float]) -> None:
        """Nothing more can be delivered: what was called, and what is due for another attempt, may start."""
        if self._retries:
            now = clock()
            while self.first_retry() <= now:
                wait = heapq.heappop(self._retries)[2]
                self.ready[wait.key] = wait
        if self.called:
            self.ready.update(self.called)
            self.called.clear()
        if self.ready:
            self.release()

    def release(self) -> None:
        """Start what is ready and whose past is durable."""
        ready = self.ready
        while ready and not self.held_back:
            key = next(iter(ready))
            wait = ready[key]
            if wait.barrier > self.durable:
                return  # those behind it were called later
            del ready[key]
            wait.running = True
            self.running += 1
            # A copy per attempt: what one attempt sets, the next does not see.
            self._port.start_step(key, wait.call, wait.attempt, wait.context.copy())

    def forget(self, wait: StepWait) -> None:
        """Its result has come, or nobody waits for it any more."""
        key = wait.key
        del self.waits[key]
        self.called.pop(key, None)
        self.ready.pop(key, None)
        self._stopped(wait)

    def abandon(self, wait: StepWait) -> None:
        """Nobody waits for it any more; a result may still come."""
        if wait.running:
            self.dropped.append(wait.key)
        self.forget(wait)
        self.gone[wait.key] = wait.call

    def try_again(self, wait: StepWait, failed: Entry) -> None:
        """``failed`` is the entry of an attempt; its output says when the next one may start."""
        self._stopped(wait)
        self.called.pop(wait.key, None)
        wait.attempt = failed.attempt + 1
        wait.retry_at = from_micros(int(failed.output or 0))
        wait.barrier = failed.seq
        heapq.heappush(self._retries, (wait.retry_at, next(self._retry_numbers), wait))

    def first_retry(self) -> float:
        """When the next failed step is tried again; inf: none waits for that."""
        retries = self._retries
        while retries:
            retry_at, _, wait = retries[0]
            if self.waits.get(wait.key) is wait and wait.retry_at == retry_at:
                return retry_at
            heapq.heappop(retries)  # abandoned, or another attempt has failed since
        return math.inf

    def _stopped(self, wait: StepWait) -> None:
        if wait.running:
            wait.running = False
            self.running -= 1

    def clear(self) -> None:
        for waits in (self.waits, self.called, self.ready, self.gone):
            waits.clear()
        self._retries.clear()
        self.dropped.clear()
