"""The lease protocol of one runner: register, renew, look at the others, declare the expired dead.

Runs on whatever event loop calls it; `keeper.py` gives it one of its own, on a thread of its own (R3).
One database call at a time, on one connection, each with a deadline of one renewal period. A connection
that failed is thrown away; a new one renews before it does anything else, and then takes the runner's lock
again where there is one (advisory mode): the lease and the shards are the runner's all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from perdure.sharding.patience import Patience
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.sharding.suspicion import APART, Suspicion
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import (
    ConfigurationError,
    ConflictError,
    DatabaseUnavailable,
    InUseError,
    PerdureError,
    RunnerDeclaredDead,
)
from perdure.storage.interface import ClusterStore, Renewal, RunnerIdentity
from perdure.storage.model import Meta, RunnerRow, Topology

T = TypeVar("T")

log = structlog.stdlib.get_logger("perdure.sharding")

HARDLY = 0.005
"""Seconds past the moment somebody may be declared dead at which to look."""

MODE_FACT = "shard_lock"
"""The fact of a runner's row that says whether it holds a lock at all: only those who do can be seen to lose it."""

LOCK_TRIES = 4
"""How often a lock that an earlier session of ours may still hold is tried before that session is ended."""
LOCK_PAUSE = 0.02
QUICK_TRIES = 12
"""Tries to reconnect, 30 ms apart, before they become fewer: a cut of 200 ms must be over before anybody can take the
runner for lost."""


