"""Each test gets a database nobody else has, with what the fixture's name says in it."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import asyncpg

from tests.harness.audit import read_history

RUNS = "select count(*) from perdure_runs"
FIRST = (
    "insert into perdure_runs (run_id, slot, workflow, seed, payload, start_token, created_at)"
    " values ('r', 0, 'w', 1, '{}', 1, CREATED)"
)


async def execute(url: str, sql: str) -> list[tuple[object, ...]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
            rows = database.execute(sql.replace("CREATED", "1")).fetchall()
            database.commit()
            return rows
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(sql.replace("CREATED", "now()"))]
    finally:
        await connection.close()


async def test_a_fresh_database_is_empty(db_url: str) -> None:
    catalogue = "information_schema.tables where table_name = 'perdure_runs'"
    if db_url.startswith("sqlite"):
        catalogue = "sqlite_master"
    assert await execute(db_url, f"select count(*) from {catalogue}") == [(0,)]


async def test_a_migrated_database_has_the_tables(migrated_url: str) -> None:
    assert await execute(migrated_url, RUNS) == [(0,)]
    await execute(migrated_url, FIRST)
    assert await execute(migrated_url, RUNS) == [(1,)]


async def test_the_next_migrated_database_is_a_new_one(migrated_url: str) -> None:
    await test_a_migrated_database_has_the_tables(migrated_url)


async def test_an_audited_database_writes_its_history(audited_url: str) -> None:
    assert await read_history(audited_url) == []
    await execute(audited_url, FIRST)
    (line,) = await read_history(audited_url)
    assert (line.table, line.op, line.run_id, line.status) == ("runs", "I", "r", "open")
