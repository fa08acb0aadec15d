"""The witness: triggers that keep an append-only history of what was committed.

``audit_history`` has one line per row written to the tables named in ``TRACKED``, in the
transaction of the write itself, so an aborted write leaves no line. Lines of one run are in the
order of its writes. On PostgreSQL each line also has the transaction, the backend and the
snapshot of the *statement* that wrote it; SQLite lets one writer in at a time, there the order of
the lines is the order of the commits. The checkers are in ``tests.harness.checkers``.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import asyncpg

from .postgres import in_own_loop

HISTORY = "audit_history"


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row written by somebody. What a table does not have is None.

    op: I, U or D. table: without the prefix. ``old_…``: what stood there before (None for I);
    the plain columns are what stands there now (None for D, but for run_id, seq, message_id and
    runner_id of a runner, which name the row). at: seconds since 1970 by the database's clock.
    txid, backend, snapshot (``xmin:xmax:xip,…``): PostgreSQL only. transaction: equal for all
    lines of one transaction where the engine says so, else None.
    """

    id: int
    table: str
    op: str
    at: float
    run_id: str | None = None
    status: str | None = None
    claim_id: int | None = None
    epoch: int | None = None
    revision: int | None = None
    runner_id: int | None = None
    next_seq: int | None = None
    last_batch: int | None = None
    old_status: str | None = None
    old_claim_id: int | None = None
    old_epoch: int | None = None
    old_revision: int | None = None
    old_runner_id: int | None = None
    old_next_seq: int | None = None
    seq: int | None = None
    step_key: str | None = None
    kind: str | None = None
    attempt: int | None = None
    message_id: str | None = None
    consumed_seq: int | None = None
    wake_seq: int | None = None
    wake_at: float | None = None
    hold: str | None = None
    renew_count: int | None = None
    dead: bool | None = None
    old_dead: bool | None = None
    shard_id: int | None = None
    txid: int | None = None
    backend: int | None = None
    snapshot: str | None = None


# table → (what is kept of the new row, what is kept of the old one, what names the row). A pair
# "column=source" keeps a source of another name.
TRACKED: Mapping[str, tuple[str, str, str]] = {
    "runs": ("status claim_id=last_claim last_batch revision=last_revision", "status", "run_id"),
    "fences": (
        "status claim_id epoch revision runner_id next_seq last_batch",
        "status claim_id epoch revision runner_id next_seq",
        "run_id",
    ),
    "wakes": ("wake_seq wake_at hold", "", "run_id"),
    "steps": ("step_key kind attempt status claim_id", "status claim_id", "run_id seq"),
    "messages": ("kind wake_seq consumed_seq", "", "run_id message_id"),
    "runners": ("renew_count dead", "dead", "runner_id"),
    "shards": ("epoch runner_id", "epoch runner_id", "shard_id"),
}
INSTANTS = frozenset({"wake_at"})
COLUMNS = tuple(column.name for column in fields(AuditRow))


def _pairs(words: str) -> list[tuple[str, str]]:
    return [(word.partition("=")[0], word.rpartition("=")[2]) for word in words.split()]


# ---- PostgreSQL -------------------------------------------------------------------------------

_POSTGRES_HISTORY = """
create table {schema}.audit_history (
  id bigserial primary key, "table" text not null, op text not null,
  at float8 not null default extract(epoch from clock_timestamp()),
  run_id text, status text, claim_id bigint, epoch bigint, revision bigint, runner_id bigint,
  next_seq bigint, last_batch bigint, old_status text, old_claim_id bigint, old_epoch bigint,
  old_revision bigint, old_runner_id bigint, old_next_seq bigint, seq bigint, step_key text,
  kind text, attempt int, message_id text, consumed_seq bigint, wake_seq bigint, wake_at float8,
  hold text, renew_count bigint, dead boolean, old_dead boolean, shard_id int,
  txid bigint not null default pg_current_xact_id()::text::bigint,
  backend int not null default pg_backend_pid(), snapshot text
);
"""

# The function itself would see a newer snapshot than the statement that fires it; the condition of
# the trigger is evaluated inside the statement, so that is where the snapshot is noted.
_POSTGRES_TRIGGER = """
create function {schema}.audit_{table}() returns trigger language plpgsql security definer as $$
begin
  insert into {schema}.audit_history ("table", op, snapshot, {columns})
  values ('{table}', left(tg_op, 1), current_setting('perdure_audit.snapshot'), {values});
  return null;
end $$;
create trigger audit_{table} after insert or update or delete on {schema}.{prefix}{table}
  for each row when (set_config('perdure_audit.snapshot', pg_current_snapshot()::text, true) <> '')
  execute function {schema}.audit_{table}();
"""


