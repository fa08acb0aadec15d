"""Deleting what nobody needs any more: ended runs past their time to live, rows of runners long dead."""

from __future__ import annotations

import asyncio

import structlog

from perdure.runtime.engine.pacing import Portion
from perdure.runtime.settings import Settings
from perdure.storage.clock import Randomness
from perdure.storage.connect import Database
from perdure.storage.errors import PerdureError, StorageError
from perdure.storage.interface import RunStore

log = structlog.get_logger("perdure.retention")

PERIOD = 60.0
BATCH = 500
RUNNER_ROWS_KEPT = 24 * 3600.0
"""Seconds that the row of a dead runner stays readable after its lease ran out."""


class Retention:
    """A small service of every runner; deletes in bounded batches, so several doing it at once is harmless."""

    def __init__(
        self, store: RunStore, database: Database, settings: Settings, randomness: Randomness
    ) -> None:
        self._store = store
        self._database = database
        self._ttl = settings.finished_ttl
        self._randomness = randomness
        self._portion = Portion(BATCH)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD * (0.5 + self._randomness.fraction()))
            try:
                await self.sweep()
            except PerdureError as error:  # also that one more connection could not be made
                log.warning("retention.unavailable", error=str(error))

    async def sweep(self) -> None:
        """One pass over everything that has outlived its time."""
        now = await self._store.server_now()
        if self._ttl is not None:
            while await self._delete_some(now - self._ttl):
                pass
        cluster = self._database.cluster()
        try:
            await cluster.open()
            await cluster.delete_dead_runners(now - RUNNER_ROWS_KEPT)
        finally:
            await cluster.close()

    async def _delete_some(self, before: float) -> bool:
        """Whether there may be more. Too much for one statement's deadline is so at every try: then it is half as much,
        down to a single run; whatever else the reason was, it shows there, or is over."""
        size = self._portion.size
        try:
            deleted = await self._store.delete_finished(before, size)
        except StorageError as error:
            self._portion.failed()
            if size == 1:
                raise
            log.warning("retention.unavailable", runs=size, error=str(error))
            return True
        self._portion.worked()
        return deleted == size
