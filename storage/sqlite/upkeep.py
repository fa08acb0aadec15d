"""Upkeep of a cluster on SQLite: whole-cluster changes, each one transaction."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from perdure.storage.examination import HeldRun, RunFacts, ServerFacts, StuckRun
from perdure.storage.model import Topology
from perdure.storage.sqlite.cluster import read_topology
from perdure.storage.sqlite.store import SqliteStore
from perdure.storage.sqlite.transaction import Transaction
from perdure.storage.upkeep import (
    EPOCHS_LOST,
    Resharding,
    UpkeepStore,
    Voided,
    divided,
    refuse_the_living,
)

if TYPE_CHECKING:
    pass


class SqliteUpkeepStore(SqliteStore, UpkeepStore):
    """See `UpkeepStore`."""

    async def read_topology(self) -> Topology:
        return await self._database.reader.read(read_topology)

    async def reshard(self, shard_count: int, *, apply: bool) -> Resharding:
        return await self._database.writer.write(lambda tx: reshard(tx, shard_count, apply=apply))

    async def void_claims(self, *, force: bool) -> Voided:
        return await self._database.writer.write(lambda tx: void_claims(tx, force=force))

    async def server_facts(self, *, open_for: float, idle_for: float) -> ServerFacts:
        return await self._database.reader.read(server_facts)

    async def run_facts(self, *, idle: float, limit: int) -> RunFacts:
        return await self._database.reader.read(lambda tx: run_facts(tx, idle, limit))


def server_facts(tx: Transaction) -> ServerFacts:
    """There is no server; how commits are kept is a setting of our own connections."""
    names = ("synchronous", "journal_mode")
    rows = {name: tx.row(f"examine.{name}") for name in names}
    return ServerFacts({name: str(row[0]) for name, row in rows.items() if row}, server=False)


def run_facts(tx: Transaction, idle: float, limit: int) -> RunFacts:
    values = {"now": tx.now, "before": tx.now - round(idle * 1_000_000), "limit": limit}
    held = tx.rows("examine.held", values)
    return RunFacts(
        workflows=dict(tx.rows("examine.workflows")),
        stuck=[
            StuckRun(row[0], row[1], row[2], row[3] / 1e6)
            for row in tx.rows("examine.stuck", values)
        ],
        held=[HeldRun(*row[:3]) for row in held],
        held_count=held[0][3] if held else 0,
    )


def reshard(tx: Transaction, shard_count: int, *, apply: bool) -> Resharding:
    topology = read_topology(tx)
    after = divided(topology.shards, shard_count)
    if apply:
        refuse_the_living(topology)
        tx.run("reshard.clear")
        rows = ((s.shard_id, s.slot_lo, s.slot_hi, s.epoch) for s in after)
        tx.many("reshard.shard", rows)
        tx.run("agree", {"key": "shard_count", "value": str(shard_count)})
    return Resharding(topology.shards, after)


def void_claims(tx: Transaction, *, force: bool) -> Voided:
    topology = read_topology(tx)
    if not force:
        refuse_the_living(topology)
    dead = {row[0] for row in tx.rows("void.runners")}
    runs = tx.rows("void.claimed")
    held = any(shard.runner_id is not None for shard in topology.shards)
    if not (dead or runs or held):
        return Voided((), (), 0, None)
    tx.run("void.wakes", {"now": tx.now})
    tx.run("void.fences")
    shards = tx.rows("void.shards", {"raise": EPOCHS_LOST})
    cluster_id = secrets.token_hex(8)
    tx.run("agree", {"key": "cluster_id", "value": cluster_id})
    runners = [runner for runner in topology.runners if runner.runner_id in dead]
    return Voided(runners, [(row[0], row[1]) for row in runs], len(shards), cluster_id)
