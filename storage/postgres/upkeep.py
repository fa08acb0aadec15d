"""Upkeep of a cluster on PostgreSQL: whole-cluster changes, each one transaction, over one connection."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from perdure.storage.clock import Clock
from perdure.storage.connect import DatabaseSettings
from perdure.storage.examination import (
    HeldRun,
    RunFacts,
    ServerFacts,
    SessionFacts,
    StuckRun,
    TableFacts,
)
from perdure.storage.model import Meta, Topology
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.meta import read_agreed
from perdure.storage.postgres.server import Server
from perdure.storage.postgres.session import Session
from perdure.storage.upkeep import (
    EPOCHS_LOST,
    Resharding,
    UpkeepStore,
    Voided,
    divided,
    refuse_the_living,
)

T = TypeVar("T")

LOOK_SECONDS = 60.0
"""Most that one question about the whole database may take."""
UPKEEP_SECONDS = 600.0
"""Most that a change of the whole cluster may take; nothing else is at work meanwhile."""


class PostgresUpkeepStore(UpkeepStore):
    """See `UpkeepStore`."""

    def __init__(self, settings: DatabaseSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._server = Server(settings, clock)
        self._session: Session | None = None

    async def open(self) -> Meta:
        session = await self._server.open_session(hot=False)
        try:
            meta = await read_agreed(session, self._settings, self._server.address)
        except BaseException:
            await session.close()
            raise
        self._session = session
        return meta

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _opened(self) -> Session:
        assert self._session is not None, "open() first"
        return self._session

    async def _change(self, what: str, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """One transaction with the runners' table locked, in which only our own deadline counts."""

        async def transaction(connection: asyncpg.Connection) -> T:
            async with connection.transaction():
                await connection.execute(
                    "set local statement_timeout = 0; set local idle_in_transaction_session_timeout = 0"
                )
                await connection.execute(queries.LOCK_RUNNERS)
                return await work(connection)

        return await self._opened.run(transaction, what=what, writes=True, deadline=UPKEEP_SECONDS)

    async def read_topology(self) -> Topology:
        rows = await self._opened.fetch(
            queries.TOPOLOGY, writes=False, deadline=self._settings.deadline
        )
        return columns.topology_of(rows)

    async def reshard(self, shard_count: int, *, apply: bool) -> Resharding:
        async def work(connection: asyncpg.Connection) -> Resharding:
            topology = columns.topology_of(await connection.fetch(queries.TOPOLOGY))
            after = divided(topology.shards, shard_count)
            if apply:
                refuse_the_living(topology)
                await connection.execute(
                    queries.REPLACE_SHARDS,
                    [shard.shard_id for shard in after],
                    [shard.slot_lo for shard in after],
                    [shard.slot_hi for shard in after],
                    [shard.epoch for shard in after],
                )
                await connection.execute(queries.SET_META, "shard_count", str(shard_count))
            return Resharding(topology.shards, after)

        return await self._change("reshard", work)

    async def void_claims(self, *, force: bool) -> Voided:
        async def work(connection: asyncpg.Connection) -> Voided:
            topology = columns.topology_of(await connection.fetch(queries.TOPOLOGY))
            if not force:
                refuse_the_living(topology)
            dead = {row["runner_id"] for row in await connection.fetch(queries.VOID_RUNNERS)}
            runs = await connection.fetch(queries.VOID_CLAIMS)
            held = any(shard.runner_id is not None for shard in topology.shards)
            moved = await self._acknowledge_server(connection)
            if not (dead or runs or held or moved):
                return Voided((), (), 0, None)
            shards = await connection.fetch(queries.VOID_SHARDS, EPOCHS_LOST)
            cluster_id = secrets.token_hex(8)
            await connection.execute(queries.SET_META, "cluster_id", cluster_id)
            return Voided(
                [runner for runner in topology.runners if runner.runner_id in dead],
                [(row["run_id"], row["workflow"]) for row in runs],
                len(shards),
                cluster_id,
            )

        return await self._change("void_claims", work)

    async def _acknowledge_server(self, connection: asyncpg.Connection) -> bool:
        """The operator knows of the change of server; True if there was one that nobody had acknowledged."""
        rows = {row["key"]: row["value"] for row in await connection.fetch(queries.READ_META)}
        here = str(self._opened.position)
        moved = rows.get("server") not in (None, here) or rows.get("server_change") is not None
        if moved:
            await connection.execute(queries.SET_META, "server", here)
            await connection.execute(queries.SET_META, "server_change", None)
        return moved

    # -- looking
    async def _read(self, sql: str, *args: object) -> list[asyncpg.Record]:
        return await self._opened.fetch(sql, *args, writes=False, deadline=LOOK_SECONDS)

    async def server_facts(self, *, open_for: float, idle_for: float) -> ServerFacts:
        rows = await self._read(queries.EXAMINE_SETTINGS)
        settings = {row["name"]: row["setting"] for row in rows}
        sessions = await self._read(queries.EXAMINE_SESSIONS, open_for, idle_for)
        reserved = ("superuser_reserved_connections", "reserved_connections")
        return ServerFacts(
            settings=settings,
            server=True,
            rotated=(await self._server.lock_facts()).rotated,
            connections=(await self._read(queries.EXAMINE_CONNECTIONS))[0]["n"],
            connections_most=int(settings["max_connections"])
            - sum(int(settings.get(name, 0)) for name in reserved),
            hidden=sum(1 for row in sessions if row["state"] is None),
            sessions=[SessionFacts(**row) for row in sessions if row["state"] is not None],
            tables=[TableFacts(**row) for row in await self._read(queries.EXAMINE_TABLES)],
        )

    async def run_facts(self, *, idle: float, limit: int) -> RunFacts:
        held = await self._read(queries.EXAMINE_HELD, limit)
        return RunFacts(
            workflows={
                row["workflow"]: row["n"] for row in await self._read(queries.EXAMINE_WORKFLOWS)
            },
            stuck=[StuckRun(**row) for row in await self._read(queries.EXAMINE_STUCK, idle, limit)],
            held=[HeldRun(row["run_id"], row["workflow"], row["hold"]) for row in held],
            held_count=held[0]["n"] if held else 0,
        )
