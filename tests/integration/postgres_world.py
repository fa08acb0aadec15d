"""What the PostgreSQL tests share: a migrated database, foreign sessions that lock, sessions looked at from outside."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import asyncpg

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, migrate
from tests.contract.world import World
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until


def migrated_database(postgres: PrivatePostgres) -> str:
    """The URL of a fresh database with its tables."""
    template = postgres.template("postgres-tests", _migrate)
    return postgres.url(postgres.create_database(template=template))


def _migrate(url: str) -> None:
    migrate(DatabaseSettings(url))


@contextlib.asynccontextmanager
async def world_of(url: str, **settings: Any) -> AsyncIterator[World]:
    """The stores of one process; ``settings`` are fields of `DatabaseSettings`."""
    world = World(url)
    world.settings = replace(world.settings, **settings)
    world.database = connect(world.settings, clock=SystemClock())
    world.runs, world.cluster = world.database.runs(), world.database.cluster()
    await world.open()
    try:
        yield world
    finally:
        await world.close()


@contextlib.asynccontextmanager
async def foreign(url: str, *statements: str) -> AsyncIterator[asyncpg.Connection]:
    """Somebody else's transaction that has executed these; it is rolled back at the end of the block."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("; ".join(("begin", *statements)))
        yield connection
    finally:
        connection.terminate()  # the server may be gone by now


async def backends_at(url: str, name: str) -> list[int]:
    """Process ids of sessions that execute the query of this name now."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "select pid from pg_stat_activity where datname = current_database() and state = 'active'"
            " and query like $1 || '%'",
            f"-- name: {name}\n",
        )
    finally:
        await connection.close()
    return [row["pid"] for row in rows]


async def waiting_for_lock(url: str, name: str) -> int:
    """The process id of a session whose statement of this name waits for a lock."""

    async def waits() -> int | None:
        connection = await asyncpg.connect(url)
        try:
            pid: int | None = await connection.fetchval(
                "select pid from pg_stat_activity where datname = current_database()"
                " and wait_event_type = 'Lock' and query like $1 || '%'",
                f"-- name: {name}\n",
            )
        finally:
            await connection.close()
        return pid

    found = await until(waits, what=f"{name} waiting for a lock", deadline=5.0)
    assert found is not None
    return found