class LeaseLoop:
    """One runner's lease. `boot`, then `run` until `stop`, then `end`.

    publish is called with every new state, on the loop that runs this.
    """

    def __init__(
        self,
        open_store: Callable[[], ClusterStore],
        config: LeaseConfig,
        clock: Clock,
        randomness: Randomness,
        publish: Callable[[KeeperState], None],
    ) -> None:
        self._open_store = open_store
        self._config = config
        self._clock = clock
        self._randomness = randomness
        self._publish = publish
        self._me: RunnerIdentity | None = None
        self._store: ClusterStore | None = None
        self._patience = Patience(renewal=config.renewal, look=config.look)
        self._suspicion = Suspicion()
        self._session: int | None = None  # that holds my lock
        self._connected_at = float("-inf")
        self._history = 0
        self._renewals = 0  # as the database has counted them
        self._cut = False
        self._left: list[ClusterStore] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._renew_at = self._look_at = 0.0
        self._failures = 0
        self._tell_draining = False
        self._stopping = asyncio.Event()
        self._nudge = asyncio.Event()
        self.state = KeeperState(
            alive=True,
            trusted_until=float("-inf"),
            topology=None,
            db_offset=0.0,
            dead=frozenset(),
            ready=False,
            reason="not registered yet",
        )

    # ---- life ---------------------------------------------------------------------------------

    async def boot(self, me: RunnerIdentity) -> None:
        """Connect, insert the runner row, look once. Raises what went wrong; nothing is tried twice."""
        store, registering = self._open_store(), False
        try:
            self._check_mode(await store.open())  # bounds itself, and says what to check
            self._watch(store)
            await self._bounded(store.record_server())
            # Before there is a row to which the lock belongs: whoever sees the row finds it held.
            await self._take_lock(store, me.runner_id)
            me = replace(me, info={**me.info, MODE_FACT: self._config.mode})
            sent = self._connected_at = self._clock.monotonic()
            registering = True
            await self._bounded(store.register(me, self._config.lease))
            self._me, self._store, self._history = me, store, store.history
            self._renewed(sent)
            await self._look()
        except BaseException:
            self._store = None
            store.forgo()
            if registering:  # there may be a row, which others would leave shards for
                with contextlib.suppress(Exception):
                    await self._bounded(store.leave(me.runner_id))
            with contextlib.suppress(Exception):
                await self._bounded(store.close())
            raise

    async def run(self) -> None:
        """Renew and look until `stop`, or until this runner is declared dead. Never raises for the database's sake."""
        while self.state.alive and not self._stopping.is_set():
            try:
                await self._step()
            except RunnerDeclaredDead:
                self._declared_dead()
            except Exception as error:
                await self._failed(error)

    def look_now(self) -> None:
        """Look at once, ten times per usual period at most: somebody said that runners or shards have changed."""
        self._look_at = min(self._look_at, self.state.looked_at + self._config.look / 10)
        self._nudge.set()

    def drain(self) -> None:
        """Tell the others as soon as possible that this runner is leaving."""
        self._tell_draining = True
        self._nudge.set()

    def stop(self) -> None:
        """Let `run` return after the call it is in."""
        self._stopping.set()
        self._nudge.set()

    async def end(self, *, leave: bool) -> None:
        """Leave the cluster if asked and still possible (else the lease runs out), and close."""
        store, self._store = self._store, None
        # First: the process's other connections may be waiting for a keeper that has none, and wants none.
        for each in (store or self._open_store(), *self._left):
            each.forgo()
        self._close_what_is_left()
        if self._closing:
            await asyncio.wait(self._closing, timeout=min(1.0, self._config.renewal))
        if store is None:
            return
        try:
            if leave and self.state.alive and self._me is not None:
                await self._bounded(store.leave(self._me.runner_id))
        except Exception as error:
            log.warning("runner.leave-failed", what="its lease will run out", error=str(error))
        finally:
            with contextlib.suppress(Exception):
                await self._bounded(store.close())

    # ---- one step -----------------------------------------------------------------------------

    async def _step(self) -> None:
        if self._cut:
            await self._forget_connection()
        if self._store is None:
            await self._reconnect()
            return
        now = self._clock.monotonic()
        if self._tell_draining and self._me is not None:
            await self._bounded(self._store.set_draining(self._me.runner_id))
            self._tell_draining = False
            self._look_at = float("-inf")
        elif now >= self._renew_at:
            await self._renew(self._store)
        elif now >= self._look_at:
            await self._look()
        else:
            await self._pause(self._nudge, min(self._renew_at, self._look_at) - now)
            self._nudge.clear()

    async def _reconnect(self) -> None:
        store = self._open_store()
        try:
            await self._bounded(store.open())
            self._watch(store)
            if store.history != self._history:
                await self._server_replaced(store)
            else:
                await self._renew(store, newly=True)
            self._close_what_is_left()
            if self.state.alive:
                assert self._me is not None
                await self._take_lock(store, self._me.runner_id)
        except BaseException:
            with contextlib.suppress(Exception):
                await self._bounded(store.close())
            raise
        self._store, self._connected_at = store, self._clock.monotonic()
        self._look_at = float("-inf")

    def _watch(self, store: ClusterStore) -> None:
        """Hear at once when the connection is lost, rather than at the next call."""
        self._cut = False

        def lost() -> None:
            if self._store is store:
                self._cut = True
                self._nudge.set()

        store.on_lost(lost)

    async def _take_lock(self, store: ClusterStore, runner_id: int) -> None:
        """In advisory mode: hold the lock, whatever session of ours may still have it."""
        if not self._config.advisory:
            return
        for tries in range(2 * LOCK_TRIES):
            if tries == LOCK_TRIES:
                log.warning(
                    "lock.ghost-ended", what="an earlier session of this runner held its lock"
                )
                await self._bounded(store.end_lock_holder(runner_id))
            self._session = await self._bounded(store.hold_lock(runner_id))
            if self._session is not None:
                return
            await self._pause(self._stopping, LOCK_PAUSE)
        raise DatabaseUnavailable(
            "an earlier session of this runner holds its lock and does not end"
        )

    async def _renew(self, store: ClusterStore, *, newly: bool = False) -> None:
        """newly: the connection is new, and its session need not be the one that has my lock."""
        assert self._me is not None
        sent = self._clock.monotonic()
        renewal = await self._bounded(store.renew(self._me.runner_id, self._config.lease))
        if not renewal.alive:
            self._declared_dead()
            return
        if renewal.renew_count <= self._renewals:
            store.commits_lost(
                f"an older copy of the server: renewal {self._renewals} of this runner is gone"
            )
            await self._server_replaced(store)
            return
        self._renewals = renewal.renew_count
        self._renewed(sent, renewal)
        if self._config.advisory and not (newly or self._cut or renewal.session == self._session):
            self._sessions_rotate()

    def _renewed(self, sent: float, renewal: Renewal | None = None) -> None:
        """Trust counts from the sending: the database can only have given the lease later than that."""
        self._renew_at = sent + self._config.renewal
        if self._failures:
            log.info("database.back", after_failures=self._failures)
            self._failures = 0
        offset = self.state.db_offset
        if renewal is not None:
            offset = self._offset(sent, renewal.db_now)
        self._set(
            trusted_until=sent + self._config.trust, db_offset=offset, ready=True, reason=None
        )

    async def _look(self) -> None:
        assert self._store is not None
        sent = self._clock.monotonic()
        topology = await self._bounded(self._store.read_topology())
        answered = self._clock.monotonic()
        self._look_at = answered + self._config.look
        self._patience.observe(topology.runners, sent=sent, answered=answered)
        if self._store.history != self._history:
            await self._server_replaced(self._store)
            return
        mine = self._my_row(topology)
        if mine is None or mine.dead:
            self._declared_dead()
            return
        fallen = await self._declare_expired(topology) | await self._declare_lost(topology)
        if fallen:
            topology = replace(
                topology,
                runners=[
                    replace(row, dead=True) if row.runner_id in fallen else row
                    for row in topology.runners
                ],
            )
        self._plan_next_look(topology, answered)
        self._set(
            topology=topology,
            looked_at=sent,
            db_offset=self._offset(sent, topology.db_now, answered),
            dead=dead_runners(topology),
            failure=self.state.failure or self._name_clash(topology, mine),
        )

    async def _declare_expired(self, topology: Topology) -> set[int]:
        """Declare dead whom the database's clock and our patience let us. Those who are."""
        assert self._store is not None
        fallen: set[int] = set()
        for row in self._patience.expired(topology):
            if self._is_me(row):
                continue
            if await self._bounded(self._store.declare_dead(row.runner_id, row.renew_count)):
                fallen.add(row.runner_id)
                log.warning(
                    "peer.declared-dead",
                    runner=row.runner_id,
                    replica=row.replica_id,
                    address=row.address,
                    expired_for=round(topology.db_now - row.expires_at, 3),
                )
        return fallen

    async def _declare_lost(self, topology: Topology) -> set[int]:
        """Declare dead whose lock is free and stays free, without waiting for their lease. Those who are."""
        assert self._store is not None
        if not self._config.advisory:
            return set()
        now = self._clock.monotonic()
        if now - self._connected_at < 2 * self._config.renewal:
            # Whatever cost me my session may have cost the others theirs: they get the time to come back.
            self._suspicion.restart()
            return set()
        holders = [
            row
            for row in topology.runners
            if not (row.dead or self._is_me(row)) and row.info.get(MODE_FACT) == "advisory"
        ]
        ids = [row.runner_id for row in holders]
        free = await self._bounded(self._store.free_locks(ids)) if ids else ()
        answered = self._clock.monotonic()
        fallen: set[int] = set()
        for row in self._suspicion.observe(holders, free, sent=now, answered=answered):
            if await self._bounded(self._store.declare_lost(row.runner_id, row.renew_count)):
                fallen.add(row.runner_id)
                log.warning(
                    "peer.declared-dead",
                    runner=row.runner_id,
                    replica=row.replica_id,
                    address=row.address,
                    what="the session that held its lock is gone",
                )
        return fallen

    def _plan_next_look(self, topology: Topology, answered: float) -> None:
        """Look again after the usual period, or just when a silent runner's time is up."""
        assert self._me is not None
        wait = self._patience.next_judgement(topology, self._me.runner_id)
        if wait is not None:
            self._look_at = min(self._look_at, answered + wait + HARDLY)
        test = self._suspicion.next_test()
        if test is not None:
            self._look_at = min(self._look_at, test + HARDLY)

    def _name_clash(self, topology: Topology, mine: RunnerRow) -> InUseError | None:
        """An older runner with my replica id that goes on renewing is another live process: I am the one too many.

        A restarted pod's predecessor is silent, and a draining one is on its way out.
        """
        for row in topology.runners:
            if row.replica_id != mine.replica_id or self._is_me(row) or row.dead or row.draining:
                continue
            older = (row.started_at, row.runner_id) < (mine.started_at, mine.runner_id)
            if older and self._patience.renewing_after(row, self._config.lease):
                return InUseError(
                    f"replica id {mine.replica_id!r} is used by two live processes, at {row.address} and "
                    f"here at {mine.address}: give each its own (POD_NAME or PERDURE_REPLICA_ID); "
                    "this one, started later, stops"
                )
        return None

    # ---- when things fail ---------------------------------------------------------------------

    async def _failed(self, error: Exception) -> None:
        self._failures += 1
        reason = f"the database does not answer: {str(error) or type(error).__name__}"
        if self._failures == 1:
            log.warning(
                "database.lost",
                error=reason,
                exc_info=not isinstance(error, PerdureError),
            )
        if not isinstance(error, ConflictError):
            self._set(ready=False, reason=reason)
            await self._forget_connection()
        await self._pause(self._stopping, self._delay())

    def _delay(self) -> float:
        """Before the next try to reconnect."""
        fraction = self._randomness.fraction()
        if self._config.advisory and self._failures <= QUICK_TRIES:
            return 0.03 * (0.5 + fraction)
        return backoff(self._failures, self._config.renewal, fraction)

    async def _forget_connection(self) -> None:
        """A connection that may be cut is never used again, and whoever was silent while nobody could renew is heard
        anew. In advisory mode others may soon take me for lost: nothing is begun until I have renewed."""
        if self._store is not None:
            self._left.append(self._store)
        self._store, self._cut = None, False
        self._patience.restart()
        self._suspicion.restart()
        if self._config.advisory:
            soon = self._clock.monotonic() + APART
            self._set(trusted_until=min(self.state.trusted_until, soon))

    def _close_what_is_left(self) -> None:
        """Connections that failed: kept until I have renewed on a new one, since one that is only slow has my lock.
        A call that hangs in one is waited for by nobody."""
        left, self._left = self._left, []
        for store in left:
            closing = asyncio.create_task(self._close(store), name="keeper-closes")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, store: ClusterStore) -> None:
        with contextlib.suppress(Exception):
            await self._bounded(store.close())

    def _declared_dead(self) -> None:
        log.error(
            "runner.declared-dead",
            what="it writes nothing any more",
            runner_id=self._me.runner_id if self._me is not None else None,
        )
        self._set(
            alive=False,
            ready=False,
            trusted_until=float("-inf"),
            reason="this runner was declared dead",
        )

    async def _server_replaced(self, store: ClusterStore) -> None:
        """Another server, or an older copy of this one: what I know of its rows is void. Goes on as a new runner."""
        log.error(
            "runner.void", what="the database is not the one it was; it goes on as a new runner"
        )
        assert self._me is not None
        with contextlib.suppress(Exception):  # else my row there, if there is one, ages out
            await self._bounded(store.record_server())  # first: whoever comes later is to see it
            await self._bounded(store.leave(self._me.runner_id))
        self._set(
            alive=False,
            ready=False,
            trusted_until=float("-inf"),
            reason="the database is not the one it was",
        )

    def _sessions_rotate(self) -> None:
        """The lock is no longer on the session that renews: it says nothing of this runner any more."""
        reason = (
            "a pooler rotates the sessions of the keeper's connection, so that its advisory lock is on none of them "
            "for certain: connect directly or through a pooler in session mode, or set PERDURE_SHARD_LOCK=row with "
            "all pods stopped"
        )
        self._set(ready=False, reason=reason, failure=ConfigurationError(reason))

    def _check_mode(self, meta: Meta) -> None:
        """The cluster may have changed its mode since this process agreed to one."""
        if meta.lock_mode not in (None, self._config.mode):
            raise ConfigurationError(
                f"the cluster uses {meta.lock_mode!r} locks by now, this process {self._config.mode!r}: restart it, "
                f"with PERDURE_SHARD_LOCK={meta.lock_mode} or auto"
            )

    async def _bounded(self, call: Coroutine[Any, Any, T]) -> T:
        """A database call with the keeper's deadline of one renewal period."""
        try:
            async with asyncio.timeout(self._config.renewal):
                return await call
        except TimeoutError as error:
            raise DatabaseUnavailable(
                f"no answer within {self._config.renewal:g} s (one renewal period)"
            ) from error

    # ---- small things -------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._publish(self.state)

    def _offset(self, sent: float, db_now: float, answered: float | None = None) -> float:
        """The database answered somewhere between sending and answer: take the middle."""
        return db_now - (sent + (answered or self._clock.monotonic())) / 2

    def _is_me(self, row: RunnerRow) -> bool:
        return self._me is not None and row.runner_id == self._me.runner_id

    def _my_row(self, topology: Topology) -> RunnerRow | None:
        return next((row for row in topology.runners if self._is_me(row)), None)

    @staticmethod
    async def _pause(until: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()


def backoff(failures: int, renewal: float, fraction: float) -> float:
    """Seconds before the next try: 50 ms doubled each time up to a quarter of a renewal (1 s at most), ± 50 %.

    Short, because all runners must be back before the most patient observer could take them for silent.
    """
    longest = min(1.0, renewal / 4)
    return float(min(longest, 0.05 * 2 ** min(failures - 1, 10)) * (0.5 + fraction))


def dead_runners(topology: Topology) -> frozenset[int]:
    """Runners that can never write again: declared dead, or named by a shard but without a row any more."""
    known = {row.runner_id for row in topology.runners}
    gone = {shard.runner_id for shard in topology.shards if shard.runner_id is not None} - known
    return frozenset(gone | {row.runner_id for row in topology.runners if row.dead})
