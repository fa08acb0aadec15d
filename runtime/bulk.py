"""Many starts in one call, in chunks: while one is under way, the next is encoded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.runtime.engine.group import BATCH_BYTES, BATCH_ITEMS
from perdure.runtime.handle import Handle
from perdure.runtime.starting import START_OVERHEAD
from perdure.storage.errors import DatabaseUnavailable, UnknownOutcome
from perdure.storage.model import NewRun, StartOutcome

Out = TypeVar("Out")

Answer = StartOutcome | Exception
Progress = Callable[[int, int], None]
"""Gets how many payloads have been dealt with, and how many there are."""

UNDER_WAY = 3
"""Chunks sent and not answered yet."""
SLICE = 0.005
"""Seconds of encoding between two turns of everybody else."""


@dataclass(frozen=True, slots=True)
class Started(Generic[Out]):
    """What became of one payload of `Client.start_many`.

    handle: of its run, as from `Client.start`; None where ``error`` says why there is none. created: this call made
    the run; False for one that was there before, or that the same call made for an earlier payload.
    """

    handle: Handle[Out] | None
    created: bool = False
    error: Exception | None = None


class Bulk:
    """One call of many starts.

    make: the run of the payload with that number; what it raises is that payload's outcome. send: starts a chunk and
    answers each of it.
    """

    def __init__(
        self,
        total: int,
        make: Callable[[int], NewRun],
        send: Callable[[Sequence[NewRun]], Awaitable[Sequence[Answer]]],
        progress: Progress | None,
    ) -> None:
        self._make = make
        self._send = send
        self._progress = progress
        self._answers: list[Answer | None] = [None] * total
        self._done = 0
        self._broken: Exception | None = None
        """What ``progress`` raised."""
        self._window = asyncio.Semaphore(UNDER_WAY)
        self._away: Exception | None = None

    async def run(self) -> list[Answer]:
        """The answers in the order of the payloads. Raises what ``progress`` raised: then nothing more was sent, and
        what was under way has ended."""
        chunk: list[tuple[int, NewRun]] = []
        room = BATCH_BYTES
        slice_ends = time.perf_counter() + SLICE
        async with asyncio.TaskGroup() as chunks:
            for number in range(len(self._answers)):
                if self._broken is not None:
                    break
                try:
                    run = self._make(number)
                except (
                    Exception
                ) as error:  # of the payload's own code, too: an idempotency key, a validator
                    self._answers[number] = error
                    self._done += 1
                    continue
                weight = START_OVERHEAD + len(run.payload)
                if chunk and (len(chunk) == BATCH_ITEMS or weight > room):
                    await self._begin(chunks, chunk)
                    chunk, room = [], BATCH_BYTES
                chunk.append((number, run))
                room -= weight
                if time.perf_counter() > slice_ends:
                    await asyncio.sleep(0)
                    slice_ends = time.perf_counter() + SLICE
            if chunk and self._broken is None:
                await self._begin(chunks, chunk)
        if self._broken is not None:
            raise self._broken
        return [answer for answer in self._answers if answer is not None]

    async def _begin(self, chunks: asyncio.TaskGroup, chunk: list[tuple[int, NewRun]]) -> None:
        await self._window.acquire()
        chunks.create_task(self._carry_out(chunk))

    async def _carry_out(self, chunk: list[tuple[int, NewRun]]) -> None:
        try:
            answers = await self._start([run for _, run in chunk])
        finally:
            self._window.release()
        for (number, _), answer in zip(chunk, answers, strict=True):
            self._answers[number] = answer
        self._done += len(chunk)
        if self._progress is not None and self._broken is None:
            try:
                self._progress(self._done, len(self._answers))
            except Exception as error:
                self._broken = error

    async def _start(self, runs: Sequence[NewRun]) -> Sequence[Answer]:
        """Once the database did not come back in time, nothing more is sent."""
        if self._away is not None:
            error = DatabaseUnavailable(f"not sent: starts before it failed ({self._away})")
            return [error] * len(runs)
        answers = await self._send(runs)
        lost = (a for a in answers if isinstance(a, DatabaseUnavailable | UnknownOutcome))
        self._away = next(lost, self._away)
        return answers
