"""`ClusterStore` on SQLite. Its calls go ahead of what is queued: a lease must not wait for a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from perdure.storage.clock import from_micros, to_micros
from perdure.storage.errors import ConfigurationError, DisagreementError, RunnerDeclaredDead
from perdure.storage.interface import ClusterStore, Renewal, RunnerIdentity
from perdure.storage.model import SLOTS, LockFacts, Meta, RunnerRow, ShardHold, ShardRow, Topology
from perdure.storage.sqlite.store import SqliteStore
from perdure.storage.sqlite.transaction import Row, Transaction, as_list, storable
from perdure.storage.sqlite.worker import Work
from perdure.storage.verdicts import still_alive

if TYPE_CHECKING:
    from perdure.storage.sqlite.database import SqliteDatabase

T = TypeVar("T")


class SqliteClusterStore(SqliteStore, ClusterStore):
    """What runners say to each other; see `ClusterStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__(database)
        self.capabilities = database.capabilities

    async def _write(self, work: Work[T]) -> T:
        return await self._database.writer.write(work, urgent=True)

    async def agree(self, *, shard_count: int, lock_mode: str) -> Meta:
        await self._write(lambda tx: agree(tx, shard_count, lock_mode))
        return await self._database.read_meta()

    async def hint_key(self, fresh: str) -> str:
        known = await self._database.reader.read(read_hint_key, urgent=True)
        return known if known else await self._write(lambda tx: hint_key(tx, fresh))

    async def read_lock_facts(self) -> LockFacts:
        return LockFacts(session_locks=False)

    async def change_lock_mode(self, lock_mode: str) -> None:
        where = str(self._database.path or ":memory:")
        await self._write(lambda tx: change_lock_mode(tx, lock_mode, where))

    @property
    def history(self) -> int:
        return 0

    def commits_lost(self, what: str) -> None:
        return

    async def record_server(self) -> None:
        return

    async def register(self, me: RunnerIdentity, lease: float) -> None:
        await self._write(lambda tx: register(tx, me, lease))

    async def renew(self, runner_id: int, lease: float) -> Renewal:
        return await self._write(lambda tx: renew(tx, runner_id, lease))

    async def set_draining(self, runner_id: int) -> None:
        await self._write(lambda tx: tx.run("set_draining", {"runner_id": runner_id}))

    async def read_topology(self) -> Topology:
        return await self._database.reader.read(read_topology, urgent=True)

    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        return await self._write(lambda tx: declare_dead(tx, runner_id, renew_count))

    def forgo(self) -> None:
        """Nobody waits for anybody's connection to a file."""

    # -- there are no sessions, so none of their locks: nobody is lost before the lease is over
    def on_lost(self, call: Callable[[], None]) -> None:
        return

    async def hold_lock(self, runner_id: int) -> int | None:
        return None

    async def end_lock_holder(self, runner_id: int) -> None:
        return

    async def free_locks(self, runner_ids: Sequence[int]) -> Collection[int]:
        return frozenset()

    async def declare_lost(self, runner_id: int, renew_count: int) -> bool:
        return await self._database.reader.read(lambda tx: is_dead(tx, runner_id), urgent=True)

    async def declare_others_dead(self, runner_id: int) -> Sequence[int]:
        return await self._write(
            lambda tx: sorted(
                row[0] for row in tx.rows("declare_others_dead", {"runner_id": runner_id})
            )
        )

    async def take_shards(
        self, runner_id: int, shard_ids: Sequence[int], dead: Sequence[int]
    ) -> Sequence[ShardHold]:
        return await self._write(lambda tx: take_shards(tx, runner_id, shard_ids, dead))

    async def release_shards(self, runner_id: int, holds: Sequence[ShardHold]) -> None:
        pairs = as_list([hold.shard_id, hold.epoch] for hold in holds)
        await self._write(
            lambda tx: tx.run("release_shards", {"runner_id": runner_id, "holds": pairs})
        )

    async def leave(self, runner_id: int) -> None:
        await self._write(lambda tx: leave(tx, runner_id))

    async def delete_dead_runners(self, before: float) -> int:
        return await self._write(
            lambda tx: len(tx.rows("delete_dead_runners", {"before": to_micros(before)}))
        )


def agree(tx: Transaction, shard_count: int, lock_mode: str) -> None:
    """The first to come writes the topology; whoever wants another one later must not boot."""
    if not 1 <= shard_count <= SLOTS:
        raise ConfigurationError(
            f"a cluster has 1 to {SLOTS} shards, not {shard_count}: change PERDURE_SHARDS"
        )
    known: dict[str, str | None] = dict(tx.rows("read_meta"))
    stored = known.get("shard_count")
    if not stored:
        edges = [shard * SLOTS // shard_count for shard in range(shard_count + 1)]
        ranges = ((shard, edges[shard], edges[shard + 1] - 1) for shard in range(shard_count))
        tx.many("create_shards", ranges)
        tx.run("agree", {"key": "shard_count", "value": str(shard_count)})
        tx.run("agree", {"key": "lock_mode", "value": lock_mode})
        return
    if int(stored) != shard_count:
        raise DisagreementError(
            f"this cluster has {stored} shards, not {shard_count}: set PERDURE_SHARDS={stored}"
        )
    if known.get("lock_mode") != lock_mode:
        raise DisagreementError(
            f"this cluster holds its shards by lock mode {known.get('lock_mode')!r}, not {lock_mode!r}: "
            f"set PERDURE_SHARD_LOCK={known.get('lock_mode')}"
        )


def read_hint_key(tx: Transaction) -> str | None:
    row = tx.row("read_hint_key")
    return None if row is None else str(row[0])


def hint_key(tx: Transaction, fresh: str) -> str:
    known = read_hint_key(tx)  # one transaction writes at a time
    if known is None:
        tx.run("agree", {"key": "hint_key", "value": fresh})
    return known or fresh


def change_lock_mode(tx: Transaction, lock_mode: str, where: str) -> None:
    """For a cluster that stands still."""
    live = tx.rows("live_runners", {"now": tx.now})
    if live:
        raise still_alive(where, lock_mode, [(row[0], row[1]) for row in live])
    tx.run("bury_runners", {"now": tx.now})
    tx.run("agree", {"key": "lock_mode", "value": lock_mode})


def _lease_end(tx: Transaction, lease: float) -> int:
    return tx.now + round(lease * 1_000_000)


def register(tx: Transaction, me: RunnerIdentity, lease: float) -> None:
    what = f"runner {me.runner_id}: its identity"
    values = {
        "runner_id": me.runner_id,
        "replica_id": storable(me.replica_id, what),
        "address": storable(me.address, what),
        "workflows": json.dumps(list(me.workflows)),
        "info": json.dumps(dict(me.info)),
        "now": tx.now,
        "expires_at": _lease_end(tx, lease),
    }
    if tx.row("register", values) is None:
        raise RunnerDeclaredDead(
            f"runner {me.runner_id} of {me.replica_id!r} has been declared dead already; register a new one"
        )


def renew(tx: Transaction, runner_id: int, lease: float) -> Renewal:
    ends = {"expires_at": _lease_end(tx, lease), "latest": _lease_end(tx, 2 * lease)}
    row = tx.row("renew", {"runner_id": runner_id, **ends})
    return Renewal(row is not None, from_micros(tx.now), renew_count=row[0] if row else 0)


def is_dead(tx: Transaction, runner_id: int) -> bool:
    """A row that is gone was dead before it was deleted."""
    row = tx.row("is_dead", {"runner_id": runner_id})
    return row is None or bool(row[0])


def declare_dead(tx: Transaction, runner_id: int, renew_count: int) -> bool:
    tx.run("declare_dead", {"runner_id": runner_id, "renew_count": renew_count, "now": tx.now})
    return is_dead(tx, runner_id)


def take_shards(
    tx: Transaction, runner_id: int, shard_ids: Sequence[int], dead: Sequence[int]
) -> list[ShardHold]:
    values = {"runner_id": runner_id, "shard_ids": as_list(shard_ids), "dead": as_list(dead)}
    return [ShardHold(*row) for row in sorted(tx.rows("take_shards", values))]


def leave(tx: Transaction, runner_id: int) -> None:
    tx.run("leave.shards", {"runner_id": runner_id})
    tx.run("leave.runner", {"runner_id": runner_id})


def read_topology(tx: Transaction) -> Topology:
    runners = tuple(_runner(row) for row in tx.rows("topology.runners"))
    shards = tuple(ShardRow(*row) for row in tx.rows("topology.shards"))
    return Topology(runners, shards, from_micros(tx.now))


def _runner(row: Row) -> RunnerRow:
    (runner_id, replica_id, address, started_at, expires_at, renew_count, dead, draining, *rest) = (
        row
    )
    workflows, placement_version, info = rest
    return RunnerRow(
        runner_id=runner_id,
        replica_id=replica_id,
        address=address,
        started_at=from_micros(started_at),
        expires_at=from_micros(expires_at),
        renew_count=renew_count,
        dead=bool(dead),
        draining=bool(draining),
        workflows=tuple(json.loads(workflows)),
        placement_version=placement_version,
        info=json.loads(info),
    )
