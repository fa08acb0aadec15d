"""What a client works with, and how one that has it for itself connects and disconnects."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perdure.runtime.authoring.registry import Registry
from perdure.runtime.hints import HintBus
from perdure.runtime.local import LocalRunner
from perdure.runtime.settings import Settings
from perdure.runtime.telemetry import Tally, Telemetry
from perdure.runtime.transports import Listeners, open_ways
from perdure.storage.clock import Clock, Randomness, SystemClock, SystemRandomness
from perdure.storage.connect import Database, connect
from perdure.storage.interface import RunStore


@dataclass(frozen=True, slots=True)
class Parts:
    """A runner in the same process lends its own."""

    store: RunStore
    bus: HintBus
    clock: Clock
    randomness: Randomness
    registry: Registry
    settings: Settings
    database: Database
    telemetry: Telemetry | None = None
    local: LocalRunner | None = None

    @classmethod
    def own(
        cls,
        settings: Settings,
        registry: Registry,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> Parts:
        """Of a client alone; not connected yet."""
        used_clock = clock or SystemClock()
        database = connect(settings.database("perdure-client"), clock=used_clock)
        return cls(
            store=database.runs(),
            bus=HintBus(local=settings.hints),
            clock=used_clock,
            randomness=randomness or SystemRandomness(),
            registry=registry,
            settings=settings,
            database=database,
        )

    def renewed(self) -> Parts:
        """The same, to be connected once more: what was closed stays closed."""
        bus = HintBus(local=self.settings.hints)
        return replace(self, store=self.database.runs(), bus=bus)

    async def connect(self, tally: Tally) -> tuple[int, Listeners | None]:
        """How many shards the cluster has, and what tells the hints who listens, where that is needed.

        If it fails or is given up, no connection stays."""
        try:
            meta = await self.store.open()
            signed = await open_ways(
                self.bus,
                self.database,
                self.settings,
                self.store.capabilities,
                self.clock,
                self.randomness,
                tally,
            )
            listeners = None
            if signed is not None:
                listeners = Listeners(self.database, signed)
                await listeners.look()
        except BaseException:
            await self.disconnect()
            raise
        return meta.shard_count or self.settings.shards, listeners

    async def disconnect(self) -> None:
        try:
            await self.bus.close()
        finally:
            await self.store.close()
