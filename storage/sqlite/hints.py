"""`HintChannel` on SQLite: nothing is sent, a commit of somebody else is noticed.

``pragma data_version`` changes for a connection when another connection has committed. It is asked of the process's
only writing connection, so its own commits (runs, leases, shards) never show and a process cannot wake itself; what
the process does itself its runtime knows. Which run a foreign commit was about cannot be seen, hence ANY.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perdure.storage.errors import StorageError
from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint, HintKind
from perdure.storage.sqlite.transaction import Transaction

if TYPE_CHECKING:
    from perdure.storage.sqlite.database import SqliteDatabase

INTERVAL = 0.1
"""Seconds between two looks."""

Receive = Callable[[Sequence[Hint]], None]
SOMETHING = (Hint(HintKind.ANY),)


class SqliteHintChannel(HintChannel):
    """Looks at the file ten times a second."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._looking: asyncio.Task[None] | None = None

    async def open(self, receive: Receive) -> None:
        if self._looking is not None:
            return
        await self._database.open()
        try:
            version = await self._version()
        except BaseException:
            await self._database.close()
            raise
        self._looking = asyncio.create_task(
            self._look(receive, version), name="perdure-sqlite-hints"
        )

    async def _version(self) -> int | None:
        """None: the file could not be asked now."""
        try:
            return await self._database.writer.read(data_version)
        except StorageError:
            return None

    async def _look(self, receive: Receive, version: int | None) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            found = await self._version()
            if found is not None and found != version:
                receive(SOMETHING)
            version = found

    def send(self, hints: Sequence[Hint]) -> None:
        """Nothing to do: the commit itself is what others notice."""

    async def close(self) -> None:
        looking, self._looking = self._looking, None
        if looking is None:
            return
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await self._database.close()


class SilentHintChannel(HintChannel):
    """`:memory:` has no other process."""

    async def open(self, receive: Receive) -> None:
        return

    def send(self, hints: Sequence[Hint]) -> None:
        return

    async def close(self) -> None:
        return


def data_version(tx: Transaction) -> int:
    row = tx.row("hints.data_version")
    return int(row[0]) if row else 0
