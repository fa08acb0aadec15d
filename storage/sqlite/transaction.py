"""One transaction as the functions of this engine see it: named statements, one instant."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from perdure.storage.clock import Clock, to_micros
from perdure.storage.errors import DataRefused
from perdure.storage.sqlite.failures import is_contention
from perdure.storage.sqlite.statements import statements

Row = tuple[Any, ...]
Values = Mapping[str, Any]


class Transaction:
    """Open until the function it was given to returns; committed then, rolled back when it raises.

    ``now``: the database's clock in microseconds. A SQLite file belongs to one host, whose clock it is; it is
    read after the lock was taken, so a writer's instants are never older than those of the writer before it.
    """

    __slots__ = ("_connection", "now")

    def __init__(self, connection: sqlite3.Connection, now: int) -> None:
        self._connection = connection
        self.now = now

    def rows(self, name: str, values: Values | None = None) -> list[Row]:
        """All rows of a statement, RETURNING included: read in full before the next statement starts."""
        return self._connection.execute(statements()[name], values or {}).fetchall()

    def each(self, name: str, values: Values) -> sqlite3.Cursor:
        """The same, row by row as they are read. Close it before the next statement."""
        return self._connection.execute(statements()[name], values)

    def row(self, name: str, values: Values | None = None) -> Row | None:
        """The only row of a statement, or None."""
        found = self.rows(name, values)
        return found[0] if found else None

    def run(self, name: str, values: Values | None = None) -> None:
        self._connection.execute(statements()[name], values or {})

    def many(self, name: str, values: Iterable[Values | Sequence[Any]]) -> None:
        """One statement for many sets of values."""
        self._connection.executemany(statements()[name], values)

    def select(self, text: str, values: Values) -> list[Row]:
        """A statement put together from fixed parts, for lists with filters."""
        return self._connection.execute(text, values).fetchall()

    def trace(self, listener: Callable[[str], None] | None) -> None:
        """Hand every statement of this connection to a listener from now on; None: no more."""
        self._connection.set_trace_callback(listener)


def begin_write(
    connection: sqlite3.Connection, *, until: float, clock: Clock, wanted: Callable[[], bool]
) -> bool:
    """``begin immediate``, asking again until ``until`` (monotonic). False: not got, or not wanted any more.

    SQLite's own busy handler sleeps ever longer and starves under a steady writer, so each try is short (the
    connection's busy time-out) and begins anew at a millisecond.
    """
    while wanted():
        try:
            connection.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if not is_contention(error):
                raise
            if clock.monotonic() >= until:
                return False
        else:
            return True
    return False


def database_now(clock: Clock) -> int:
    """The host's clock in microseconds."""
    return to_micros(clock.now())


def as_list(values: Iterable[Any]) -> str:
    """A batch as one JSON text, to be opened by json_each."""
    text = json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))
    if "\\u0000" in text and any(_holds_nul(value) for value in json.loads(text)):
        raise DataRefused("an id or name holds a NUL character: remove it")
    return text


def _holds_nul(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_nul(part) for part in value)
    return isinstance(value, str) and "\0" in value


def storable(text: str | None, what: str) -> str | None:
    """The text itself. NUL is refused, as the server engines do, so that what works here works there."""
    if text is not None and "\0" in text:
        raise DataRefused(f"{what} holds a NUL character: remove or escape it before storing it")
    return text
