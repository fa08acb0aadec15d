"""Bring a database to the schema of this code, in one transaction that only one process at a time can have."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.pool import NullPool

from perdure.storage import schema
from perdure.storage.errors import ConfigurationError


def migrate_over(connection: sa.Connection) -> tuple[int, int]:
    """Upgrade to the newest version; the schema version before (0: no tables) and after.

    The connection is inside a transaction that only one process at a time can have: on PostgreSQL one that holds an
    advisory lock, on SQLite one begun as IMMEDIATE. The caller commits.
    """
    before = schema_version(connection)
    if before > schema.SCHEMA_VERSION:  # a newer release was here; what it made is left alone (R16)
        return before, before
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return before, schema_version(connection)


def schema_version(connection: sa.Connection) -> int:
    """What `perdure_meta` says; 0 without tables."""
    if not sa.inspect(connection).has_table("perdure_meta"):
        return 0
    found = connection.execute(
        sa.text("select value from perdure_meta where key = 'schema_version'")
    ).scalar()
    return int(found or 0)


def migrate_file(file: Path) -> tuple[int, int]:
    """Create or upgrade a SQLite file; waits 30 s at most for another process that is writing to it.

    Raises `ConfigurationError` if the file cannot be opened or is not a database."""

    def open_file() -> sqlite3.Connection:
        connection = sqlite3.connect(file, isolation_level=None, timeout=30)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        return connection

    engine = sa.create_engine("sqlite://", creator=open_file, poolclass=NullPool)
    sa.event.listen(engine, "begin", lambda c: c.exec_driver_sql("begin immediate"))
    try:
        with engine.begin() as connection:
            return migrate_over(connection)
    except (sqlite3.Error, sa.exc.DBAPIError) as error:
        reason = getattr(error, "orig", None) or error
        raise ConfigurationError(
            f"cannot migrate the SQLite file {file}: {reason}; "
            "check that its folder exists and is writable, and that the file is a database nobody holds locked"
        ) from error
