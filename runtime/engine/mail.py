"""Reading mailboxes of runs in memory, many in one read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from perdure.runtime.engine.activation import Activation
from perdure.runtime.engine.pacing import Backoff, Portion
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunStore

log = structlog.get_logger("perdure.mail")

READ_AT_ONCE = 500


class MailReader:
    """Whoever was poked while a read is under way is in the next one, so no poke is answered by an older read."""

    def __init__(
        self,
        store: RunStore,
        randomness: Randomness,
        find: Callable[[str], Activation | None],
    ) -> None:
        self._store = store
        self._randomness = randomness
        self._find = find
        self._wanted: dict[str, None] = {}
        self._asked = asyncio.Event()

    def poke(self, run_id: str) -> None:
        self._wanted[run_id] = None
        self._asked.set()

    async def run(self) -> None:
        backoff, portion = Backoff(self._randomness), Portion(READ_AT_ONCE)
        while True:
            await self._asked.wait()
            run_ids = list(self._wanted)[: portion.size]
            for run_id in run_ids:
                del self._wanted[run_id]
            if not self._wanted:
                self._asked.clear()
            try:
                await self._read(run_ids)
            except PerdureError as error:  # also that a table, or the right to it, is not there now
                log.warning("mail.unavailable", runs=len(run_ids), error=str(error))
                for run_id in run_ids:
                    self.poke(run_id)
                portion.failed()
                await backoff.wait()
            else:
                backoff = Backoff(self._randomness)
                portion.worked()

    async def _read(self, run_ids: Sequence[str]) -> None:
        try:
            mailboxes = await self._store.read_mailboxes(run_ids)
        except PerdureError:
            raise
        except Exception as error:  # one of these has mail that this code cannot read (R8)
            await self._read_apart(run_ids, error)
            return
        for run_id, mailbox in mailboxes.items():
            activation = self._find(run_id)
            if activation is not None:
                activation.mail(mailbox)

    async def _read_apart(self, run_ids: Sequence[str], error: Exception) -> None:
        """Halve until it is alone. It stays unread while its run is in memory: the next claim puts that on hold."""
        if len(run_ids) == 1:
            log.error("mail.unreadable", run_id=run_ids[0], error=str(error))
            return
        middle = len(run_ids) // 2
        await self._read(run_ids[:middle])
        await self._read(run_ids[middle:])
