"""From a URL to a database. The only module that knows which engines exist."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from perdure.storage import schema
from perdure.storage.clock import Clock
from perdure.storage.errors import ConfigurationError
from perdure.storage.interface import ClusterStore, HintChannel, RunStore
from perdure.storage.upkeep import UpkeepStore

T = TypeVar("T")

SUPPORTED = "postgresql://user@host/database, sqlite:////absolute/file.db or sqlite:///:memory:"
LATER = frozenset({"mysql", "mariadb", "mssql", "oracle", "cockroachdb"})


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """Where the database is and how it may be used.

    url: with its password if it needs one; never shown. schema: PostgreSQL only, the schema of the tables (None: the
    role's search path). pool: connections of a `RunStore`; each `ClusterStore` and each `HintChannel` has one of its
    own. deadline: seconds a statement may take (R10). lock_timeout: seconds a sender may wait for a row.
    application_name: shown by the server.
    """

    url: str = field(repr=False)
    schema: str | None = None
    pool: int = 10
    deadline: float = 5.0
    lock_timeout: float = 3.0
    application_name: str = "perdure"


class Database(Protocol):
    """Makes the stores. Each call gives a new one, not yet open; those of one `:memory:` database share it."""

    def runs(self) -> RunStore: ...

    def cluster(self) -> ClusterStore: ...

    def keeper(self) -> ClusterStore:
        """For a keeper: while its connection is lost, the other stores made here wait before they make new ones."""
        ...

    def hints(self) -> HintChannel: ...


def connect(settings: DatabaseSettings, *, clock: Clock) -> Database:
    """The database behind a URL; nothing is opened yet. Raises `ConfigurationError` for a URL it cannot use."""
    url = parse(settings.url)
    if url.get_backend_name() == "postgresql":
        from perdure.storage.postgres import PostgresDatabase

        return PostgresDatabase(settings, clock=clock)
    from perdure.storage.sqlite import SqliteDatabase

    return SqliteDatabase(settings, clock=clock)


def upkeep(settings: DatabaseSettings, *, clock: Clock) -> UpkeepStore:
    """For commands that change or look at a whole cluster. Raises `ConfigurationError` for a URL it cannot use."""
    if parse(settings.url).get_backend_name() == "postgresql":
        from perdure.storage.postgres.upkeep import PostgresUpkeepStore

        return PostgresUpkeepStore(settings, clock=clock)
    from perdure.storage.sqlite import SqliteDatabase
    from perdure.storage.sqlite.upkeep import SqliteUpkeepStore

    return SqliteUpkeepStore(SqliteDatabase(settings, clock=clock))


def migrate(settings: DatabaseSettings) -> tuple[int, int]:
    """Bring the schema up to this release; the versions before (0: there were no tables) and after.

    Blocks; safe when several processes do it at once, and from below a running event loop.
    Raises `CannotConnect` if the database cannot be reached, `ConfigurationError` if it refuses.
    """
    from perdure.storage.migrations import run  # Alembic is loaded only where it is used

    if parse(settings.url).get_backend_name() == "postgresql":
        from perdure.storage.postgres import migration

        return in_own_thread(lambda: migration.migrate(settings))
    file = database_file(settings.url)
    if file is None:  # a database in memory is born with its tables
        return schema.SCHEMA_VERSION, schema.SCHEMA_VERSION
    return run.migrate_file(file)


def parse(url: str) -> URL:
    """A usable URL, or `ConfigurationError` saying what is wrong with it; the password is never in the message."""
    try:
        parsed = make_url(url.strip().replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        # The text itself is not repeated: what could not be parsed may hold a password anywhere.
        raise ConfigurationError(
            f"the database URL cannot be read (special characters in a password must be %-encoded); use {SUPPORTED}"
        ) from None
    engine, shown = parsed.get_backend_name(), redact(url)
    if engine in LATER:
        raise ConfigurationError(f"{shown}: {engine} is not in this release; use {SUPPORTED}")
    if engine not in ("postgresql", "sqlite"):
        raise ConfigurationError(f"{shown}: unknown database {engine!r}; use {SUPPORTED}")
    if parsed.drivername not in ("postgresql", "postgresql+asyncpg", "sqlite"):
        raise ConfigurationError(
            f"{shown}: another driver cannot be chosen; write {engine}:// instead of {parsed.drivername}://"
        )
    return parsed


def redact(url: str) -> str:
    """The URL as it may be shown: the password is ***; a text that is no URL is not shown at all."""
    try:
        parsed = make_url(url.strip().replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        return "(unreadable URL)"
    if parsed.get_backend_name() == "sqlite":
        return url.strip().partition("?")[0]
    secret = [key for key in parsed.query if "pass" in key.lower()]
    return parsed.difference_update_query(secret).render_as_string(hide_password=True)


def database_file(url: str) -> Path | None:
    """The file of a SQLite database, absolute; None for a server or `:memory:`."""
    parsed = parse(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database)).expanduser().resolve()


def in_own_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread, so that it may use an event loop of its own below a running one."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="perdure-migrate")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
