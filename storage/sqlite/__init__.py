"""SQLite: a file shared by processes of one host, or `:memory:`."""

from perdure.storage.sqlite.database import SqliteDatabase

__all__ = ["SqliteDatabase"]
