"""Runners and shards on PostgreSQL, over one connection that is replaced when it is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

import asyncpg

from perdure.storage.clock import Clock
from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import ConfigurationError, RunnerDeclaredDead
from perdure.storage.interface import Capabilities, ClusterStore, Renewal, RunnerIdentity
from perdure.storage.model import Meta, ShardHold, Topology
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.meta import capabilities_of, read_agreed
from perdure.storage.postgres.pool import Calls, Lane
from perdure.storage.postgres.queries import Row
from perdure.storage.postgres.session import Session, name_of, open_session


class PostgresClusterStore(ClusterStore):
    """For one thread and loop; calls queue behind each other."""

    def __init__(self, settings: DatabaseSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._address = address_of(settings.url)
        self._lane = Lane(1, self._open_session)
        self._calls = Calls()
        self.capabilities: Capabilities = capabilities_of(None)

    async def open(self) -> Meta:
        return await self._calls.shielded(self._open())

    async def _open(self) -> Meta:
        session = await open_session(self._settings, self._address, hot=True)
        try:
            meta = await read_agreed(session, self._settings, self._address)
        except BaseException:
            await session.close()
            raise
        self.capabilities = capabilities_of(session)
        self._lane.offer(session)
        return meta

    async def close(self) -> None:
        await self._calls.settled(self._settings.deadline)
        await self._lane.close()

    async def _open_session(self) -> Session:
        return await open_session(
            self._settings, self._address, hot=True, seconds=self._settings.deadline
        )

    async def _call(self, sql: str, *args: object, writes: bool = True) -> list[Row]:
        deadline = self._settings.deadline

        async def use(session: Session) -> list[Row]:
            return await session.fetch(sql, *args, writes=writes, deadline=deadline)

        return await self._calls.shielded(self._lane.run(use, what=name_of(sql), patience=deadline))

    async def agree(self, *, shard_count: int, lock_mode: str) -> Meta:
        meta = await self._calls.shielded(self._agree(shard_count, lock_mode))
        where = self._address.shown
        if meta.shard_count != shard_count:
            raise ConfigurationError(
                f"the cluster in {where} has {meta.shard_count} shards, this process asks for {shard_count}; "
                f"set PERDURE_SHARDS={meta.shard_count}"
            )
        if meta.lock_mode != lock_mode:
            raise ConfigurationError(
                f"the cluster in {where} holds shards by {meta.lock_mode!r} locks, this process asks for "
                f"{lock_mode!r}; set PERDURE_SHARD_LOCK={meta.lock_mode}"
            )
        return meta

    async def _agree(self, shard_count: int, lock_mode: str) -> Meta:
        async def transaction(connection: asyncpg.Connection) -> None:
            async with connection.transaction():
                # The row of another process that is agreeing now is waited for; then its word counts.
                await connection.execute(queries.AGREE, str(shard_count), lock_mode)
                rows = {
                    row["key"]: row["value"] for row in await connection.fetch(queries.READ_META)
                }
                if rows["shard_count"] == str(shard_count):
                    await connection.execute(queries.CREATE_SHARDS, shard_count)

        async def use(session: Session) -> Meta:
            await session.run(
                transaction, what="agree", writes=True, deadline=self._settings.deadline
            )
            return await read_agreed(session, self._settings, self._address)

        return await self._lane.run(use, what="agree", patience=self._settings.deadline)

    async def hint_key(self, fresh: str) -> str:
        known = await self._call(queries.READ_HINT_KEY, writes=False)
        rows = known or await self._call(queries.HINT_KEY, fresh)
        return str(rows[0]["value"])

    async def register(self, me: RunnerIdentity, lease: float) -> None:
        rows = await self._call(
            queries.REGISTER,
            me.runner_id,
            me.replica_id,
            me.address,
            json.dumps(list(me.workflows), ensure_ascii=False),
            json.dumps(dict(me.info), ensure_ascii=False),
            lease,
        )
        if not rows:
            raise RunnerDeclaredDead(
                f"runner {me.runner_id} of {me.replica_id!r} has been declared dead already; register a new one"
            )

    async def renew(self, runner_id: int, lease: float) -> Renewal:
        rows = await self._call(queries.RENEW, runner_id, lease)
        return Renewal(alive=rows[0]["alive"], db_now=rows[0]["db_now"])

    async def set_draining(self, runner_id: int) -> None:
        await self._call(queries.SET_DRAINING, runner_id)

    async def read_topology(self) -> Topology:
        rows = await self._call(queries.TOPOLOGY, writes=False)
        runners = [columns.runner_row(row) for row in rows if row["runner_row"] is True]
        shards = [columns.shard_row(row) for row in rows if row["runner_row"] is False]
        return Topology(
            runners=sorted(runners, key=lambda runner: runner.runner_id),
            shards=sorted(shards, key=lambda shard: shard.shard_id),
            db_now=rows[0]["db_now"],
        )

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        if await self._call(queries.DECLARE_DEAD, runner_id, renew_count):
            return True
        rows = await self._call(queries.IS_DEAD, runner_id, writes=False)
        return not rows or bool(rows[0]["dead"])

    async def declare_others_dead(self, runner_id: int) -> Sequence[int]:
        rows = await self._call(queries.DECLARE_OTHERS_DEAD, runner_id)
        return sorted(row["runner_id"] for row in rows)

    async def take_shards(
        self, runner_id: int, shard_ids: Sequence[int], dead: Sequence[int]
    ) -> Sequence[ShardHold]:
        if not shard_ids:
            return []
        rows = await self._call(queries.TAKE_SHARDS, runner_id, sorted(shard_ids), list(dead))
        return sorted(
            (ShardHold(row["shard_id"], row["epoch"]) for row in rows), key=lambda h: h.shard_id
        )

    async def release_shards(self, runner_id: int, holds: Sequence[ShardHold]) -> None:
        if not holds:
            return
        ordered = sorted(holds, key=lambda hold: hold.shard_id)
        ids, epochs = [hold.shard_id for hold in ordered], [hold.epoch for hold in ordered]
        await self._call(queries.RELEASE_SHARDS, runner_id, ids, epochs)

    async def leave(self, runner_id: int) -> None:
        await self._call(queries.LEAVE, runner_id)

    async def delete_dead_runners(self, before: float) -> int:
        rows = await self._call(queries.DELETE_DEAD_RUNNERS, before)
        return int(rows[0][0])
