"""Lines of the timeline that say which steps are running (recording `full`).

For people only: unfenced, in batches, and given up while the database does not answer. A step that ends before its line
has left needs none, since its entry says it all: what is quick costs the database nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable

import structlog

from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunStore
from perdure.storage.model import RunEvent

log = structlog.get_logger("perdure.step")

PERIOD = 0.1
"""Seconds between two writes, and the age at which a running step gets its line."""
MOST = 500
"""Lines of one write."""


class StartLines:
    """Of the steps that are running: those without a line yet, oldest first. now: the database's clock."""

    def __init__(self, store: RunStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._waiting: dict[tuple[str, str], tuple[int, float]] = {}
        self._any = asyncio.Event()

    def started(self, run_id: str, key: str, attempt: int) -> None:
        if not self._waiting:
            self._any.set()
        self._waiting[run_id, key] = (attempt, self._now())

    def ended(self, run_id: str, key: str) -> None:
        """Or abandoned, or not ours any more."""
        self._waiting.pop((run_id, key), None)

    def clock_moved(self) -> None:
        """The database's clock was set: none is to wait until that is where it was."""
        now = self._now()
        for step, (attempt, at) in self._waiting.items():
            self._waiting[step] = (attempt, min(at, now))

    async def run(self) -> None:
        while True:
            await self._any.wait()
            await asyncio.sleep(PERIOD)
            lines = self._take(self._now() - PERIOD)
            if not self._waiting:
                self._any.clear()
            if not lines:
                continue
            try:
                await self._store.note_events(lines)
            except PerdureError as error:
                log.info("step.start-lines-dropped", lines=len(lines), error=str(error))

    def _take(self, before: float) -> list[tuple[str, RunEvent]]:
        """The lines of steps started at ``before`` or earlier."""
        old = itertools.takewhile(lambda item: item[1][1] <= before, self._waiting.items())
        lines = []
        for (run_id, key), (attempt, at) in list(itertools.islice(old, MOST)):
            detail = json.dumps({"key": key, "attempt": attempt}, ensure_ascii=False)
            lines.append((run_id, RunEvent("step-started", at, detail)))
            del self._waiting[run_id, key]
        return lines
