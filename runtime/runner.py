"""The composition root: one process's runner, from settings to services.

Runner    the process's part: connections, hints, client; lives as long as the process
Session   one runner id: keeper, ownership, engine; declared dead, it is thrown away and a new one begins (R2)
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from perdure.runtime.app import App
from perdure.runtime.client import Client
from perdure.runtime.dbclock import DatabaseClock
from perdure.runtime.engine.engine import Engine, EngineConfig
from perdure.runtime.engine.pacing import Backoff
from perdure.runtime.engine.threads import DaemonThreads, StepThreads
from perdure.runtime.hints import HintBus
from perdure.runtime.local import LocalRunner
from perdure.runtime.logs import boot_facts, log_boot
from perdure.runtime.occupant import occupant
from perdure.runtime.parts import Parts
from perdure.runtime.results import RunEnd
from perdure.runtime.retention import Retention
from perdure.runtime.settings import Settings
from perdure.runtime.signed_hints import SignedHints
from perdure.runtime.telemetry import Telemetry
from perdure.runtime.telemetry.instruments import Readings, Scene, exposition, publish
from perdure.runtime.transports import listening, open_ways
from perdure.sharding.file_lock import FileLock
from perdure.sharding.keeper import LAG_LIMIT, FixedKeeper, Keeper
from perdure.sharding.lock_mode import LockChoice, choose
from perdure.sharding.ownership import Ownership
from perdure.sharding.runner_port import RunnerPort
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.storage.clock import Clock, Randomness, SystemClock, SystemRandomness
from perdure.storage.connect import Database, connect, database_file
from perdure.storage.errors import (
    ConfigurationError,
    DisagreementError,
    InUseError,
    PerdureError,
    SchemaError,
    StorageError,
)
from perdure.storage.interface import RunnerIdentity, RunStore
from perdure.storage.model import Hint, HintKind

log = structlog.get_logger("perdure.runner")

HANDOVER = 1.0
"""Seconds a stopping runner has, once its grace is over, to park and hand over what is idle."""


@dataclass(frozen=True, slots=True)
class Factories:
    """Makes what has threads of its own; a simulation, which must have none, puts others in their place.

    keeper: called as the keeper's class is; None: the one that fits the runner storage."""

    keeper: Callable[..., Keeper | FixedKeeper] | None = None
    threads: Callable[[], StepThreads] = DaemonThreads


