"""What all stores over one SQLite database have in common: they open it together, and the last one closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.storage.model import Meta

if TYPE_CHECKING:
    from perdure.storage.sqlite.database import SqliteDatabase


class SqliteStore:
    """Opens and closes its part of the database; each at most once at a time."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._open = False

    async def open(self) -> Meta:
        if not self._open:
            await self._database.open()
            self._open = True
        try:
            return await self._database.read_meta()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._database.close()
