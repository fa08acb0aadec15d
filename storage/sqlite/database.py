"""One SQLite database as one process uses it: exactly one connection that writes, one that reads.

All stores of a `SqliteDatabase` share them. That the writer is one has two uses beyond order: the keeper's calls go
ahead of what is queued instead of racing it for the file's lock, and the writer's ``data_version`` tells that
*somebody else* has committed.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from pathlib import Path

from perdure.storage import schema
from perdure.storage.clock import Clock, Randomness, SystemRandomness
from perdure.storage.connect import DatabaseSettings, database_file, redact
from perdure.storage.errors import DatabaseUnavailable
from perdure.storage.interface import Capabilities, ClusterStore, HintChannel, RunStore
from perdure.storage.model import Meta
from perdure.storage.sqlite import file
from perdure.storage.sqlite.cluster import SqliteClusterStore
from perdure.storage.sqlite.hints import SilentHintChannel, SqliteHintChannel
from perdure.storage.sqlite.runs import SqliteRunStore
from perdure.storage.sqlite.transaction import Transaction
from perdure.storage.sqlite.worker import InlineWorker, ThreadWorker, Worker

CONNECTING = 10.0
"""Seconds until opening gives up."""


class SqliteDatabase:
    """A file, or `:memory:`. Nothing is opened before the first store is; the last one that closes closes it.

    Memory keeps its data until this object goes.
    """

    def __init__(
        self, settings: DatabaseSettings, *, clock: Clock, randomness: Randomness | None = None
    ) -> None:
        """Raises `ConfigurationError` for a URL or a SQLite library that cannot be used."""
        file.check_version()
        self.settings = settings
        self.clock = clock
        self.randomness = randomness or SystemRandomness()
        self.path = database_file(settings.url)
        self.capabilities = Capabilities(
            dialect="sqlite",
            server_version=sqlite3.sqlite_version,
            shared=self.path is not None,
            multi_host=False,
            pushes_hints=False,
            returning=True,
            session_locks=False,
        )
        self._link: FileLink | MemoryLink = (
            MemoryLink(clock) if self.path is None else FileLink(self.path, settings, clock)
        )

    def runs(self) -> RunStore:
        return SqliteRunStore(self)

    def cluster(self) -> ClusterStore:
        return SqliteClusterStore(self)

    def keeper(self) -> ClusterStore:
        return self.cluster()

    def hints(self) -> HintChannel:
        return SilentHintChannel() if self.path is None else SqliteHintChannel(self)

    @property
    def writer(self) -> Worker:
        return self._link.writer

    @property
    def reader(self) -> Worker:
        return self._link.reader

    async def open(self) -> None:
        """One more user."""
        await self._link.open()

    async def close(self) -> None:
        """One user less."""
        await self._link.close()

    async def read_meta(self) -> Meta:
        """What the cluster agreed on. Raises `SchemaError` if this code cannot work with it."""
        rows = await self.reader.read(meta_rows)
        return schema.read_meta(rows, database=redact(self.settings.url))


def meta_rows(tx: Transaction) -> dict[str, str | None] | None:
    """The rows of `perdure_meta`; None without the table."""
    return dict(tx.rows("read_meta")) if tx.rows("read_meta.present") else None


class FileLink:
    """The two connections to a file, counted by users, who may come from several event loops."""

    def __init__(self, path: Path, settings: DatabaseSettings, clock: Clock) -> None:
        self._path = path
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._users = 0
        self._workers: tuple[ThreadWorker, ThreadWorker] | None = None

    @property
    def writer(self) -> Worker:
        return self._opened()[0]

    @property
    def reader(self) -> Worker:
        return self._opened()[1]

    def _opened(self) -> tuple[ThreadWorker, ThreadWorker]:
        workers = self._workers
        if workers is None:
            raise DatabaseUnavailable(f"SQLite file {self._path} is not open: call open() first")
        return workers

    async def open(self) -> None:
        file.check_file(self._path)
        with self._lock:
            self._users += 1
            if self._workers is None:
                self._workers = (
                    self._start("writer", file.LOCK_TRY),
                    self._start("reader", self._settings.deadline),
                )
            workers = self._workers
        try:
            for worker in workers:
                await worker.ready(CONNECTING)
        except BaseException:
            await self.close()
            raise

    def _start(self, role: str, busy: float) -> ThreadWorker:
        worker = ThreadWorker(
            lambda: file.open_file(self._path, busy=busy),
            name=f"perdure-sqlite-{role}",
            clock=self._clock,
            place=f"SQLite file {self._path}",
            deadline=self._settings.deadline,
        )
        worker.start()
        return worker

    async def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            workers, self._workers = self._workers, None
        for worker in workers or ():
            await worker.close()


class MemoryLink:
    """One connection, there from the beginning, with its tables."""

    def __init__(self, clock: Clock) -> None:
        connection = file.open_memory()
        weakref.finalize(self, connection.close)
        for statement in schema.all_statements("sqlite"):
            connection.execute(statement)
        connection.executemany(
            "insert into perdure_meta (key, value) values (?, ?)",
            schema.initial_meta(clock.now()).items(),
        )
        self.writer: Worker = InlineWorker(connection, clock, "SQLite :memory:")
        self.reader = self.writer

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return
