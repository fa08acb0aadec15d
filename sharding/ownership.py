"""Which shards this runner holds: takes those that placement gives it, gives up those it does not.

A service on the runner's main loop with a store of its own. It judges anew with each state from the keeper; one
statement at a time is on its way, and the statement decides what the judgement could only guess from a snapshot.
The only thing it waits for outside the database is `ShardUser.vacate`, each shard on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from perdure.sharding.judgement import judge
from perdure.sharding.lease import backoff
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.storage.clock import Clock, Randomness, SystemRandomness
from perdure.storage.errors import ConfigurationError, RunnerDeclaredDead, StorageError
from perdure.storage.interface import ClusterStore
from perdure.storage.model import ShardHold

log = structlog.stdlib.get_logger("perdure.sharding")


class ShardUser(Protocol):
    """Whoever runs the runs of the shards held."""

    def gained(self, holds: Sequence[ShardHold]) -> None:
        """These shards are mine from now on. Returns at once."""
        ...

    async def vacate(self, shard_id: int) -> None:
        """Return when no claim for the shard is on its way and what is idle has been parked; a run with a running step
        may stay, under its own claim.

        The shard is no longer among ``holds`` when this is called. It is released when this returns or raises.
        """
        ...


class Ownership:
    """The shards of one runner. `run` is the service; `update` and `drain` are called on the same loop."""

    def __init__(
        self,
        runner_id: int,
        open_store: Callable[[], ClusterStore],
        user: ShardUser,
        config: LeaseConfig,
        clock: Clock,
        *,
        shards_changed: Callable[[], None],
        randomness: Randomness | None = None,
    ) -> None:
        """shards_changed: called after shards were taken or released: tell the others (a SHARDS hint), and have the
        own keeper look again."""
        self._me = runner_id
        self._open_store = open_store
        self._user = user
        self._config = config
        self._clock = clock
        self._shards_changed = shards_changed
        self._randomness = randomness or SystemRandomness()
        self._store: ClusterStore | None = None
        self._state: KeeperState | None = None
        self._holds: dict[int, ShardHold] = {}
        self._vacating: dict[int, tuple[ShardHold, asyncio.Task[None]]] = {}
        self._vacated: dict[int, ShardHold] = {}
        self._answered_at = float("-inf")  # of my last statement, on the monotonic clock
        self._failures = 0
        self._draining = self._announced = False
        self._wake = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def holds(self) -> dict[int, ShardHold]:
        """Shards to claim from, by id. A snapshot: never changed, only replaced."""
        return self._holds

    @property
    def leaving(self) -> int:
        """How many shards are still held but on their way out."""
        return len(self._vacating) + len(self._vacated)

    def update(self, state: KeeperState) -> None:
        """Take a new state from the keeper. A runner that is dead holds nothing from this very moment."""
        self._state = state
        if not state.alive:
            self._drop_all()
        self._wake.set()

    async def run(self) -> None:
        """Judge, take, let go, until cancelled, drained or declared dead. Closes its store.

        Raises `ConfigurationError` when the database turns out not to fit this code."""
        try:
            while not self._over.is_set():
                await self._wake.wait()
                self._wake.clear()
                try:
                    await self._round()
                except RunnerDeclaredDead:
                    self._drop_all()
                except (StorageError, TimeoutError, OSError, ConfigurationError) as error:
                    await self._failed(error)
        finally:
            self._drop_all()
            await self._close()

    async def drain(self) -> None:
        """Take nothing more; vacate and release every shard, each as soon as it is vacant. `run` must be running.

        Waits for the user's running work without a limit of its own: the caller cancels this when the grace is over.
        Returns at once when this runner is dead already."""
        self._draining = True
        self._wake.set()
        await self._over.wait()

    # ---- one round ----------------------------------------------------------------------------

    async def _round(self) -> None:
        if self._draining and not self._announced:
            await (await self._connected()).set_draining(self._me)
            self._announced = True
            self._shards_changed()
        await self._release(self._vacated)
        take = self._judge()
        await self._take(take)
        self._failures = 0
        if self._draining and not (self._holds or self._vacating or self._vacated):
            self._over.set()

    def _judge(self) -> tuple[int, ...]:
        """Adopt and begin to vacate what the newest state says; return what to take."""
        state = self._state
        if state is None or state.topology is None or not state.alive:
            return ()
        leaving = {shard: hold for shard, (hold, _) in self._vacating.items()} | self._vacated
        judgement = judge(
            self._me,
            state.topology,
            state.dead,
            holds=self._holds,
            leaving=leaving,
            fresh=state.looked_at > self._answered_at,
            draining=self._draining,
        )
        self._gain(judgement.adopt)
        for hold in judgement.release:
            self._vacated[hold.shard_id] = hold
            self._wake.set()
        self._vacate(judgement.vacate)
        # A runner that does not trust its lease takes nothing: its peers may be about to declare it dead.
        return judgement.take if state.trusted(self._clock.monotonic()) else ()

    async def _take(self, shards: Sequence[int]) -> None:
        if not shards or self._state is None:
            return
        store = await self._connected()
        try:
            taken = await store.take_shards(self._me, shards, sorted(self._state.dead))
        finally:
            self._answered_at = self._clock.monotonic()
        if self._over.is_set():
            return
        self._gain(taken)
        if taken:
            log.info("shards.taken", taken=len(taken), asked=len(shards), held=len(self._holds))
            self._shards_changed()

    async def _release(self, holds: dict[int, ShardHold]) -> None:
        """Release all that are vacant at this moment in one statement."""
        batch = list(holds.values())
        if not batch:
            return
        store = await self._connected()
        try:
            await store.release_shards(self._me, batch)
        finally:
            self._answered_at = self._clock.monotonic()
        for hold in batch:
            self._vacated.pop(hold.shard_id, None)
        log.info("shards.released", released=len(batch), held=len(self._holds))
        self._shards_changed()

    # ---- shards coming and going --------------------------------------------------------------

    def _gain(self, holds: Sequence[ShardHold]) -> None:
        if holds:
            self._holds = self._holds | {hold.shard_id: hold for hold in holds}
            self._user.gained(holds)

    def _vacate(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        going = {shard: self._holds[shard] for shard in shards}
        self._holds = {shard: hold for shard, hold in self._holds.items() if shard not in going}
        for shard, hold in going.items():
            task = asyncio.create_task(self._user.vacate(shard), name=f"vacate-shard-{shard}")
            self._vacating[shard] = (hold, task)
            task.add_done_callback(lambda task, hold=hold: self._vacant(hold, task))  # type: ignore[misc]

    def _vacant(self, hold: ShardHold, task: asyncio.Task[None]) -> None:
        if self._vacating.pop(hold.shard_id, None) is None:
            return  # dropped meanwhile
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its runs stay fenced by their own claims, so the shard need not stay with a runner that failed on it.
            log.error("shards.vacate-failed", shard=hold.shard_id, exc_info=error)
        self._vacated[hold.shard_id] = hold
        self._wake.set()

    def _drop_all(self) -> None:
        """Hold nothing any more, without a word to the database."""
        vacating, self._vacating = self._vacating, {}
        self._holds = {}
        self._vacated = {}
        self._over.set()
        self._wake.set()
        for _, task in vacating.values():
            task.cancel()

    # ---- the store ----------------------------------------------------------------------------

    async def _connected(self) -> ClusterStore:
        if self._store is None:
            store = self._open_store()
            try:
                await store.open()
            except BaseException:
                with contextlib.suppress(Exception):
                    await store.close()
                raise
            self._store = store
        return self._store

    async def _failed(self, error: Exception) -> None:
        """Go on with a new connection. What a lost statement did shows at the next look (`judge`, fresh)."""
        self._failures += 1
        if self._failures == 1:
            log.warning("shards.unavailable", error=str(error))
        await self._close()
        delay = backoff(self._failures, self._config.renewal, self._randomness.fraction())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._over.wait()
        self._wake.set()

    async def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(Exception):
                await store.close()
