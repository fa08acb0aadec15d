"""Waiting for runs to end: one shared look-up per process, woken by hints, never relying on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import structlog

from perdure.runtime.engine.pacing import Backoff, Portion
from perdure.runtime.errors import RunNotFound
from perdure.runtime.hints import HintBus
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunStore
from perdure.storage.model import Hint, HintKind, RunRecord, RunStatus

log = structlog.get_logger("perdure.results")

READ_AT_ONCE = 1000
GONE_AFTER = 4
"""Reads in vain after which a run is looked for: it may have been deleted, or lost by the database. Then twice as
many."""


class RunEnd(NamedTuple):
    """How a run ended. result, error: encoded text. reason: of a cancel."""

    run_id: str
    workflow: str
    status: RunStatus
    result: str | None
    error: str | None
    reason: str | None


def _end_of(record: RunRecord) -> RunEnd:
    return RunEnd(
        record.run_id,
        record.workflow,
        record.status,
        record.result,
        record.error,
        record.reason,
    )


class ResultWatcher:
    """Futures by run id. A hint makes the next read immediate; a scan finds what hints missed.

    in_memory: whether a run is executed in this process, whose `tell` then spares the read. scan: seconds between two
    looks at everything awaited.
    """

    def __init__(
        self,
        store: RunStore,
        bus: HintBus,
        randomness: Randomness,
        *,
        in_memory: Callable[[str], bool] = lambda _: False,
        scan: float = 1.0,
    ) -> None:
        self._in_memory = in_memory
        self._store = store
        self._bus = bus
        self._randomness = randomness
        self._scan = scan
        self._waiting: dict[str, list[asyncio.Future[RunEnd]]] = {}
        self._in_vain: Counter[str] = Counter()
        """How often a run that is awaited was read and had not ended."""
        self._missed: asyncio.Queue[str] = asyncio.Queue()
        self._wanted: dict[str, None] = {}
        self._asked = asyncio.Event()
        self._over: Exception | None = None

    async def wait(self, run_id: str) -> RunEnd:
        """The run once it has ended; for ever if it never does (the caller sets the time limit).

        Raises what `end` was given, also when that came before."""
        if self._over is not None:
            raise self._over
        future: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, []).append(future)
        if not self._in_memory(run_id):
            self._want(run_id)
        try:
            return await future
        finally:
            futures = self._waiting.get(run_id, [])
            if future in futures:
                futures.remove(future)
            if not futures:
                self._waiting.pop(run_id, None)
                self._in_vain.pop(run_id, None)

    def tell(self, end: RunEnd) -> None:
        """This process has committed the end of a run."""
        for future in self._waiting.pop(end.run_id, ()):
            if not future.done():
                future.set_result(end)

    def end(self, error: Exception) -> None:
        """Nobody serves any more: whoever still waits, or comes later, gets ``error``."""
        self._over = error
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    async def run(self) -> None:
        unsubscribe = self._bus.subscribe(self._hinted)
        try:
            async with asyncio.TaskGroup() as services:
                services.create_task(self._run_reads(), name="result reads")
                services.create_task(self._run_scans(), name="result scan")
                services.create_task(self._run_searches(), name="result search")
        finally:
            unsubscribe()

    def _hinted(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            if hint.kind is HintKind.DONE and hint.run_id in self._waiting:
                self._want(hint.run_id)
            elif hint.kind is HintKind.ANY:
                for run_id in self._waiting:
                    self._want(run_id)

    def _want(self, run_id: str) -> None:
        self._wanted[run_id] = None
        self._asked.set()

    def _unreadable(self, run_ids: Sequence[str], error: Exception) -> None:
        if len(run_ids) > 1:
            for run_id in run_ids:
                self._want(run_id)
            return
        log.error("results.unreadable", run_id=run_ids[0], error=repr(error))
        self._fail(run_ids[0], error)

    def _fail(self, run_id: str, error: Exception) -> None:
        for future in self._waiting.pop(run_id, ()):
            if not future.done():
                future.set_exception(error)

    def _note_in_vain(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            if run_id in self._waiting:
                self._in_vain[run_id] += 1
                reads = self._in_vain[run_id]
                if reads >= GONE_AFTER and reads & (reads - 1) == 0:
                    self._missed.put_nowait(run_id)

    async def _run_searches(self) -> None:
        """Whether those that do not end are there at all: who waits knew that once."""
        while True:
            run_id = await self._missed.get()
            try:
                gone = run_id in self._waiting and await self._store.read_run(run_id) is None
            except Exception as error:  # later, then
                log.warning("results.unavailable", runs=1, error=str(error))
                continue
            if gone:
                self._fail(run_id, RunNotFound(run_id))

    async def _run_scans(self) -> None:
        while True:
            await asyncio.sleep(self._scan * (0.8 + 0.4 * self._randomness.fraction()))
            for run_id in self._waiting:
                self._want(run_id)

    async def _run_reads(self) -> None:
        backoff, portion = Backoff(self._randomness), Portion(READ_AT_ONCE)
        while True:
            await self._asked.wait()
            run_ids = list(self._wanted)[: portion.size]
            for run_id in run_ids:
                del self._wanted[run_id]
            if not self._wanted:
                self._asked.clear()
            run_ids = [r for r in run_ids if r in self._waiting]
            if not run_ids:
                continue
            try:
                records = await self._store.read_results(run_ids)
            except (
                PerdureError
            ) as error:  # also that tables or rights to them are not there just now
                log.warning("results.unavailable", runs=len(run_ids), error=str(error))
                for run_id in run_ids:
                    self._want(run_id)
                portion.failed()
                await backoff.wait()
                continue
            except (
                Exception
            ) as error:  # a row that this release cannot read: found, and told, alone
                portion.failed()
                self._unreadable(run_ids, error)
                continue
            backoff = Backoff(self._randomness)
            portion.worked()
            for record in records.values():
                self.tell(_end_of(record))
            self._note_in_vain(run_id for run_id in run_ids if run_id not in records)
