"""The database file: what must be true of it, and how a connection to it is opened."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from perdure.storage.errors import CannotConnect, ConfigurationError, SchemaError
from perdure.storage.sqlite.failures import ADVICE, is_contention, primary_code

OLDEST = (3, 38, 0)
OPENING = 5.0
"""Seconds that opening waits for a process which recovers or converts the file at the same moment."""
PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
    }
)
"""Why a file cannot be opened now and can be a moment later, with the same settings."""
LOCK_TRY = 0.01
"""Seconds of one try to get the write lock; the tries go on until the call's deadline."""


def check_version() -> None:
    """Raises `ConfigurationError` if Python's SQLite lacks what the statements need."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigurationError(
            f"this Python has SQLite {sqlite3.sqlite_version}, perdure needs "
            f"{'.'.join(map(str, OLDEST))} or newer: use another Python build, or a PostgreSQL URL"
        )


def check_file(path: Path) -> None:
    """Raises `ConfigurationError` saying what to do if the file cannot serve, `SchemaError` if there is none."""
    folder = path.parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"SQLite file {path}: the folder {folder} does not exist: create it or correct the database URL"
        )
    if path.is_dir():
        raise ConfigurationError(
            f"SQLite file {path}: this is a folder: name a file in the database URL"
        )
    if not path.exists():
        raise SchemaError(
            f"SQLite file {path} does not exist; create it with: perdure migrate --db sqlite:///{path}"
        )
    if not path.is_file():
        raise ConfigurationError(
            f"SQLite file {path}: this is no regular file: name one in the database URL"
        )
    for place in (path, folder):
        if not os.access(place, os.R_OK | os.W_OK):
            raise ConfigurationError(
                f"SQLite file {path}: {place} cannot be read and written by this user: change its permissions "
                "(SQLite keeps two more files beside the database)"
            )
    # Nobody may open() the file in this process: closing any descriptor of it drops the locks that SQLite's own
    # connections hold (POSIX), and a last-one-out then deletes the log under other processes. Whether it is a
    # database at all, SQLite says when it is opened.


def open_file(path: Path, *, busy: float) -> sqlite3.Connection:
    """A connection in WAL mode, each commit on disk. ``busy``: seconds a statement waits for a lock."""
    connection: sqlite3.Connection | None = None
    try:
        # Another thread never uses it, but stops its statement at a deadline.
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=OPENING,
            cached_statements=256,
        )
        _prepare(connection, path)
        connection.execute(f"pragma busy_timeout = {round(busy * 1000)}")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise _cannot_open(path, error) from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    mode = connection.execute("pragma journal_mode = wal").fetchone()[0]
    if mode != "wal":
        raise ConfigurationError(
            f"SQLite file {path}: the file system refuses WAL mode (it stays {mode!r}): use a local disk"
        )
    connection.execute("pragma synchronous = full")
    connection.execute("pragma fullfsync = on")  # macOS: past the drive's cache too
    connection.execute("pragma temp_store = memory")
    connection.execute(f"pragma journal_size_limit = {64 << 20}")
    try:
        connection.execute("begin immediate")  # the earliest that a read-only file shows itself
        connection.execute("rollback")
    except sqlite3.OperationalError as error:
        if not is_contention(error):
            raise


def _cannot_open(path: Path, error: sqlite3.Error) -> ConfigurationError:
    code = primary_code(error)
    kind = CannotConnect if code in PASSING else ConfigurationError
    advice = ADVICE.get(-1 if code is None else code)
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        advice = "this is not a SQLite database, or a damaged one: correct the URL or restore it from a backup"
    return kind(f"SQLite file {path} cannot be opened: {advice or error} ({error})")


def open_memory() -> sqlite3.Connection:
    """An empty database that lives as long as the connection."""
    return sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=256
    )
