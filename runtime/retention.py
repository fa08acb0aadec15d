"""Deleting what nobody needs any more: ended runs past their time to live, rows of runners long dead."""

from __future__ import annotations

import asyncio

import structlog

from perdure.runtime.settings import Settings
from perdure.storage.clock import Randomness
from perdure.storage.connect import Database
from perdure.storage.errors import PerdureError
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
            deleted = BATCH
            while deleted == BATCH:
                deleted = await self._store.delete_finished(now - self._ttl, BATCH)
        cluster = self._database.cluster()
        await cluster.open()
        try:
            await cluster.delete_dead_runners(now - RUNNER_ROWS_KEPT)
        finally:
            await cluster.close()
