"""The engine of one runner: the runs it has in memory and the services that feed them.

It is the shards' user: it is told of shards gained and asked to vacate them; between, it claims their due runs,
enters bodies, and sees runs off when they finish or park.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from perdure.runtime.authoring.context import Context, RunFacts
from perdure.runtime.authoring.current import enter_run
from perdure.runtime.authoring.errors import WorkflowCrashLooped
from perdure.runtime.authoring.registry import Registry
from perdure.runtime.body import Body
from perdure.runtime.dbclock import DatabaseClock
from perdure.runtime.engine.activation import Activation, Departure, Surroundings
from perdure.runtime.engine.births import Births
from perdure.runtime.engine.borrowing import Borrower, runners_differ
from perdure.runtime.engine.claiming import HORIZON, Claimer
from perdure.runtime.engine.committer import Committer
from perdure.runtime.engine.executor import StepExecutor
from perdure.runtime.engine.loading import Loader
from perdure.runtime.engine.mail import MailReader
from perdure.runtime.engine.slots import Slots
from perdure.runtime.engine.start_lines import StartLines
from perdure.runtime.engine.suspects import SuspectLane, is_suspect
from perdure.runtime.engine.threads import StepThreads
from perdure.runtime.engine.warm import WarmRuns
from perdure.runtime.hints import HintBus
from perdure.runtime.inspection import failure_summary
from perdure.runtime.results import RunEnd
from perdure.runtime.telemetry import Telemetry
from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunStore
from perdure.storage.model import (
    ClaimedRun,
    Entry,
    Finish,
    Hint,
    HintKind,
    Mailbox,
    Reason,
    RunEvent,
    RunStatus,
    ShardHold,
    Topology,
)

log = structlog.get_logger("perdure.engine")
_stdlib = logging.getLogger("perdure.engine")

PARKING = 1.0
"""Seconds a shard being given up waits for its idle runs to be parked; who is still here then counts as pinned."""

EARLY = 60.0
"""Seconds for which it is kept in mind that a run has mail which may be on its way here."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Figures of one runner. Times in seconds; defaults are the settings' defaults."""

    slots: int = 200
    park_after: float = 5.0
    max_reclaims: int = 3
    scan: float = 5.0
    storage_deadline: float = 5.0
    shard_count: int = 256
    step_result_limit: int = 2 * 1024 * 1024
    input_record_limit: int = 16 * 1024
    result_limit: int = 2 * 1024 * 1024
    warm_runs: int = 1_000
    warm_bytes: int = 64 * 1024 * 1024
    recording: str = "full"