def postgres_audit_sql(*, schema: str = "public", prefix: str = "perdure_") -> str:
    """The script that creates history and triggers on PostgreSQL 13 or newer."""
    script = [_POSTGRES_HISTORY.format(schema=schema)]
    for table, (kept, before, named) in TRACKED.items():
        columns: dict[str, str] = {}
        for column, source in _pairs(kept):
            value = f"new.{source}"
            columns[column] = f"extract(epoch from {value})" if column in INSTANTS else value
        columns |= {f"old_{column}": f"old.{source}" for column, source in _pairs(before)}
        columns |= {column: f"coalesce(new.{column}, old.{column})" for column in named.split()}
        script.append(
            _POSTGRES_TRIGGER.format(
                schema=schema,
                prefix=prefix,
                table=table,
                columns=", ".join(columns),
                values=", ".join(columns.values()),
            )
        )
    return "".join(script)


async def _install_postgres(url: str, schema: str) -> None:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        async with connection.transaction():
            await connection.execute(postgres_audit_sql(schema=schema))
    finally:
        await connection.close()


async def _read_postgres(url: str, schema: str, after: int) -> list[AuditRow]:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        listed = ", ".join(f'"{column}"' for column in COLUMNS)
        sql = f"select {listed} from {schema}.audit_history where id > $1 order by id"
        return [AuditRow(*record) for record in await connection.fetch(sql, after)]
    finally:
        await connection.close()


# ---- SQLite -----------------------------------------------------------------------------------

_SQLITE_HISTORY = """
create table audit_history (
  id integer primary key autoincrement, "table" text not null, op text not null,
  at real not null default ({at}), {columns}
);
"""
SQLITE_DEFAULTS = {"at": "(julianday('now') - 2440587.5) * 86400.0"}
_SQLITE_TRIGGER = """
create trigger audit_{table}_{op} after {event} on {prefix}{table} begin
  insert into audit_history ("table", op, {columns}) values ('{table}', '{op}', {values});
end;
"""


def sqlite_audit_sql(
    *, prefix: str = "perdure_", defaults: Mapping[str, str] = SQLITE_DEFAULTS
) -> str:
    """The script that creates history and triggers on SQLite.

    defaults: SQL expressions for columns that no trigger fills; who has functions of his own for time, transaction
    or writer names them here."""
    declared = [
        f"{column} default ({defaults[column]})" if column in defaults else column
        for column in COLUMNS[4:]
    ]
    script = [
        _SQLITE_HISTORY.format(at=defaults["at"], columns=", ".join(declared)),
    ]
    for table, (kept, before, named) in TRACKED.items():
        for op, event in (("I", "insert"), ("U", "update"), ("D", "delete")):
            columns: dict[str, str] = {}
            if op != "D":
                for column, source in _pairs(kept):
                    scale = " / 1000000.0" if column in INSTANTS else ""
                    columns[column] = f"new.{source}{scale}"
            if op != "I":
                columns |= {f"old_{column}": f"old.{source}" for column, source in _pairs(before)}
            columns |= {
                column: f"{'old' if op == 'D' else 'new'}.{column}" for column in named.split()
            }
            script.append(
                _SQLITE_TRIGGER.format(
                    table=table,
                    prefix=prefix,
                    op=op,
                    event=event,
                    columns=", ".join(columns),
                    values=", ".join(columns.values()),
                )
            )
    return "".join(script)


def _open_sqlite(url: str) -> sqlite3.Connection:
    path = re.sub(r"^sqlite(\+\w+)?:///", "", url)
    return sqlite3.connect(path, timeout=30, isolation_level=None)


def _read_sqlite(url: str, after: int) -> list[AuditRow]:
    listed = ", ".join(f'"{column}"' for column in COLUMNS)
    with closing(_open_sqlite(url)) as connection:
        found = connection.execute(
            f"select {listed} from audit_history where id > ? order by id", (after,)
        )
        return [_from_sqlite(values) for values in found]


def _from_sqlite(values: tuple[Any, ...]) -> AuditRow:
    named = dict(zip(COLUMNS, values, strict=True))
    for column in ("dead", "old_dead"):
        named[column] = None if named[column] is None else bool(named[column])
    return AuditRow(**named)


# ---- both -------------------------------------------------------------------------------------


async def install_audit(url: str, *, schema: str = "public") -> None:
    """Create history and triggers in a migrated database. At most once per database."""
    if url.startswith("sqlite"):
        with closing(_open_sqlite(url)) as connection:
            connection.executescript(f"begin immediate; {sqlite_audit_sql()} commit;")
    else:
        await _install_postgres(url, schema)


async def read_history(url: str, *, after: int = 0, schema: str = "public") -> list[AuditRow]:
    """The lines with an id above ``after``, oldest first.

    On PostgreSQL a transaction still open may add lines with lower ids later: read when the
    writers have ended, or read everything again.
    """
    if url.startswith("sqlite"):
        return _read_sqlite(url, after)
    return await _read_postgres(url, schema, after)


def install_audit_now(url: str, *, schema: str = "public") -> None:
    """:func:`install_audit` for code without ``await``, such as a template's preparation."""
    in_own_loop(install_audit(url, schema=schema))
