"""Starts of one process share commits: while one batch is under way, the next gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.runtime.engine.group import GroupCommit
from perdure.runtime.errors import ClientClosed
from perdure.runtime.local import LocalRunner
from perdure.runtime.outcomes import Repeated
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import ConflictError, DatabaseUnavailable, UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import NewRun, RunStatus, StartOutcome

START_OVERHEAD = 300


@dataclass(slots=True)
class Arrival:
    run: NewRun
    answer: asyncio.Future[StartOutcome]


class StartBatcher:
    """Gathers starts into group commits.

    patience: seconds a start is tried again while the database is away, before the failure reaches the caller. A start
    of unknown outcome is settled by its token: the same call again finds its own row.
    local: the runner in this process, if there is one: runs of its shards are born claimed.
    """

    def __init__(
        self,
        store: RunStore,
        randomness: Randomness,
        clock: Clock,
        *,
        patience: float,
        local: LocalRunner | None = None,
    ) -> None:
        self._local = local
        self._store = store
        self._randomness = randomness
        self._clock = clock
        self._patience = patience
        self._open: set[asyncio.Future[StartOutcome]] = set()
        self._over: ClientClosed | None = None
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

    def end(self, error: ClientClosed) -> None:
        """Nobody serves any more: what was not answered yet gets ``error``, and nothing is sent again."""
        self._over = error
        for answer in self._open:
            if not answer.done():
                answer.set_exception(error)

    async def run(self) -> None:
        await self._group.run()

    async def _flush(self, batch: list[Arrival]) -> None:
        answers = await self.start_all([arrival.run for arrival in batch])
        for arrival, answer in zip(batch, answers, strict=True):
            if arrival.answer.done():
                continue
            if isinstance(answer, Exception):
                arrival.answer.set_exception(answer)
            else:
                arrival.answer.set_result(answer)

    async def start_all(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome | Exception]:
        """These starts in one commit, and what became of each. Refused data is the fault of single ones: halve until
        the culprits are alone (R8)."""
        try:
            return await self._start(runs)
        except (DatabaseUnavailable, ConflictError, UnknownOutcome, ClientClosed) as error:
            return [error] * len(runs)
        except Exception as error:  # one of them is the cause
            if len(runs) == 1:
                return [error]
            middle = len(runs) // 2
            return [*await self.start_all(runs[:middle]), *await self.start_all(runs[middle:])]

    async def _start(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        """Births are settled before anybody hears of the start, so that its run is in memory by then."""
        if self._local is not None:
            runs = [self._with_birth(run) for run in runs]
        write = Repeated(self._clock, self._randomness, patience=self._patience)
        try:
            outcomes = await write.answer(lambda: self._send(runs))
        except BaseException as error:
            lost = write.lost is not None or isinstance(error, asyncio.CancelledError)
            self._settle(runs, [None] * len(runs), lost=lost)
            raise
        self._settle(runs, outcomes, lost=False)
        return outcomes

    async def _send(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        if self._over is not None:
            raise self._over
        return await self._store.start_runs(runs)

    def _settle(
        self, runs: Sequence[NewRun], outcomes: Sequence[StartOutcome | None], *, lost: bool
    ) -> None:
        if self._local is None:
            return
        for run, outcome in zip(runs, outcomes, strict=True):
            if run.birth is not None:
                self._local.settle(run.birth, outcome, lost=lost)

    def _with_birth(self, run: NewRun) -> NewRun:
        birth = None if self._local is None else self._local.reserve(run)
        return run if birth is None else run.born(birth)


def waits(outcome: StartOutcome) -> bool:
    """Whether the run waits to be claimed; also one made before: whoever made it may have died since."""
    return (outcome.created or outcome.status is RunStatus.PENDING) and outcome.claimed is None


def said(outcome: StartOutcome) -> str:
    """The status of a handle. A run this start made may have ended before a lost answer was made good."""
    return "replayed" if not outcome.created and outcome.status.final else "running"