class Engine:
    """Executes the runs of the shards this runner holds.

    holds: shards held now. clock: database time. may_write: returns while the lease is trusted.
    trusted: whether it is, now. topology: the last look at runners and shards.
    declared_dead: called when a write learns that this runner was declared dead.
    tell_end: gets each end after its commit. threads: for blocking steps.
    """

    def __init__(
        self,
        store: RunStore,
        runner_id: int,
        registry: Registry,
        config: EngineConfig,
        *,
        randomness: Randomness,
        bus: HintBus,
        holds: Callable[[], Mapping[int, ShardHold]],
        clock: DatabaseClock,
        may_write: Callable[[], Awaitable[None]],
        declared_dead: Callable[[], None],
        trusted: Callable[[], bool],
        tell_end: Callable[[RunEnd], None],
        topology: Callable[[], Topology | None] = lambda: None,
        threads: StepThreads | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry = telemetry or Telemetry()
        self._store = store
        self._registry = registry
        self._config = config
        self._randomness = randomness
        self._bus = bus
        self._holds = holds
        self._now = now = clock.now
        clock.on_jump(self._clock_moved)
        self._runs: dict[str, Activation] = {}
        self._by_shard: dict[int, dict[str, Activation]] = {}
        self._vacating: dict[int, asyncio.Event] = {}
        self._loading: set[asyncio.Task[None]] = set()
        self._early_wakes: dict[str, float] = {}
        self._any_early = False
        self._monotonic = clock.mark
        # Bodies begin in copies of this Context: a run can be born in its caller's task, its next life cannot.
        self._home = contextvars.copy_context()
        self._slots = Slots(config.slots, self._slot_freed)
        self._lane = SuspectLane(self._suspect_cleared)
        self._draining = False
        self._emptied = asyncio.Event()
        self.dropped = 0
        """Runs that were in memory when all were abandoned."""
        self._committer = Committer(
            store,
            runner_id,
            randomness,
            may_write=may_write,
            declared_dead=declared_dead,
            telemetry=telemetry,
        )
        self._claimer = Claimer(
            store,
            runner_id,
            randomness,
            shard_count=config.shard_count,
            workflows=registry.names,
            holds=self._claimable,
            in_memory=self._claims,
            taken=self._claimed,
            strays=self._tell_strays,
            slots=self._slots,
            lane=self._lane,
            clock=clock,
            may_write=may_write,
            declared_dead=declared_dead,
            scan=config.scan,
            unknown_ends=config.storage_deadline,
            lost_sight=lambda: self._borrower.look_for_lost(),
            telemetry=telemetry,
        )
        self._borrower = Borrower(
            store,
            runner_id,
            randomness,
            workflows=registry.names,
            in_memory=self._claims,
            taken=self._claimed,
            mixed=lambda: runners_differ(topology(), registry.names()),
            claimer=self._claimer,
            slots=self._slots,
            lane=self._lane,
            clock=clock,
            declared_dead=declared_dead,
            scan=config.scan,
            unknown_ends=config.storage_deadline,
        )
        self.births = Births(
            runner_id,
            randomness,
            shard_count=config.shard_count,
            workflows=registry,
            holds=self._claimable,
            trusted=trusted,
            taken=self._taken,
            slots=self._slots,
            claimer=self._claimer,
            unknown_ends=config.storage_deadline,
        )
        self._tell_end = tell_end
        self._mail = MailReader(store, randomness, self._runs.get)
        self._loader = Loader(store, randomness, enter=self._enter, unreadable=self._unreadable)
        self._warm = WarmRuns(config.warm_runs, config.warm_bytes)
        host = asyncio.get_running_loop()
        self._around = Surroundings(
            host=host,
            now=now,
            submit=self._committer.submit,
            executor=StepExecutor(
                host,
                now,
                randomness,
                park_after=config.park_after,
                result_limit=config.step_result_limit,
                may_start=may_write,
                telemetry=telemetry,
                threads=threads,
            ),
            result_limit=config.result_limit,
            park_after=config.park_after,
            start_lines=StartLines(store, now) if config.recording == "full" else None,
            slots=self._slots,
            want_mail=lambda activation: self._mail.poke(activation.run.run_id),
            cleared=lambda activation: self._lane.leave(activation.run.run_id),
            gone=self._gone,
            telemetry=telemetry,
        )

    # -- services
    async def run(self) -> None:
        """Serves until cancelled; then everything in memory is dropped without a write."""
        unsubscribe = self._bus.subscribe(self._hinted)
        try:
            async with asyncio.TaskGroup() as services:
                services.create_task(self._committer.run(), name="committer")
                services.create_task(self._claimer.run(), name="claimer")
                services.create_task(self._claimer.run_scans(), name="safety scan")
                services.create_task(self._claimer.run_gained(), name="timers of new shards")
                services.create_task(self._borrower.run(), name="borrower")
                services.create_task(self._mail.run(), name="mail reader")
                if self._around.start_lines is not None:
                    services.create_task(self._around.start_lines.run(), name="start lines")
                services.create_task(self._run_mail_scans(), name="mail scan")
        finally:
            unsubscribe()
            self.abandon()

    def abandon(self) -> None:
        """Drop every run in memory: another runner has them, or will."""
        for task in self._loading:
            task.cancel()
        self.births.abandon()
        self.dropped += len(self._runs)
        for activation in list(self._runs.values()):
            activation.drop(lost_ownership=True)
        self._runs.clear()
        self._by_shard.clear()
        self._warm.clear()
        self._emptied.set()
        for emptied in self._vacating.values():
            emptied.set()

    # -- the shards' user
    def gained(self, holds: Sequence[ShardHold]) -> None:
        """Shards just taken: whatever their last holder left is looked for at once."""
        self._claimer.gained([hold.shard_id for hold in holds])

    async def vacate(self, shard_id: int) -> None:
        """Claim nothing more of it, start no more steps, park what is idle. Returns when nobody is left, or only runs
        with a running step: they are pinned, which is to say that they stay in memory under their claim, whoever has
        the shard, and park when the step has ended."""
        emptied = self._vacating.setdefault(shard_id, asyncio.Event())
        try:
            await self._claimer.resting()
            await self.births.settled(shard_id)
            self._warm.forget_shard(shard_id)
            for activation in list(self._by_shard.get(shard_id, {}).values()):
                activation.leave()
            if not self._only_pinned(shard_id):
                # Not wait_for, which on Python 3.11 swallows a cancel that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PARKING):
                        await emptied.wait()
        finally:
            self._vacating.pop(shard_id, None)

    def _only_pinned(self, shard_id: int) -> bool:
        return all(a.steps for a in self._by_shard.get(shard_id, {}).values())

    def runners_died(self) -> None:
        """Whatever they had in memory, of any shard, is an orphan now."""
        self._claimer.look_for_orphans(self._holds())
        self._borrower.look()

    def begin_drain(self) -> None:
        """Take nothing more, start no more steps, park what is idle, whoever holds its shard."""
        self._draining = True
        self._borrower.stop()
        for activation in list(self._runs.values()):
            activation.leave()

    @property
    def steps_running(self) -> bool:
        """Whether anything is left that may take long: without it runs only have to be parked."""
        return any(activation.steps for activation in self._runs.values())

    async def emptied(self) -> None:
        """After `begin_drain`: returns when no run is left in memory, pinned ones included."""
        while self._runs:
            self._emptied.clear()
            await self._emptied.wait()

    # -- what `status` and `why` show
    @property
    def in_memory(self) -> int:
        return len(self._runs)

    def find(self, run_id: str) -> Activation | None:
        return self._runs.get(run_id)

    @property
    def looking(self) -> bool:
        """Whether runs are being claimed, or will be as soon as there is a slot."""
        return self._claimer.looking

    @property
    def warm(self) -> int:
        """Parked runs whose bodies are still in memory."""
        return len(self._warm)

    @property
    def at_work(self) -> int:
        return self._slots.taken

    @property
    def due_waiting(self) -> float:
        """Seconds for which due runs have been known of that could not be claimed."""
        return self._claimer.due_waiting

    # -- claiming
    def _claimable(self) -> Mapping[int, ShardHold]:
        holds = {} if self._draining else self._holds()
        if not self._vacating:
            return holds
        return {shard: hold for shard, hold in holds.items() if shard not in self._vacating}

    def _clock_moved(self, seconds: float) -> None:
        log.warning("clock.jumped", what="the database's clock was set", seconds=round(seconds, 3))
        self._claimer.clock_moved()
        if self._around.start_lines is not None:
            self._around.start_lines.clock_moved()
        for activation in list(self._runs.values()):
            activation.clock_moved()

    def _claims(self) -> list[int]:
        return [*(a.run.claim_id for a in self._runs.values()), *self.births.claims]

    def _slot_freed(self) -> None:
        self._claimer.slot_freed()

    def _suspect_cleared(self) -> None:
        self._claimer.suspect_cleared()
        self._borrower.look()

    def _tell_strays(self, workflows: Sequence[str]) -> None:
        self._bus.publish([Hint(HintKind.STRAY, workflow) for workflow in workflows])

    def _claimed(self, runs: Sequence[ClaimedRun]) -> None:
        """By the one claim under way. Births may be, too, and have heard nothing of their runs' mail yet."""
        self._taken(runs)
        if not self.births.claims:
            self._early_wakes.clear()
            self._any_early = False

    def _taken(self, runs: Sequence[ClaimedRun]) -> None:
        resumed: list[Activation] = []
        woken: list[Activation] = []
        for run in runs:
            self._displace(run)
            warm = self._warm.take(run)
            shard = shard_of(run.slot, self._config.shard_count)
            if warm is not None:
                context = self._home.copy()
                warm.span = self._telemetry.entered(run, shard, 0, context)
                warm.wake(run)
            activation = warm or Activation(run, self._around)
            self._runs[run.run_id] = activation
            self._by_shard.setdefault(shard, {})[run.run_id] = activation
            activation.suspect = is_suspect(run)
            if activation.suspect:
                self._lane.enter(run.run_id)
            if self._draining or shard in self._vacating:
                activation.leave()
            if run.reclaim_count >= self._config.max_reclaims:
                self._crash_looped(activation)
            elif warm is not None and run.wake_seq > 0:
                woken.append(activation)
            elif warm is not None:
                activation.go_on(None)
            elif run.next_seq > 1 or run.wake_seq > 0:
                resumed.append(activation)
            else:
                self._enter(activation, (), None)
        if self._early_wakes or self._any_early:
            for run in runs:
                if self._early_wakes.pop(run.run_id, None) is not None or self._any_early:
                    self._poke(run.run_id)
        if resumed:
            self._read_first(self._loader.load(resumed))
        if woken:
            self._read_first(self._loader.load(woken))

    def _read_first(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(reading, name="journals")
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    def _unreadable(self, activation: Activation, error: Exception) -> None:
        text = f"its journal or its mail cannot be read by this release: {error}"
        log.error("run.unreadable", run_id=activation.run.run_id, error=str(error))
        activation.hold(Reason.NONDETERMINISM, RunEvent("journal-unreadable", self._now(), text))

    def _enter(
        self, activation: Activation, journal: Sequence[Entry], mailbox: Mailbox | None
    ) -> None:
        if activation.body is not None:
            activation.go_on(mailbox)
            return
        run = activation.run
        definition = self._registry.get(run.workflow)
        # A body keeps a copy of the context it is begun in: its log lines and steps know their run from there.
        context = self._home.copy()
        context.run(enter_run, run.run_id, run.workflow)
        try:
            payload = context.run(definition.decode_payload, run.payload)
        except (
            BaseException
        ) as error:  # a payload that does not decode fails its run, visibly (R7, R8)
            log.error("run.undecodable", run_id=run.run_id, workflow=run.workflow, error=str(error))
            activation.fail(error)
            return
        shard = shard_of(run.slot, self._config.shard_count)
        activation.span = self._telemetry.entered(run, shard, len(journal), context)
        activation.first_span = activation.span
        context.run(activation.begin, definition, self._context_of, payload, journal, mailbox)

    def _crash_looped(self, activation: Activation) -> None:
        run = activation.run
        error = WorkflowCrashLooped(run.run_id, run.reclaim_count)
        log.error("run.crash-looped", run_id=run.run_id, workflow=run.workflow, error=str(error))
        said = f"{type(error).__name__}: {error}"
        activation.hold(Reason.CRASH_LOOP, RunEvent("run-crashlooped", self._now(), said))

    # -- departures
    def _displace(self, run: ClaimedRun) -> None:
        """Whoever is in memory under an older claim has lost it: its park is committed and the answer still on its way,
        or the database has lost the commit that claimed it."""
        older = self._runs.get(run.run_id)
        if older is not None:
            log.info("run.displaced", run_id=run.run_id)
            older.drop(lost_ownership=True)
            self._gone(older, Departure())

    def _gone(self, activation: Activation, departure: Departure) -> None:
        run = activation.run
        self._runs.pop(run.run_id, None)
        if activation.suspect:
            self._lane.leave(run.run_id)
        shard = shard_of(run.slot, self._config.shard_count)
        siblings = self._by_shard.get(shard)
        if siblings is not None:
            siblings.pop(run.run_id, None)
            if not siblings:
                del self._by_shard[shard]
            if shard in self._vacating and self._only_pinned(shard):
                self._vacating[shard].set()
        if not self._runs:
            self._emptied.set()
        if departure.finish is not None:
            self._telemetry.tally.end(run.workflow, departure.finish.status, self._now())
            _log_end(run, departure.finish)
            self._tell_end(_end_of(run, departure.finish))
            hints = [Hint(HintKind.DONE, run.run_id, run.slot)]
            if departure.finish.parent_id is not None:
                parent = departure.finish.parent_id
                hints.append(Hint(HintKind.WAKE, parent, slot_of(parent)))
            self._bus.publish(hints)
        elif departure.park is not None:
            if activation.rest is not None and not activation.leaving:
                self._warm.keep(activation, shard)
            if departure.poked:
                self._claimer.hint_slots([run.slot])
            if departure.park.wake_at is not None:
                self._parked(run, shard, departure.park.wake_at)
        elif departure.reload:
            self._claimer.look_for_orphans([shard])
            self._borrower.look_for_lost()

    def _parked(self, run: ClaimedRun, shard: int, wake_at: float) -> None:
        """Whoever holds its shard is to have it when it is due: I, or the one who has taken the shard meanwhile."""
        self._claimer.note_due(run.run_id, run.slot, wake_at)
        if shard in self._claimable():
            return
        if wake_at <= self._now():
            self._bus.publish([Hint(HintKind.START, slot=run.slot)])
        elif wake_at <= self._now() + HORIZON:
            self._bus.publish([Hint(HintKind.PARKED, slot=run.slot)])

    # -- hints and scans
    def _hinted(self, hints: Sequence[Hint]) -> None:
        slots: list[int] = []
        for hint in hints:
            if hint.kind is HintKind.START:
                slots.append(hint.slot)
            elif hint.kind is HintKind.WAKE:
                if hint.run_id in self._runs:
                    self._poke(hint.run_id)
                else:
                    slots.append(hint.slot)
                    if self._being_taken:
                        self._note_early(hint.run_id)
            elif hint.kind is HintKind.DONE:
                self._warm.forget(hint.run_id)
            elif hint.kind is HintKind.STRAY:
                if hint.run_id in self._registry:
                    self._borrower.look()
            elif hint.kind is HintKind.PARKED:
                self._claimer.note_upcoming([shard_of(hint.slot, self._config.shard_count)])
            elif hint.kind is HintKind.ANY:
                self._borrower.look()
                self._claimer.hint_all()
                self._any_early = self._any_early or self._being_taken
                for run_id in self._runs:
                    self._poke(run_id)
        if slots:
            self._claimer.hint_slots(slots)

    @property
    def _being_taken(self) -> bool:
        """Runs may be on their way here, and their mail newer than what took them."""
        return self._claimer.under_way or bool(self.births.claims)

    def _note_early(self, run_id: str) -> None:
        """Most are of others' runs: where births never pause only their age ends them."""
        now = self._monotonic()
        self._early_wakes.pop(run_id, None)
        self._early_wakes[run_id] = now
        while (oldest := next(iter(self._early_wakes))) != run_id:
            if self._early_wakes[oldest] > now - EARLY:
                break
            del self._early_wakes[oldest]

    def _poke(self, run_id: str) -> None:
        """A run in memory may have mail."""
        activation = self._runs.get(run_id)
        if activation is not None:
            activation.poked()
            self._mail.poke(run_id)

    async def _run_mail_scans(self) -> None:
        """Runs waiting in memory whose hint was lost: found by their wake_seq."""
        while True:
            await asyncio.sleep(self._config.scan * (0.8 + 0.4 * self._randomness.fraction()))
            seen = {run_id: a.seen for run_id, a in self._runs.items() if a.body is not None}
            if not seen:
                continue
            try:
                moved = await self._store.due_in_memory(seen)
            except PerdureError as error:
                log.warning("mail.scan-unavailable", error=str(error))
                continue
            for run_id in moved:
                self._poke(run_id)

    def _context_of(self, body: Body, activation: Activation) -> Context:
        run = activation.run
        facts = RunFacts(
            run_id=run.run_id,
            workflow=run.workflow,
            version=run.version,
            attempt=run.reclaim_count + 1,
            created_at=run.created_at,
            seed=run.seed,
            source=run.source,
            parent_id=run.parent_id,
            trace=run.trace,
            tenant=run.tenant,
        )
        limit = self._config.input_record_limit if self._config.recording == "full" else None
        return Context(body, facts, input_limit=limit)


def _end_of(run: ClaimedRun, finish: Finish) -> RunEnd:
    return RunEnd(
        run.run_id, run.workflow, finish.status, finish.result, finish.error, finish.reason
    )


def _log_end(run: ClaimedRun, finish: Finish) -> None:
    """Into the pod's log: a failed run is a warning with its error, every other end is for debugging."""
    facts = {"run_id": run.run_id, "workflow": run.workflow}
    if finish.status is RunStatus.FAILED:
        log.warning("run.failed", **facts, error=failure_summary(finish.error))
    elif _stdlib.isEnabledFor(logging.DEBUG):  # structlog takes a while to find out by itself
        log.debug("run.ended", **facts, status=finish.status.value)
