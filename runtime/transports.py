"""Which ways a process's hints take, chosen by what the database can do and what the settings say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import structlog

from perdure.runtime.hints import HintBus
from perdure.runtime.inspection import lives
from perdure.runtime.settings import Settings
from perdure.runtime.signed_hints import SignedHints
from perdure.runtime.telemetry import Tally
from perdure.storage.clock import Clock, Randomness
from perdure.storage.connect import Database
from perdure.storage.errors import PerdureError
from perdure.storage.interface import Capabilities
from perdure.storage.model import Topology

log = structlog.get_logger("perdure.hints")

PERIOD = 5.0
"""Seconds between two looks of a client at who listens. Runners look for other reasons, and more often."""


def ways(settings: Settings, can: Capabilities) -> tuple[bool, bool]:
    """(through the database, over HTTP). auto: over HTTP too where the database does not push hints."""
    if not settings.hints:
        return False, False
    chosen = settings.hint_transport
    over_http = can.shared and (chosen == "http" or (chosen == "auto" and not can.pushes_hints))
    # Where it does not push, a look at the file stands in its place; or others may hear though we do not.
    through_database = chosen != "http" or not can.pushes_hints
    return through_database, over_http


def transport_words(settings: Settings, can: Capabilities) -> str:
    """As the boot line says it."""
    if not can.shared:
        return "this process alone"
    through_database, over_http = ways(settings, can)
    database = "pushed by the database"
    if not can.pushes_hints:
        database = "sent through the database" if can.multi_host else "polling the file"
    said = ["http"] * over_http + [database] * through_database
    return " and ".join(said) or "off"


async def open_ways(
    bus: HintBus,
    database: Database,
    settings: Settings,
    can: Capabilities,
    clock: Clock,
    randomness: Randomness,
    tally: Tally,
) -> SignedHints | None:
    """Give the bus its channels and open it; what speaks over HTTP, for who has to tell it of its peers.

    Without the cluster's key (a role that may not read it) hints take the other way alone."""
    through_database, over_http = ways(settings, can)
    if through_database:
        bus.add(database.hints())
    signed = None
    if over_http:
        try:
            key = await _key(database)
        except PerdureError as error:
            log.info("hints.unsigned", error=str(error))
        else:
            signed = SignedHints(f"{randomness.bits63():016x}", key, clock, randomness, tally)
            bus.add(signed)
    await bus.open()
    return signed


async def _key(database: Database) -> str:
    cluster = database.cluster()
    try:
        await cluster.open()
        return await cluster.hint_key(secrets.token_hex(32))
    finally:
        await cluster.close()


def listening(topology: Topology, me: int | None) -> list[str]:
    """Addresses of the runner ports of those who live, but mine."""
    return [
        runner.address
        for runner in topology.runners
        if runner.runner_id != me and lives(runner, topology.db_now)
    ]


class Listeners:
    """Tells a client's hints who listens; the client has no keeper that would know."""

    def __init__(self, database: Database, signed: SignedHints) -> None:
        self._database = database
        self._signed = signed

    async def look(self) -> None:
        """Once. A database that is away leaves things as they were."""
        cluster = self._database.cluster()
        with contextlib.suppress(PerdureError):
            try:
                await cluster.open()
                self._signed.peers(listening(await cluster.read_topology(), None))
            finally:
                await cluster.close()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            await self.look()
