"""Driver errors become errors of the seam, here only."""

from __future__ import annotations

import sqlite3

from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    PerdureError,
    StorageError,
)

CONTENTION = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
REFUSED = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_RANGE,
    }
)
ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: make room, the work goes on by itself",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only: allow writing to both",
    sqlite3.SQLITE_PERM: "access is not allowed: allow reading and writing to the file and its folder",
    sqlite3.SQLITE_IOERR: "reading or writing failed: check the disk",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that the folder exists and may be written to",
    sqlite3.SQLITE_NOMEM: "there is not enough memory",
    sqlite3.SQLITE_INTERRUPT: "the statement was stopped at its deadline",
    sqlite3.SQLITE_BUSY: "another process holds it: look for a long transaction of another program",
    sqlite3.SQLITE_LOCKED: "another connection holds it: look for a long transaction of another program",
}
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def primary_code(error: BaseException) -> int | None:
    """SQLite's result code without its extension; None when the error is not SQLite's."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def is_contention(error: BaseException) -> bool:
    """Somebody else has the lock that was asked for."""
    return primary_code(error) in CONTENTION


def translate(error: Exception, place: str) -> Exception:
    """The seam's error for ``error`` in a transaction that was rolled back. ``place``: which database."""
    if isinstance(error, PerdureError):
        return error
    if isinstance(error, UnicodeEncodeError):
        return DataRefused(
            f"{place}: a text holds {error.object[error.start]!r}, which UTF-8 cannot encode: "
            "replace lone surrogates before storing it"
        )
    if isinstance(error, OverflowError):
        return DataRefused(
            f"{place}: a number is too large for 64 bits ({error}): store it as text"
        )
    if not isinstance(error, sqlite3.Error):
        return error
    code = primary_code(error)
    if code in REFUSED or isinstance(error, sqlite3.DataError | sqlite3.IntegrityError):
        return DataRefused(f"{place}: the data was refused ({error})")
    if code in CONTENTION:
        return ConflictError(f"{place}: {ADVICE[code]} ({error})")
    if code in ADVICE:
        return DatabaseUnavailable(f"{place}: {ADVICE[code]} ({error})")
    if code in DAMAGED:
        return StorageError(f"{place}: the file is damaged ({error}): restore it from a backup")
    if code is None and isinstance(error, sqlite3.ProgrammingError):
        return DataRefused(f"{place}: a value cannot be stored ({error})")
    return StorageError(f"{place}: {error}")
