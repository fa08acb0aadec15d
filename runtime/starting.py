"""Starts of one process share commits: while one batch is under way, the next gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perdure.runtime.engine.group import BATCH_BYTES, GroupCommit
from perdure.runtime.engine.pacing import Backoff
from perdure.runtime.errors import ClientClosed
from perdure.runtime.local import LocalRunner
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    StorageError,
    UnknownOutcome,
)
from perdure.storage.interface import RunStore
from perdure.storage.model import NewRun, RunStatus, StartOutcome

START_OVERHEAD = 300
PARTS = 8
"""Into which a batch is divided that fails because of some of it. Of 500, the culprits stand alone after three times:
even with a lock time-out each, within their patience."""
AWAY = (DatabaseUnavailable, UnknownOutcome)


@dataclass(slots=True, eq=False)
class Arrival:
    """A start on its way. ends: its patience does, on the clock's monotonic time. taken: it has been in a batch.

    lost: the last answer that was lost. Once there is one, no later failure can say that nothing was written.
    set_aside: how often it ran into a lock; from then on it is sent alone."""

    run: NewRun
    answer: asyncio.Future[StartOutcome]
    ends: float
    taken: bool = False
    lost: UnknownOutcome | None = None
    set_aside: int = 0

    @property
    def size(self) -> int:
        return BATCH_BYTES + 1 if self.set_aside else START_OVERHEAD + len(self.run.payload)


class StartBatcher:
    """Gathers starts into group commits.

    patience: seconds a start is tried again while the database is away, from its arrival on, before the failure reaches
    the caller. A start of unknown outcome is settled by its token: the same call again finds its own row.
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
        self._open: dict[Arrival, None] = {}
        """Those with a caller, in order of arrival."""
        self._over: ClientClosed | None = None
        self._group: GroupCommit[Arrival] = GroupCommit(self._flush, size=lambda a: a.size)

    async def start(self, run: NewRun) -> StartOutcome:
        arrival = self._arrival(run)
        self._open[arrival] = None
        self._group.add(arrival)
        try:
            return await arrival.answer
        finally:
            del self._open[arrival]

    def _arrival(self, run: NewRun) -> Arrival:
        answer: asyncio.Future[StartOutcome] = asyncio.get_running_loop().create_future()
        return Arrival(run, answer, self._clock.monotonic() + self._patience)

    def end(self, error: ClientClosed) -> None:
        """Nobody serves any more: what was not answered yet gets ``error``, and nothing is sent again."""
        self._over = error
        for arrival in self._open:
            if not arrival.answer.done():
                arrival.answer.set_exception(error)

    async def run(self) -> None:
        await self._group.run()

    async def start_all(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome | Exception]:
        """These starts in one commit, and what became of each."""
        arrivals = [self._arrival(run) for run in runs]
        await self._flush(arrivals)
        return [_told(arrival) for arrival in arrivals]

    async def _flush(self, batch: list[Arrival]) -> None:
        """Answer them all. Births are settled before anybody hears of the start, so that its run is in memory by
        then."""
        batch = self._wanted(batch)
        for arrival in batch:
            if self._local is not None and not arrival.taken:
                birth = self._local.reserve(arrival.run)
                if birth is not None:
                    arrival.run = arrival.run.born(birth)
            arrival.taken = True
        try:
            await self._carry_out(batch)
        except BaseException:  # what was under way may be made all the same
            for arrival in batch:
                self._settle(arrival, None, lost=True)
            raise

    async def _carry_out(self, batch: list[Arrival]) -> None:
        """Send them until each is answered, or set aside. What is refused or locked is the fault of single ones: they
        are sent in parts until the culprits are alone (R8)."""
        backoff = Backoff(self._randomness)
        while batch := self._wanted(batch):
            try:
                outcomes = await self._send(batch)
            except (*AWAY, ConflictError) as error:
                batch = self._given_up(batch, error)
                if isinstance(error, ConflictError):
                    if len(batch) > 1:
                        break
                    if batch and batch[0] in self._open:
                        self._set_aside(batch[0])
                        return
                await backoff.wait()
            except Exception as error:
                if len(batch) > 1 and not isinstance(
                    error, ClientClosed
                ):  # one of them is the cause
                    break
                for arrival in batch:
                    self._answer(arrival, error)
                return
            else:
                for arrival, outcome in zip(batch, outcomes, strict=True):
                    self._answer(arrival, outcome)
                return
        size = -(-len(batch) // PARTS)
        for begin in range(0, len(batch), max(1, size)):
            await self._carry_out(batch[begin : begin + size])

    def _set_aside(self, arrival: Arrival) -> None:
        """It is sent again a little later, and keeps those behind it waiting no longer than that takes. It is not born
        claimed then: its shard may be given up meanwhile."""
        self._settle(arrival, None, lost=arrival.lost is not None)
        arrival.run = replace(arrival.run, birth=None)
        delay = Backoff.delay(arrival.set_aside, self._randomness.fraction())
        arrival.set_aside += 1
        asyncio.get_running_loop().call_later(delay, self._group.add, arrival)

    async def _send(self, batch: Sequence[Arrival]) -> Sequence[StartOutcome]:
        if self._over is not None:
            raise self._over
        return await self._store.start_runs([arrival.run for arrival in batch])

    def _wanted(self, batch: list[Arrival]) -> list[Arrival]:
        """Without those whose callers have gone, or were told that it failed: they are not sent any more."""
        for arrival in batch:
            if arrival.answer.done():
                self._settle(arrival, None, lost=arrival.lost is not None)
        return [arrival for arrival in batch if not arrival.answer.done()]

    def _given_up(self, batch: list[Arrival], error: StorageError) -> list[Arrival]:
        """A try has failed: whose patience is over hears of it, also in the queue. Returns those to be sent again."""
        now = self._clock.monotonic()
        left = []
        for arrival in batch:
            if isinstance(error, UnknownOutcome):
                arrival.lost = error
            if now < arrival.ends:
                left.append(arrival)
            elif arrival.lost is None or arrival.lost is error:
                self._answer(arrival, error)
            else:
                arrival.lost.__cause__ = error
                self._answer(arrival, arrival.lost)
        if isinstance(error, AWAY):
            unsent = DatabaseUnavailable(f"not sent: starts before it failed ({error})")
            for arrival in self._open:
                if now < arrival.ends:
                    break
                if not arrival.taken and not arrival.answer.done():
                    arrival.answer.set_exception(unsent)
        return left

    def _answer(self, arrival: Arrival, answer: StartOutcome | Exception) -> None:
        if isinstance(answer, Exception):
            self._settle(arrival, None, lost=arrival.lost is not None)
        else:
            self._settle(arrival, answer, lost=False)
        if arrival.answer.done():
            return
        if isinstance(answer, Exception):
            arrival.answer.set_exception(answer)
        else:
            arrival.answer.set_result(answer)

    def _settle(self, arrival: Arrival, outcome: StartOutcome | None, *, lost: bool) -> None:
        birth, local = arrival.run.birth, self._local
        if birth is not None and local is not None:
            local.settle(birth, outcome, lost=lost)


def _told(arrival: Arrival) -> StartOutcome | Exception:
    error = arrival.answer.exception()
    if error is None:
        return arrival.answer.result()
    assert isinstance(error, Exception)
    return error


def waits(outcome: StartOutcome) -> bool:
    """Whether the run waits to be claimed; also one made before: whoever made it may have died since."""
    return (outcome.created or outcome.status is RunStatus.PENDING) and outcome.claimed is None


def said(outcome: StartOutcome) -> str:
    """The status of a handle. A run this start made may have ended before a lost answer was made good."""
    return "replayed" if not outcome.created and outcome.status.final else "running"
