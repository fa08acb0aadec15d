"""PostgreSQL 14 and later, by asyncpg. The statements are in the `.sql` files beside this module."""

from __future__ import annotations

from perdure.storage.clock import Clock, Randomness, SystemRandomness
from perdure.storage.connect import DatabaseSettings
from perdure.storage.interface import ClusterStore, HintChannel, RunStore
from perdure.storage.postgres.cluster import PostgresClusterStore
from perdure.storage.postgres.hints import PostgresHintChannel
from perdure.storage.postgres.runs import PostgresRunStore
from perdure.storage.postgres.server import Server


class PostgresDatabase:
    """Makes the stores of one database; each has connections of its own."""

    def __init__(
        self, settings: DatabaseSettings, *, clock: Clock, randomness: Randomness | None = None
    ) -> None:
        self._settings = settings
        self._server = Server(settings, clock)
        self._clock = clock
        self._randomness = randomness or SystemRandomness()

    def runs(self) -> RunStore:
        return PostgresRunStore(self._server, clock=self._clock, randomness=self._randomness)

    def cluster(self) -> ClusterStore:
        return PostgresClusterStore(self._server, clock=self._clock)

    def keeper(self) -> ClusterStore:
        return PostgresClusterStore(self._server, clock=self._clock, keeper=True)

    def hints(self) -> HintChannel:
        return PostgresHintChannel(self._server, randomness=self._randomness)
