"""Runners and shards on PostgreSQL, over one connection that is replaced when it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime

import asyncpg
import structlog

from perdure.storage.clock import Clock
from perdure.storage.errors import DisagreementError, RunnerDeclaredDead
from perdure.storage.interface import Capabilities, ClusterStore, Renewal, RunnerIdentity
from perdure.storage.model import LockFacts, Meta, ShardHold, Topology
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.liveness import lock_key
from perdure.storage.postgres.meta import capabilities_of, read_agreed
from perdure.storage.postgres.pool import Calls, Lane
from perdure.storage.postgres.queries import Row
from perdure.storage.postgres.server import Server
from perdure.storage.postgres.session import CONNECT_SECONDS, Session, name_of
from perdure.storage.verdicts import still_alive

log = structlog.stdlib.get_logger("perdure.storage")


class PostgresClusterStore(ClusterStore):
    """For one thread and loop; calls queue behind each other."""

    def __init__(self, server: Server, *, clock: Clock, keeper: bool = False) -> None:
        """keeper: its connection comes first, the others of the process wait for it."""
        self._server = server
        self._settings = server.settings
        self._clock = clock
        self._keeper = keeper
        self._address = server.address
        self._lane = Lane(1, self._open_session)
        self._calls = Calls()
        self._cluster_id = ""
        self._session: Session | None = None
        self._forgone = False
        self._lost: Callable[[], None] = _nobody_asked
        self.capabilities: Capabilities = capabilities_of(None)

    async def open(self) -> Meta:
        return await self._calls.shielded(self._open())

    async def _open(self) -> Meta:
        session = await self._connect()
        try:
            meta = await read_agreed(session, self._settings, self._address)
        except BaseException:
            await session.close()
            raise
        self._cluster_id = meta.cluster_id
        self._server.told(meta.server_change)
        self.capabilities = capabilities_of(session)
        await self._lane.offer(session)
        return meta

    async def close(self) -> None:
        try:
            await self._calls.settled(self._settings.deadline)
            session = self._session
            if self._keeper and session is not None and session.alive:  # it is not wanted any more
                self._server.precedence.ended(session)  # else another is to come first
        finally:  # whoever does not wait that long leaves nothing open all the same
            await self._lane.close()

    async def _open_session(self) -> Session:
        return await self._connect(self._settings.deadline)

    async def _connect(self, seconds: float = CONNECT_SECONDS) -> Session:
        session = await self._server.open_session(
            hot=True, seconds=seconds, keeper=self._keeper, guarded=True
        )
        session.connection.add_termination_listener(lambda _: self._lost())
        self._session = session
        if self._forgone:  # it was on its way then
            self._server.precedence.ended(session)
        return session

    def forgo(self) -> None:
        if self._keeper:
            self._keeper, self._forgone = False, True
            self._server.precedence.forgone()

    def on_lost(self, call: Callable[[], None]) -> None:
        self._lost = call

    async def _call(self, sql: str, *args: object, writes: bool = True) -> list[Row]:
        deadline = self._settings.deadline

        async def use(session: Session) -> list[Row]:
            return await session.fetch(sql, *args, writes=writes, deadline=deadline)

        return await self._calls.shielded(self._lane.run(use, what=name_of(sql), patience=deadline))

    async def agree(self, *, shard_count: int, lock_mode: str) -> Meta:
        meta = await self._calls.shielded(self._agree(shard_count, lock_mode))
        where = self._address.shown
        if meta.shard_count != shard_count:
            raise DisagreementError(
                f"the cluster in {where} has {meta.shard_count} shards, this process asks for {shard_count}; "
                f"set PERDURE_SHARDS={meta.shard_count}"
            )
        if meta.lock_mode != lock_mode:
            raise DisagreementError(
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

    @property
    def history(self) -> int:
        return self._server.history

    def commits_lost(self, what: str) -> None:
        self._server.commits_lost(what)

    async def record_server(self) -> None:
        await self._calls.shielded(self._record_server())

    async def _record_server(self) -> None:
        deadline = self._settings.deadline

        async def use(session: Session) -> None:
            found = session.position
            if found.timeline is None:
                found = await session.where_now(deadline=deadline)
            rows = await session.fetch(queries.READ_META, writes=False, deadline=deadline)
            known = {row["key"]: row["value"] for row in rows}
            change = self._server.take_change()
            before = known.get("server")
            if change is None and before is not None and not found.may_be(before):
                change = f"the cluster was last used on the server {before}, this is {found}"
                log.error("server.changed", database=self._address.shown, what=change)
            facts = {} if found.timeline is None else {"server": str(found)}  # a standby tells none
            written = known.get("server_change")
            if change is not None and self._server.is_news(written):
                self._server.told(written, mine=True)  # somebody was here first: one note is enough
            elif change is not None:
                facts["server_change"] = f"{_utc(self._clock.now())} {change}"
                self._server.told(facts["server_change"], mine=True)
            for key, value in facts.items():
                if known.get(key) != value:
                    await session.fetch(
                        queries.RECORD_FACT, key, value, writes=True, deadline=deadline
                    )

        await self._lane.run(use, what="record_server", patience=deadline)

    async def read_lock_facts(self) -> LockFacts:
        return await self._calls.shielded(self._server.lock_facts())

    async def change_lock_mode(self, lock_mode: str) -> None:
        await self._calls.shielded(self._change_lock_mode(lock_mode))

    async def _change_lock_mode(self, lock_mode: str) -> None:
        async def transaction(connection: asyncpg.Connection) -> list[Row]:
            async with connection.transaction():
                await connection.fetch(queries.LOCK_MODE)
                live = await connection.fetch(queries.LIVE_RUNNERS)
                if not live:
                    await connection.execute(queries.BURY_RUNNERS)
                    await connection.execute(queries.SET_LOCK_MODE, lock_mode)
                return list(live)

        async def use(session: Session) -> list[Row]:
            return await session.run(
                transaction, what="change_lock_mode", writes=True, deadline=self._settings.deadline
            )

        live = await self._lane.run(use, what="change_lock_mode", patience=self._settings.deadline)
        if live:
            raise still_alive(
                self._address.shown,
                lock_mode,
                [(row["replica_id"], row["address"]) for row in live],
            )

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
        row = rows[0]
        self._server.flushed(row["flushed"])
        return Renewal(
            alive=row["alive"],
            db_now=row["db_now"],
            session=row["session"],
            renew_count=row["renew_count"] or 0,
        )

    async def set_draining(self, runner_id: int) -> None:
        await self._call(queries.SET_DRAINING, runner_id)

    async def read_topology(self) -> Topology:
        rows = await self._call(queries.TOPOLOGY, writes=False)
        return columns.topology_of(rows)

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        if await self._call(queries.DECLARE_DEAD, runner_id, renew_count):
            return True
        return await self._is_dead(runner_id)

    async def _is_dead(self, runner_id: int) -> bool:
        rows = await self._call(queries.IS_DEAD, runner_id, writes=False)
        return not rows or bool(rows[0]["dead"])

    # -- locks of sessions
    def _key(self, runner_id: int) -> int:
        return lock_key(self._settings.schema, self._cluster_id, runner_id)

    async def hold_lock(self, runner_id: int) -> int | None:
        rows = await self._call(queries.HOLD_LOCK, self._key(runner_id), writes=False)
        return rows[0]["session"] if rows[0]["held"] else None

    async def end_lock_holder(self, runner_id: int) -> None:
        await self._call(queries.END_LOCK_HOLDER, self._key(runner_id), writes=False)

    async def free_locks(self, runner_ids: Sequence[int]) -> Collection[int]:
        if not runner_ids:
            return frozenset()
        keys = [self._key(runner_id) for runner_id in runner_ids]
        rows = await self._call(queries.FREE_LOCKS, list(runner_ids), keys, writes=False)
        return frozenset(row["runner_id"] for row in rows)

    async def declare_lost(self, runner_id: int, renew_count: int) -> bool:
        key = self._key(runner_id)
        if await self._call(queries.DECLARE_LOST, runner_id, renew_count, key):
            return True
        return await self._is_dead(runner_id)

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


def _nobody_asked() -> None:
    """Nobody wants to know that the connection is lost."""


def _utc(instant: float) -> str:
    return datetime.fromtimestamp(instant, UTC).isoformat(timespec="seconds")