class Runner:
    """One pod's runner. `start`, then `closed` or `drain`, then `stop`.

    port: whether to serve the runner port (probes, status). Tests in process do without. telemetry: where to count and
    trace; left out, what the process has set up at the start.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        *,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        port: bool = True,
        database: Database | None = None,
        telemetry: Telemetry | None = None,
        factories: Factories | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._with_port = port
        self._database = database
        self._factories = factories or Factories()
        self._file_lock: FileLock | None = None
        self._store: RunStore | None = None
        self._bus: HintBus | None = None
        self._client: Client | None = None
        self._session: Session | None = None
        self._local = LocalRunner()
        self._lock: LockChoice | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._retention: asyncio.Task[None] | None = None
        self._draining = False
        self._stopping: asyncio.Task[None] | None = None
        self._given_telemetry = telemetry
        self.telemetry = telemetry or Telemetry()

    async def start(self) -> None:
        """Connect, register, and begin to take shards.

        Raises `ConfigurationError` (settings, schema, topology), `InUseError` (file, port, replica id),
        `CannotConnect`, `DatabaseUnavailable`; then nothing is left running, and of a wrong setting nothing is stored.
        Once only."""
        if self._store is not None or self._file_lock is not None:
            raise RuntimeError("this runner has been started before: make another")
        try:
            await self._start()
        except GeneratorExit:  # the loop is over, nothing can be awaited any more
            raise
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings = self.settings
        if self._given_telemetry is None:
            self.telemetry = Telemetry.detect(self._clock)
        if settings.runner_storage == "memory" and not settings.sqlite:
            raise ConfigurationError(
                "PERDURE_RUNNER_STORAGE=memory needs a SQLite database, whose file lock keeps a second process "
                "away; on a server use sql"
            )
        file = database_file(settings.require_db())
        if file is not None:
            self._file_lock = FileLock(file, shared=settings.runner_storage == "sql")
            self._file_lock.acquire()
        if self._database is None:
            self._database = connect(settings.database(), clock=self._clock)
        self._store = self._database.runs()
        await self._store.open()
        await self._store.prepare()
        if self._with_port:
            await self._check_port()
        await self._agree(self._database)
        self._bus = HintBus(local=settings.hints)
        self._signed = await open_ways(
            self._bus,
            self._database,
            settings,
            self._store.capabilities,
            self._clock,
            self._randomness,
            self.telemetry.tally,
        )
        self._client = Client.sharing(
            Parts(
                store=self._store,
                bus=self._bus,
                clock=self._clock,
                randomness=self._randomness,
                registry=self.app.registry,
                settings=settings,
                database=self._database,
                telemetry=self.telemetry,
                local=self._local,
            )
        )
        await self._client.__aenter__()
        self._session = await self._begin_session()
        here = weakref.ref(self)
        publish(lambda: _scene(here()), self.telemetry.tally)
        self._supervisor = asyncio.create_task(self._supervise(), name="perdure runner")
        retention = Retention(self._store, self._database, settings, self._randomness)
        self._retention = asyncio.create_task(retention.run(), name="retention")

    async def _check_port(self) -> None:
        """Before anything is agreed on for good. The session that follows takes the port itself."""
        port = RunnerPort(
            host=self.settings.runner_host, port=self.settings.runner_port, status=dict[str, object]
        )
        try:
            port.bind()
        finally:
            await port.close()

    async def _agree(self, database: Database) -> None:
        cluster = database.cluster()
        try:
            meta = await cluster.open()
            facts = await cluster.read_lock_facts()
            lock = choose(self.settings.shard_lock, meta.lock_mode, facts)
            if meta.lock_mode not in (None, lock.mode):
                await cluster.change_lock_mode(lock.mode)
            await cluster.agree(shard_count=self.settings.shards, lock_mode=lock.mode)
            self._lock = lock
        finally:
            await cluster.close()

    _signed: SignedHints | None = None

    @property
    def client(self) -> Client:
        """A client over the runner's own connections; starts of this process reach its engine without a detour."""
        if self._client is None:
            raise RuntimeError("the runner has no client before start() has returned")
        return self._client

    @property
    def session(self) -> Session:
        """The current life of this runner under one runner id."""
        if self._session is None:
            raise RuntimeError("the runner has no session before start() has returned")
        return self._session

    async def _begin_session(self) -> Session:
        assert self._database is not None
        assert self._store is not None
        assert self._bus is not None
        assert self._lock is not None
        session = Session(
            self.app,
            self.settings,
            lock=self._lock,
            database=self._database,
            store=self._store,
            bus=self._bus,
            clock=self._clock,
            randomness=self._randomness,
            port=self._with_port,
            factories=self._factories,
            telemetry=self.telemetry,
            signed=self._signed,
            tell_end=self._local.tell,
        )
        try:
            await session.start()
        except BaseException:  # given up half-way it would keep a lease, and nobody would serve its share of the shards
            await session.stop(leave=True)
            raise
        self._local.engine = session.engine
        return session

    async def _supervise(self) -> None:
        """While the process lives: a session that was declared dead is followed by a new one.

        One that ended soon after it began is followed more slowly each time, so that a lasting fault does not spin.
        """
        backoff = Backoff(self._randomness)
        while True:
            began = self._clock.monotonic()
            await self.session.ended()
            if self._clock.monotonic() - began > self.settings.lease:
                backoff = Backoff(self._randomness)
            failure = self.session.failure
            # Not declared dead, it says good-bye: else its shards are with nobody until its lease is over.
            await self.session.stop(leave=True)
            if failure is not None:
                raise failure
            if self._draining:
                return
            log.warning(
                "runner.replaced", what="this runner id may do nothing more; going on as a new one"
            )
            await backoff.wait()
            self._session = await self._begin_session_anew()

    async def _begin_session_anew(self) -> Session:
        """The database may be away just now: try until it is back. What comes back may be an old copy, which does not
        know yet what all have agreed on. What they have agreed on otherwise meanwhile ends this process."""
        assert self._database is not None
        backoff = Backoff(self._randomness)
        while True:
            try:
                await self._agree(self._database)
                return await self._begin_session()
            except (DisagreementError, InUseError, SchemaError):
                raise
            except (StorageError, ConfigurationError) as error:
                log.warning("runner.unregistered", error=str(error))
                await backoff.wait()

    async def closed(self) -> None:
        """Returns when the runner has ended by itself. Raises what ended it."""
        assert self._supervisor is not None, "start() first"
        await asyncio.shield(self._supervisor)

    def begin_drain(self) -> None:
        """Thread-safe: tell the others and the probes that this runner leaves, whatever the main loop does just now.
        `drain` follows on the loop."""
        self._draining = True
        if self._session is not None:
            self._session.begin_drain()

    async def drain(self) -> bool:
        """Claim nothing new, release each shard when its running steps have ended; True when all are handed over,
        False when the grace was over before, or this runner was declared dead, or failed, with runs in memory."""
        self._draining = True
        if self._session is None:
            return True
        in_time = await self._session.drain(self.settings.grace)
        return in_time and not self.cut_short

    @property
    def cut_short(self) -> bool:
        """After `drain`: whether it met the end of its session while there were runs in memory. Others have them."""
        return self._session is not None and self._session.engine.dropped > 0

    def let_go(self) -> None:
        """Thread-safe, for a main loop that does not answer: leave the cluster now, so that nobody waits for the lease
        to run out. What still runs here can write nothing any more. Blocks until that is said, or cannot be."""
        if self._session is not None:
            self._session.let_go()

    async def stop(self) -> None:
        """End every service and connection; what is still running is dropped and taken over by others.

        A caller that is cancelled does not interrupt it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="perdure runner stops")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._draining = True
        for task in (self._supervisor, self._retention):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._session is not None:
            await self._session.stop(leave=True)
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        if self._bus is not None:
            await self._bus.close()
        if self._store is not None:
            await self._store.close()
        if self._file_lock is not None:
            self._file_lock.release()


def _scene(runner: Runner | None) -> Scene | None:
    return None if runner is None or runner._session is None else runner._session.scene()


class Session:
    """Everything that belongs to one runner id."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        *,
        lock: LockChoice,
        database: Database,
        store: RunStore,
        bus: HintBus,
        clock: Clock,
        randomness: Randomness,
        port: bool,
        factories: Factories,
        telemetry: Telemetry,
        signed: SignedHints | None,
        tell_end: Callable[[RunEnd], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._lock = lock
        self._database = database
        self._store = store
        self._bus = bus
        self._clock = clock
        self._randomness = randomness
        self._factories = factories
        self._telemetry = telemetry
        self._signed = signed
        self.runner_id = randomness.bits63()
        self.replica_id = ""
        self.database_clock = DatabaseClock(clock)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._port = self._runner_port() if port else None
        self._keeper: Keeper | FixedKeeper | None = None
        self._state: KeeperState | None = None
        self._state_changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._services: list[asyncio.Task[None]] = []
        self._leases = LeaseConfig(
            lease=settings.lease,
            renewal=settings.renewal,
            look=settings.look,
            advisory=lock.mode == "advisory",
        )
        self.engine = Engine(
            store,
            self.runner_id,
            app.registry,
            EngineConfig(
                slots=settings.slots,
                park_after=settings.park_after,
                max_reclaims=settings.max_reclaims,
                scan=settings.scan,
                storage_deadline=settings.storage_deadline,
                shard_count=settings.shards,
                step_result_limit=settings.step_result_limit,
                input_record_limit=settings.input_record_limit,
                result_limit=settings.payload_limit,
                warm_runs=settings.warm_runs,
                warm_bytes=settings.warm_bytes,
                recording=settings.recording,
            ),
            randomness=randomness,
            bus=bus,
            holds=lambda: self.ownership.holds,
            clock=self.database_clock,
            may_write=self._may_write,
            declared_dead=self._declared_dead,
            trusted=self._trusted,
            tell_end=tell_end,
            topology=lambda: None if self._state is None else self._state.topology,
            threads=factories.threads(),
            telemetry=telemetry,
        )
        self.ownership = Ownership(
            self.runner_id,
            database.cluster,
            self.engine,
            self._leases,
            clock,
            shards_changed=self._shards_changed,
            randomness=randomness,
        )

    def _runner_port(self) -> RunnerPort:
        settings = self._settings
        return RunnerPort(
            host=settings.runner_host,
            port=settings.runner_port,
            status=self.status,
            metrics=lambda: exposition(self.scene()),
            hints=None if self._signed is None else self._signed.accept,
        )

    async def start(self) -> None:
        settings = self._settings
        address = self._port.bind() if self._port is not None else f"{settings.runner_host}:0"
        port_number = int(address.rpartition(":")[2])
        self.replica_id = self._telemetry.replica = settings.replica(port_number)
        facts = boot_facts(
            settings,
            self._store.capabilities,
            lock=self._lock,
            replica_id=self.replica_id,
            address=address,
        )
        identity = RunnerIdentity(
            runner_id=self.runner_id,
            replica_id=self.replica_id,
            address=address,
            workflows=self._app.registry.names(),
            info=facts.info(),
        )
        make_keeper = self._factories.keeper or (
            FixedKeeper if settings.runner_storage == "memory" else Keeper
        )
        self._keeper = make_keeper(
            self._database.keeper,
            identity,
            self._leases,
            self._clock,
            self._on_state,
            port=self._port,
            main_loop=self._loop,
            main_loop_does=self._occupant,
            randomness=self._randomness,
        )
        await self._keeper.begin()
        self._adopt(self._keeper.state)
        self._services = [
            asyncio.create_task(self._serve_engine(), name="engine"),
            asyncio.create_task(self._serve_ownership(), name="ownership"),
        ]
        self._unsubscribe = self._bus.subscribe(self._hinted)
        log_boot(facts)

    async def _serve_engine(self) -> None:
        try:
            await self.engine.run()
        except Exception:
            log.exception("engine.failed", what="this runner starts anew")
            self._dead.set()

    async def _serve_ownership(self) -> None:
        try:
            await self.ownership.run()
        except PerdureError as error:
            self.failure_seen(error)
        except Exception:  # else the keeper would keep a lease under which nobody takes a shard
            log.exception("ownership.failed", what="this runner starts anew")
            self._dead.set()

    # -- the keeper's states
    def _on_state(self, state: KeeperState) -> None:
        """In the keeper's thread."""
        self._loop.call_soon_threadsafe(self._adopt, state)

    def _adopt(self, state: KeeperState) -> None:
        before, self._state = self._state, state
        fallen = state.dead - (frozenset() if before is None else before.dead)
        if state.topology is not None and len(state.topology.shards) != self._settings.shards:
            self.failure_seen(_resharded(len(state.topology.shards), self._settings.shards))
            return
        if state.topology is not None:
            # A look that is known already says what time it was before the clock was set.
            if before is None or state.looked_at > before.looked_at:
                self.database_clock.observe(state.topology.db_now, state.looked_at)
            if self._signed is not None:
                self._signed.peers(listening(state.topology, self.runner_id))
        self.ownership.update(state)
        if fallen:
            self.engine.runners_died()
        self._state_changed.set()
        if not state.alive or state.failure is not None:
            self._dead.set()

    def _trusted(self) -> bool:
        return self._state is not None and self._state.trusted(self._clock.monotonic())

    async def _may_write(self) -> None:
        """Returns while the lease is trusted. A dead runner's writers wait here until they are cancelled."""
        while not self._trusted():
            self._state_changed.clear()
            await self._state_changed.wait()

    def _declared_dead(self) -> None:
        self._dead.set()

    def _shards_changed(self) -> None:
        if self._keeper is not None:
            self._keeper.look_now()
        self._bus.publish([Hint(HintKind.SHARDS)])

    def _hinted(self, hints: Sequence[Hint]) -> None:
        if self._keeper is not None and any(
            hint.kind in (HintKind.SHARDS, HintKind.ANY) for hint in hints
        ):
            self._keeper.look_now()

    @property
    def failure(self) -> PerdureError | None:
        """Why the process has to end; None: a new session may follow."""
        return self._failure or (self._state.failure if self._state is not None else None)

    _failure: PerdureError | None = None

    def failure_seen(self, error: PerdureError) -> None:
        self._failure = error
        self._dead.set()

    # -- ending
    async def ended(self) -> None:
        """Returns when this runner id may do nothing more."""
        await self._dead.wait()

    def begin_drain(self) -> None:
        """Thread-safe."""
        if self._keeper is not None:
            self._keeper.drain()

    def let_go(self) -> None:
        """Thread-safe; blocks."""
        if self._keeper is not None:
            self._keeper.stop(leave=True)

    async def drain(self, grace: float) -> bool:
        """Give up every shard, and wait for the runs that are pinned here: whether both are done. Steps get ``grace``
        seconds; what only has to be parked and handed over gets `HANDOVER` in any case."""
        draining = asyncio.ensure_future(self._drain())
        try:
            await asyncio.wait([draining], timeout=grace)
            if not draining.done() and not self.engine.steps_running:
                await asyncio.wait([draining], timeout=HANDOVER)
            return draining.done() and draining.result() is None
        finally:
            draining.cancel()
            await asyncio.wait([draining])

    async def _drain(self) -> None:
        self.engine.begin_drain()
        await self.ownership.drain()
        await self.engine.emptied()

    _unsubscribe: Any = None

    async def stop(self, *, leave: bool) -> None:
        """End the services; ``leave``: say good-bye to the cluster, so that nobody waits for the lease to run out."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for task in self._services:
            task.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        self._services = []
        self.engine.abandon()
        if self._keeper is not None:
            await self._keeper.finish(leave=leave)

    def status(self) -> Mapping[str, object]:
        """What /status shows; called on the keeper's thread, so it only reads."""
        state, tally, now = self._state, self._telemetry.tally, self.readings()
        return {
            "runner_id": self.runner_id,
            "replica_id": self.replica_id,
            "runs_in_memory": now.runs_in_memory,
            "runs_warm": self.engine.warm,
            "slots_taken": now.slots_taken,
            "slots": now.slots,
            "shards": now.shards,
            "workflows": list(self._app.registry.names()),
            "trusted": state is not None and state.trusted(self._clock.monotonic()),
            "loop_lag": round(now.loop_lag, 6),
            "loop_blocked_by": self._occupant() if now.loop_lag > LAG_LIMIT else None,
            "due_waiting": round(now.due_waiting, 6),
            "clock_offset": round(now.clock_offset, 6),
            "runs_ended": tally.finished,
            "runs_started": sum(list(tally.started.values())),
            "step_attempts": tally.attempts,
            "step_attempts_failed": tally.attempts_failed,
            "commits": tally.commit_seconds.count,
            "fenced": tally.fenced,
            "unknown_outcomes": tally.unknown,
        }

    def _occupant(self) -> str | None:
        return occupant(self._loop_thread)

    def readings(self) -> Readings:
        """What stands here at this moment; from any thread."""
        state, offset = self._state, 0.0
        if state is not None:
            offset = state.db_offset + self._clock.monotonic() - self._clock.now()
        return Readings(
            slots=self._settings.slots,
            slots_taken=self.engine.at_work,
            runs_in_memory=self.engine.in_memory,
            shards=len(self.ownership.holds),
            due_waiting=self.engine.due_waiting,
            loop_lag=self._keeper.loop_lag if self._keeper is not None else 0.0,
            clock_offset=offset,
        )

    def scene(self) -> Scene:
        """What metrics are read from; from any thread."""
        return Scene(self._telemetry.tally, self.readings())


def _resharded(now: int, asked: int) -> DisagreementError:
    return DisagreementError(
        f"the cluster has been divided into {now} shards since this process booted, which believes in {asked}: "
        f"start it anew with PERDURE_SHARDS={now}"
    )
