"""The keeper: the thread that keeps a runner's lease and serves its port, whatever user code does (R3).

A daemon thread with an event loop and a database connection of its own. What it knows leaves it as one
immutable `KeeperState`, swapped by reference and handed to ``on_state`` in the keeper's thread.

    Keeper        runner storage `sql`: renews a lease, looks at the others
    FixedKeeper   runner storage `memory`: the process is alone behind the file's lock, so its state never changes
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import structlog

from perdure.sharding.lease import LeaseLoop, dead_runners
from perdure.sharding.runner_port import LoopWatch, RunnerPort
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.storage.clock import Clock, Randomness, SystemRandomness
from perdure.storage.interface import ClusterStore, RunnerIdentity
from perdure.storage.model import RunnerRow, Topology

log = structlog.stdlib.get_logger("perdure.sharding")

LAG_LIMIT = 2.0
"""Seconds a main loop may owe an answer before the runner counts as not ready."""

OnState = Callable[[KeeperState], None]


def _unknown() -> str | None:
    return None


class _KeeperThread(ABC):
    """The thread, its loop, the port, and the way states leave it."""

    def __init__(
        self,
        open_store: Callable[[], ClusterStore],
        identity: RunnerIdentity,
        config: LeaseConfig,
        clock: Clock,
        on_state: OnState,
        *,
        port: RunnerPort | None = None,
        main_loop: asyncio.AbstractEventLoop | None = None,
        main_loop_does: Callable[[], str | None] = _unknown,
        randomness: Randomness | None = None,
    ) -> None:
        """open_store: makes a new store, called in the keeper's thread. port: bound before the runner registers; its
        address replaces the identity's. main_loop: whose lag makes the runner not ready; default: not watched.
        main_loop_does: called in the keeper's thread, what keeps that loop busy at this moment, in words."""
        self.identity = identity
        self._open_store = open_store
        self._config = config
        self._clock = clock
        self._on_state = on_state
        self._port = port
        self._watch = None if main_loop is None else LoopWatch(main_loop, clock)
        self._main_loop_does = main_loop_does
        self._randomness = randomness or SystemRandomness()
        self._state: KeeperState | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._leave = self._draining = False
        self._life = threading.Lock()
        self._over = False

    @property
    def state(self) -> KeeperState:
        """The newest snapshot; there is one from the return of `start` on."""
        if self._state is None:
            raise RuntimeError("the keeper has no state before start() has returned")
        return self._state

    def start(self) -> None:
        """Start the thread; return when the runner row exists and has been looked at once.

        Blocks for as long as connecting takes (10 s at most). Raises what went wrong: `InUseError` for a taken port,
        `ConfigurationError`, `StorageError`; then nothing is left running."""
        booted: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._life:
            if self._thread is not None or self._over:
                raise RuntimeError("a keeper starts once: make a new one, with a new runner id")
            self._thread = threading.Thread(
                target=self._run_thread, args=(booted,), name="perdure-keeper", daemon=True
            )
            self._thread.start()
        booted.result()

    def stop(self, *, leave: bool = True) -> None:
        """End the thread: leave the cluster (all shards still held are free at once), close the port.

        leave: False goes silently, as a crash does: the lease runs out. Safe to call twice, and before or during
        `start`, which then keeps no lease. Blocks for four renewal periods at most, when the database does not answer.
        """
        with self._life:
            self._over = True
            thread = self._thread
        if thread is None or not thread.is_alive():
            return
        self._leave = leave
        self._in_loop(self._request_stop)
        thread.join(4 * self._config.renewal)
        if thread.is_alive():
            log.warning("keeper.left-behind", what="it has not ended; its thread stays")

    async def begin(self) -> None:
        """`start`, without blocking the caller's loop."""
        await asyncio.to_thread(self.start)

    async def finish(self, *, leave: bool) -> None:
        """`stop`, without blocking the caller's loop."""
        await asyncio.to_thread(self.stop, leave=leave)

    def drain(self) -> None:
        """Thread-safe: this runner is leaving. The probes say so at once, and the others are told, whatever the main
        loop does; giving up shards is its part."""
        self._draining = True
        self._in_loop(self._tell_draining)

    @abstractmethod
    def look_now(self) -> None:
        """Thread-safe: look at runners and shards at once, somebody said that they have changed."""

    # ---- in the thread ------------------------------------------------------------------------

    @abstractmethod
    async def _boot(self) -> None:
        """Register, and publish the first state."""

    @abstractmethod
    async def _serve(self) -> None:
        """What the keeper does until `_stop` is set."""

    @abstractmethod
    async def _end(self, leave: bool) -> None:
        """Leave if asked, close the store."""

    def _request_stop(self) -> None:
        self._stop.set()

    @abstractmethod
    def _tell_draining(self) -> None:
        """Tell the others, if there are any."""

    def _run_thread(self, booted: concurrent.futures.Future[None]) -> None:
        # Never the process's loop policy: the host may have put one there that is for its own loop only.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._main(booted))
            except BaseException as error:
                if booted.done():
                    self._ended_unexpectedly(error)
                else:
                    booted.set_exception(error)

    def _ended_unexpectedly(self, error: BaseException) -> None:
        """Nobody keeps the lease any more: say so at once, as if declared dead, rather than let trust run out."""
        log.error("keeper.failed", what="the lease will run out", exc_info=error)
        if self._state is None:
            return
        self._state = replace(
            self._state,
            alive=False,
            ready=False,
            trusted_until=float("-inf"),
            reason=f"the keeper has ended unexpectedly: {error!r}",
        )
        with contextlib.suppress(Exception):
            self._on_state(self._state)

    async def _main(self, booted: concurrent.futures.Future[None]) -> None:
        watching: asyncio.Task[None] | None = None
        leave = True  # unless whoever stops it says otherwise
        try:
            if self._port is not None:
                self.identity = replace(self.identity, address=self._port.bind())
            await self._boot()
            if self._over:  # whoever said so may have come before there was a loop to say it to
                self._request_stop()
            if self._port is not None:
                await self._port.serve(self.unready)
            if self._watch is not None:
                watching = asyncio.create_task(self._ping(self._watch), name="main-loop-watch")
            booted.set_result(None)
            await self._serve()
            # Declared dead, the port still answers (503) until the runner has drawn its conclusions.
            await self._stop.wait()
            leave = self._leave
        finally:
            if watching is not None:
                watching.cancel()
            await self._end(leave)
            if self._port is not None:
                await self._port.close()

    async def _ping(self, watch: LoopWatch) -> None:
        told = False
        while True:
            watch.ping()
            lag = watch.lag()
            if lag > LAG_LIMIT and not told:
                log.warning("loop.blocked", seconds=round(lag, 1), by=self._main_loop_does())
            told = lag > LAG_LIMIT
            await asyncio.sleep(self._config.look)

    @property
    def loop_lag(self) -> float:
        """Seconds the main loop last took to answer; 0.0 where it is not watched."""
        return 0.0 if self._watch is None else self._watch.delay()

    def unready(self) -> str | None:
        """Why /readyz answers 503, None when it answers 200."""
        state = self._state
        if state is None:
            return "the runner has not registered yet"
        if state.failure is not None:
            return str(state.failure)
        if state.reason is not None:
            return state.reason
        if not state.trusted(self._clock.monotonic()):
            return "the runner's lease is not trusted: the last renewal is too long ago"
        if self._draining or _row(state.topology, self.identity.runner_id, draining=True):
            return "the runner is draining"
        lag = 0.0 if self._watch is None else self._watch.lag()
        if lag > LAG_LIMIT:
            return (
                f"the main loop has not answered for {lag:.1f} s ({self._main_loop_does() or 'cause unknown'}): "
                "blocking code belongs in a step that is a plain def"
            )
        return None

    def _publish(self, state: KeeperState) -> None:
        self._state = state
        # A host loop that is closed already has no use for states; that must not end the lease.
        with contextlib.suppress(RuntimeError):
            self._on_state(state)

    def _in_loop(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(call)


class Keeper(_KeeperThread):
    """Keeps the lease of a runner in a cluster (runner storage `sql`); `lease.py` has the protocol."""

    def __init__(
        self,
        open_store: Callable[[], ClusterStore],
        identity: RunnerIdentity,
        config: LeaseConfig,
        clock: Clock,
        on_state: OnState,
        *,
        port: RunnerPort | None = None,
        main_loop: asyncio.AbstractEventLoop | None = None,
        main_loop_does: Callable[[], str | None] = _unknown,
        randomness: Randomness | None = None,
    ) -> None:
        super().__init__(
            open_store,
            identity,
            config,
            clock,
            on_state,
            port=port,
            main_loop=main_loop,
            main_loop_does=main_loop_does,
            randomness=randomness,
        )
        self._lease = LeaseLoop(open_store, config, clock, self._randomness, self._publish)
        self._held = False
        self._born = clock.monotonic()

    def unready(self) -> str | None:
        """A new runner is ready once it has held a shard, or a lease after its birth: there may be none for it."""
        reason = super().unready()
        if reason is None and not self._held:
            topology, me = self.state.topology, self.identity.runner_id
            shards = () if topology is None else topology.shards
            self._held = any(shard.runner_id == me for shard in shards)
            if not self._held and self._clock.monotonic() < self._born + self._config.lease:
                return "the runner has no shard yet"
        return reason

    def look_now(self) -> None:
        self._in_loop(self._lease.look_now)

    async def _boot(self) -> None:
        await self._lease.boot(self.identity)

    async def _serve(self) -> None:
        await self._lease.run()

    async def _end(self, leave: bool) -> None:
        await self._lease.end(leave=leave)

    def _tell_draining(self) -> None:
        self._lease.drain()

    def _request_stop(self) -> None:
        super()._request_stop()
        self._lease.stop()


class FixedKeeper(_KeeperThread):
    """For runner storage `memory`: registers, declares everybody else dead, and is trusted for ever.

    The caller holds the database file's lock exclusively, so nobody else judges this runner and it renews nothing.
    """

    def look_now(self) -> None:
        """Nothing to see: nobody else may come or go."""

    def _tell_draining(self) -> None:
        """Nobody to tell."""

    async def _boot(self) -> None:
        store = self._open_store()
        try:
            await store.open()
            await store.register(self.identity, self._config.lease)
            await store.declare_others_dead(self.identity.runner_id)
            sent = self._clock.monotonic()
            topology = await store.read_topology()
        finally:
            await store.close()
        self._publish(
            KeeperState(
                alive=True,
                trusted_until=float("inf"),
                topology=topology,
                db_offset=topology.db_now - sent,
                dead=dead_runners(topology),
                ready=True,
                looked_at=sent,
            )
        )

    async def _serve(self) -> None:
        await self._stop.wait()

    async def _end(self, leave: bool) -> None:
        if not leave or self._state is None:
            return
        store = self._open_store()
        try:
            async with asyncio.timeout(self._config.renewal):
                await store.open()
                await store.leave(self.identity.runner_id)
        except Exception as error:
            log.warning("runner.leave-failed", error=str(error))
        finally:
            with contextlib.suppress(Exception):
                await store.close()


def _row(topology: Topology | None, runner_id: int, *, draining: bool) -> RunnerRow | None:
    rows = () if topology is None else topology.runners
    return next(
        (row for row in rows if row.runner_id == runner_id and row.draining is draining), None
    )
