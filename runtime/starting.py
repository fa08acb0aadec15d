"""Starts of one process share commits: while one batch is under way, the next gathers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from perdure.runtime.engine.group import GroupCommit
from perdure.runtime.outcomes import Repeated
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import ConflictError, DatabaseUnavailable, UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import NewRun, StartOutcome

START_OVERHEAD = 300


@dataclass(slots=True)
class Arrival:
    run: NewRun
    answer: asyncio.Future[StartOutcome]


class StartBatcher:
    """Gathers starts into group commits.

    patience: seconds a start is tried again while the database is away, before the failure reaches the caller. A start
    of unknown outcome is settled by its token: the same call again finds its own row.
    """

    def __init__(
        self, store: RunStore, randomness: Randomness, clock: Clock, *, patience: float
    ) -> None:
        self._store = store
        self._randomness = randomness
        self._clock = clock
        self._patience = patience
        self._open: set[asyncio.Future[StartOutcome]] = set()
        self._group: GroupCommit[Arrival] = GroupCommit(
            self._flush, size=lambda a: START_OVERHEAD + len(a.run.payload)
        )

    async def start(self, run: NewRun) -> StartOutcome:
        answer: asyncio.Future[StartOutcome] = asyncio.get_running_loop().create_future()
        self._open.add(answer)
        self._group.add(Arrival(run, answer))
        try:
            return await answer
        finally:
            self._open.discard(answer)

    def end(self, error: Exception) -> None:
        """Nobody serves any more: what was not answered yet gets ``error``."""
        for answer in self._open:
            if not answer.done():
                answer.set_exception(error)

    async def run(self) -> None:
        await self._group.run()

    async def _flush(self, batch: list[Arrival]) -> None:
        write = Repeated(self._clock, self._randomness, patience=self._patience)
        try:
            outcomes = await write.answer(lambda: self._store.start_runs([a.run for a in batch]))
        except (DatabaseUnavailable, ConflictError, UnknownOutcome) as error:
            self._refuse(batch, error)
        except Exception as error:  # one of them is the cause
            await self._isolate(batch, error)
        else:
            for arrival, outcome in zip(batch, outcomes, strict=True):
                if not arrival.answer.done():
                    arrival.answer.set_result(outcome)

    async def _isolate(self, batch: list[Arrival], error: Exception) -> None:
        if len(batch) == 1:
            self._refuse(batch, error)
            return
        middle = len(batch) // 2
        await self._flush(batch[:middle])
        await self._flush(batch[middle:])

    def _refuse(self, batch: list[Arrival], error: Exception) -> None:
        for arrival in batch:
            if not arrival.answer.done():
                arrival.answer.set_exception(error)
