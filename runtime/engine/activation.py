"""One run in memory: its body, its running steps, and the one write it may have under way.

The body asks (BodyPort), the activation answers: entries gather until the gate is free, then leave as one write;
nothing else of this run is sent before its verdict is known (R1). What is written is decided in `decisions`.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.weight import is_heavy
from perdure.runtime.body import Body, Ending, StepCall
from perdure.runtime.engine.committer import Answer, Done, entry_bytes
from perdure.runtime.engine.decisions import (
    LookAgain,
    failure_of,
    finish_of,
    hold_of,
    park_decision,
)
from perdure.runtime.engine.executor import RunningStep, StepExecutor
from perdure.runtime.engine.pacing import Backoff
from perdure.runtime.engine.slots import Slots
from perdure.runtime.engine.start_lines import StartLines
from perdure.runtime.inspection import failure_summary
from perdure.runtime.telemetry import Telemetry
from perdure.storage.errors import DataRefused
from perdure.storage.model import (
    ClaimedRun,
    Entry,
    EntryKind,
    Finish,
    Mailbox,
    Message,
    MessageKind,
    Park,
    Reason,
    RunEvent,
    RunWrite,
    Verdict,
)
from perdure.storage.values import value

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from perdure.runtime.authoring.context import Context

log = structlog.get_logger("perdure.run")

PART_BYTES = 1024 * 1024
"""Of the entries in one write of a run."""

LONG_HISTORY = 10_000
"""Entries of a journal at which people are warned."""

BODY_BYTES = 16 * 1024
"""Of a body that has done nothing yet, measured: its loop, its frames, its context."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every activation of an engine shares."""

    host: asyncio.AbstractEventLoop
    now: Callable[[], float]
    submit: Callable[[RunWrite, Done], None]
    executor: StepExecutor
    park_after: float
    result_limit: int
    start_lines: StartLines | None
    """None where it is not recorded which steps are running."""
    slots: Slots
    want_mail: Callable[[Activation], None]
    cleared: Callable[[Activation], None]
    """Gets a suspect when it has written something."""
    gone: Callable[[Activation, Departure], None]
    telemetry: Telemetry


@value(frozen=True, slots=True)
class Departure:
    """How a run left memory. finish, park: what was committed; reload: the row must be claimed anew.

    poked: somebody spoke of mail while the park was under way; it may have come after the park."""

    finish: Finish | None = None
    park: Park | None = None
    reload: bool = False
    poked: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """What a park of mine left in the run's fence: as long as it is there, nobody has written since.

    batch_id: of the park's batch. revision, next_seq: after it."""

    batch_id: int
    revision: int
    next_seq: int

    def goes_on(self, claimed: ClaimedRun) -> bool:
        """Whether ``claimed`` is the very next thing that happened to the run. The batch is compared too, since after a
        fail-over that lost commits another history may have come to the same revision."""
        return (
            claimed.last_batch == self.batch_id
            and claimed.revision == self.revision + 1
            and claimed.next_seq == self.next_seq
            and not claimed.taken_over
        )


class Activation:
    """Implements the body's port for one claimed run.

    After a park it may stay in memory with its body frozen (``rest`` is set), and `wake` when the run is claimed again:
    between the two it has no claim, holds no slot, and whatever reaches it is ignored."""

    def __init__(
        self,
        run: ClaimedRun,
        around: Surroundings,
    ) -> None:
        self.run = run
        self.around = around
        self.body: Body | None = None
        self.steps: dict[str, RunningStep] = {}
        self.seen = run.wake_seq
        self.leaving = False
        self.gone = False
        self.suspect = False
        self._definition: WorkflowDefinition[Any, Any] | None = None
        self._revision = run.revision
        self._entries: list[Entry] = []
        self._consumed: list[tuple[str, int]] = []
        self._events: list[RunEvent] = []
        self._flight: RunWrite | None = None
        self._ending: Ending | None = None
        self._encoding: asyncio.Task[None] | None = None
        self._encoded: str | BaseException | None = None
        """A large result of the body, or why it cannot be stored, once a thread has encoded it."""
        self._quiet_since: float | None = None
        """Since when the body has been quiescent with nothing of its own under way; None: not looked at yet."""
        self._look_again: asyncio.TimerHandle | None = None
        self._cancel_reason: str | None = None
        self._suspends: Sequence[Message] = ()
        """What asks for a hold and was not taken back, as of the last read of the mailbox."""
        self._suspends_told: set[str] = set()
        self._data_refused = 0
        """How often the database has refused what was to be written."""
        self._mail_is_stale = False
        self._refusals = 0
        """Parks refused in a row without a new message: somebody else has locked the wake row."""
        self._park_at = 0.0
        self._early_mail: Mailbox | None = None
        self._poked = False
        self._slotted = False
        self.rest: Rest | None = None
        self._waking = False
        """Claimed again, and its mailbox still being read."""
        self.bytes = BODY_BYTES + len(run.payload)
        """Roughly what the body keeps in memory."""
        self._next_seq = run.next_seq
        self.record_attempts = run.taken_over or run.reclaim_count > 0
        self._began: dict[str, float] = {}
        """When the first attempt of a step began whose failed attempts are entries."""
        self.span: Span | None = None
        """Of this run in this memory, where runs are traced."""
        self.first_span: Span | None = None
        """The one the body was begun in; it goes on under another when it was parked meanwhile and stayed warm."""
        self._hold_slot(True)

    # -- life
    def begin(
        self,
        definition: WorkflowDefinition[Any, Any],
        context: Callable[[Body, Activation], Context],
        payload: Any,
        journal: Sequence[Entry],
        mailbox: Mailbox | None,
    ) -> None:
        """Enter the body; it runs from the next turn of the host loop on."""
        self._definition = definition
        for entry in journal:
            self.bytes += entry_bytes(entry)
            if entry.kind is EntryKind.CANCEL:
                self._cancel_reason = entry.output
            elif entry.kind is EntryKind.ATTEMPT and entry.started_at is not None:
                self._began[entry.key] = entry.started_at

        def main(body: Body) -> Any:
            return definition.call(context(body, self), payload)

        self.body = Body(
            host=self.around.host,
            main=main,
            entered_at=self.run.entered_at,
            journal=journal,
            clock=self.around.now,
            port=self,
            name=self.run.run_id,
        )
        self._first_mail(mailbox)
        if self._suspends:
            self._hold_unentered()
            return
        if self.leaving:
            self.body.hold_starts(True)
        self.body.begin()

    def _hold_unentered(self) -> None:
        """The operator asked for a hold before the body began or went on: it is left as it stands."""
        assert self.body is not None
        self.body.unwind()
        self.body = None
        self._send(self._held())

    def wake(self, run: ClaimedRun) -> None:
        """Claimed again with nothing written since the park; `go_on` follows, with the mailbox if it is to be read."""
        assert self.rest is not None, "only what rests can be woken"
        self.rest = None
        self.run = run
        self.gone = self.leaving = self._mail_is_stale = self._poked = False
        self.seen = run.wake_seq
        self._revision = run.revision
        self._refusals = 0
        self._early_mail = None
        self._waking = True
        self._hold_slot(True)

    def go_on(self, mailbox: Mailbox | None) -> None:
        """The frozen body goes on where it was."""
        assert self.body is not None
        self._waking = False
        self._quiet_since = None
        self.body.wake()
        self._first_mail(mailbox)
        if not self._suspends:
            self.body.hold_starts(self.leaving)
            self.body.thaw()
            if self._ending is not None:  # a foreign thread ended it meanwhile: it turns no more
                self._advance()
        elif self._flight is None:
            self._hold_unentered()

    def _first_mail(self, mailbox: Mailbox | None) -> None:
        known = [read for read in (mailbox, self._early_mail) if read is not None]
        if known:
            self.mail(max(known, key=lambda read: read.wake_seq))

    def mail(self, mailbox: Mailbox) -> None:
        """The mailbox as just read: the only thing that moves ``seen`` (R6)."""
        if self.gone:
            return
        if self.body is None or self._waking:  # still being read; this may be the newer reading
            self._early_mail = mailbox
            return
        if mailbox.wake_seq > self.seen:
            self._refusals = 0
        self.seen = mailbox.wake_seq
        self._mail_is_stale = False
        for message in mailbox.messages:
            if message.kind is MessageKind.CANCEL and self._cancel_reason is None:
                self._cancel_reason = message.body
        self._hear_operator([m for m in mailbox.messages if m.kind is MessageKind.SUSPEND])
        self.body.mail(mailbox.messages, mailbox.db_now)

    def _hear_operator(self, suspends: Sequence[Message]) -> None:
        """Asked for a hold, it starts no more steps and is held as soon as none is running; an idle one as it stands,
        before it hears of anything else. It goes on if the operator thought better of it."""
        assert self.body is not None
        if bool(suspends) != bool(self._suspends):
            self.body.hold_starts(self.leaving or bool(suspends))
        self._suspends = suspends
        if suspends:
            self.record_attempts = True
            self._advance()

    def _held(self) -> Park:
        """The hold an operator asked for. Its message stays unread until the resume, which takes it back."""
        for message in self._suspends:
            if message.message_id not in self._suspends_told:
                self._suspends_told.add(message.message_id)
                self._events.append(RunEvent("run-suspended", self.around.now(), message.body))
        return hold_of(Reason.OPERATOR, self.seen)

    def poked(self) -> None:
        """Somebody says that there is mail. A park under way may be committed already, so that no read of the mailbox
        by this claim can answer it."""
        self._poked = True

    def clock_moved(self) -> None:
        """The database's clock was set: whatever waits for an instant of it reckons anew."""
        if self.body is not None and self.rest is None:
            self.body.clock_moved()
        if self._look_again is not None:
            self._schedule_look(-math.inf)

    def leave(self) -> None:
        """The shard is being handed over: start no more steps, park as soon as none is running."""
        self.leaving = True
        if self.body is not None and not self._waking:
            self.body.hold_starts(True)
            self._advance()

    def drop(self, *, lost_ownership: bool) -> None:
        """Out of memory, without a write. Whatever the body does from here on is thrown away (R7)."""
        if self.gone:
            return
        self.gone = True
        self._trace_end("fenced" if lost_ownership else "dropped")
        self._silence(lost_ownership=lost_ownership)
        self._hold_slot(False)

    def evict(self) -> None:
        """A resting run leaves memory for good: the next life is a replay."""
        self.rest = None
        self._silence(lost_ownership=False)

    @property
    def wakeable(self) -> bool:
        """Whether the frozen body is still good for anything."""
        return self.rest is not None and self._ending is None

    def _silence(self, *, lost_ownership: bool) -> None:
        """End the body and its steps; nothing they do from here on is looked at (R7)."""
        self._look_no_more()
        for key in list(self.steps):
            step = self._step_over(key)
            if step is not None:
                step.stop(lost_ownership=lost_ownership)
        if self.body is not None:
            for name in self.body.unwind():
                log.warning("run.still-running", run_id=self.run.run_id, task=name)

    def hold(self, reason: Reason, event: RunEvent) -> None:
        """Suspend without entering the body (crash loop)."""
        self._events.append(event)
        self._send(hold_of(reason, self.seen))

    def fail(self, error: BaseException) -> None:
        """End as failed without entering the body (a payload that does not decode)."""
        self._send(failure_of(error, parent_id=self.run.parent_id))

    @property
    def running_steps(self) -> Sequence[str]:
        return list(self.steps)

    # -- BodyPort
    def recorded(self, entry: Entry, message_id: str | None) -> None:
        self._entries.append(entry)
        if entry.seq == LONG_HISTORY:
            text = f"{entry.seq:,} entries: each replay reads them all; let a new run go on instead"
            log.warning("run.long-history", run_id=self.run.run_id, entries=entry.seq)
            self._events.append(RunEvent("long-history", self.around.now(), text))
        if message_id is not None:
            self._consumed.append((message_id, entry.seq))

    def event(self, event: RunEvent) -> None:
        self._events.append(event)

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        self._hold_slot(True)
        began = self._began.get(key)
        if self.around.start_lines is not None:
            self.around.start_lines.started(self.run.run_id, key, attempt)
        self.steps[key] = self.around.executor.start(self, key, call, attempt, context, began)

    def abandon_step(self, key: str) -> None:
        step = self._step_over(key)
        if step is not None:
            step.stop(lost_ownership=False)

    def _step_over(self, key: str) -> RunningStep | None:
        if self.around.start_lines is not None:
            self.around.start_lines.ended(self.run.run_id, key)
        return self.steps.pop(key, None)

    def want_mail(self) -> None:
        if not self.gone:
            self.around.want_mail(self)

    def quiescent(self) -> None:
        self._quiet_since = None
        self._advance()

    def ended(self, ending: Ending) -> None:
        self._ending = ending
        if ending.kind == "returned" and is_heavy(ending.value):
            self._encoding = self.around.host.create_task(
                self._encode_apart(ending.value), name=f"result of {self.run.run_id}"
            )
        for key in list(self.steps):
            self.abandon_step(key)
        for warning in ending.warnings:
            log.warning("run.left-pending", run_id=self.run.run_id, what=warning)
            self._events.append(RunEvent("left-pending", self.around.now(), warning))
        self._advance()

    async def _encode_apart(self, value: object) -> None:
        """A large result is encoded in a thread: on the loop it would keep everybody waiting."""
        definition, limit = self._definition, self.around.result_limit
        assert definition is not None
        try:
            self._encoded = await self.around.executor.in_thread(
                lambda: definition.encode_result(value, limit=limit), "the result"
            )
        except BaseException as error:  # no fit: the run fails, visibly (R7)
            self._encoded = error
        self._encoding = None
        self._advance()

    # -- steps report here
    def step_done(
        self, key: str, attempt: int, output: str | None, error: str | None, started_at: float
    ) -> None:
        self._step_over(key)
        if not self.gone and self.body is not None:
            self.body.step_done(
                key, attempt=attempt, output=output, error=error, started_at=started_at
            )

    def attempt_failed(
        self, key: str, attempt: int, error: str, retry_at: float, began_at: float
    ) -> None:
        self._step_over(key)
        self._began[key] = began_at
        if not self.gone and self.body is not None:
            self.body.attempt_failed(
                key, attempt=attempt, error=error, retry_at=retry_at, began_at=began_at
            )

    # -- the gate
    def _advance(self) -> None:
        """Send what is due to be written, if nothing is under way. Not while the mail of a waking run is being read:
        its body has not heard what woke it, and a park would say that it had."""
        if self.gone or self._flight is not None or self.body is None or self._waking:
            return
        fitting = self._fitting()
        if fitting < len(self._entries):
            self._send(None, fitting)
        elif self._ending is not None and self._encoding is None:
            self._send(self._final(self._ending))
        elif (park := self._park()) is not None:
            self.body.freeze()
            self._send(park)
        elif self._entries:
            self._send(None)
        else:
            self._hold_slot(bool(self.steps) or self.body.idle() is None)

    def _fitting(self) -> int:
        """How many of the waiting entries the next write takes, one at least. Many large ones in one statement would
        outlast its deadline at every try, and keep the runs behind them waiting."""
        if len(self._entries) < 2:  # nearly always
            return len(self._entries)
        room = PART_BYTES
        for count, entry in enumerate(self._entries):
            room -= entry_bytes(entry)
            if room < 0 and count > 0:
                return count
        return len(self._entries)

    def _hold_slot(self, wanted: bool) -> None:
        """A slot is held by a turn, a running step or a write, never by a wait."""
        if wanted and not self._slotted:
            self._slotted = True
            self.around.slots.take()
        elif not wanted and self._slotted:
            self._slotted = False
            self.around.slots.give_back()

    def _park(self) -> Park | None:
        assert self.body is not None
        if self.steps or self._mail_is_stale:  # at nearly every step
            return None
        idle = self.body.idle()
        if idle is None:
            return None
        if self._suspends:
            return self._held() if self._may_park_again() else None
        now = self.around.now()
        if self._quiet_since is None:
            self._quiet_since = now
        decision = park_decision(
            idle,
            now=now,
            quiet_since=self._quiet_since,
            park_after=self.around.park_after,
            leaving=self.leaving,
        )
        if isinstance(decision, LookAgain):
            self._schedule_look(decision.at)
            return None
        if decision is None:
            return None
        if not self._may_park_again():
            return None
        return Park(decision.wake_at, self.seen, decision.reason)

    def _may_park_again(self) -> bool:
        """Not right after a refusal without news."""
        if self._refusals and self.around.now() < self._park_at:
            self._schedule_look(self._park_at)
            return False
        return True

    def _schedule_look(self, at: float) -> None:
        self._look_no_more()
        delay = max(0.0, at - self.around.now())
        self._look_again = self.around.host.call_later(delay, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._advance()

    def _look_no_more(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None

    def _final(self, ending: Ending) -> Finish | Park:
        assert self.body is not None
        assert self._definition is not None
        if ending.kind == "nondeterminism":
            self._entries.clear()
            self._consumed.clear()
            text = str(ending.error)
            log.error("run.nondeterminism", run_id=self.run.run_id, error=text)
            self._events.append(RunEvent("nondeterminism-suspected", self.around.now(), text))
            return hold_of(Reason.NONDETERMINISM, self.seen)
        result: str | None = None
        if ending.kind == "returned":
            try:
                result = self._result_text(self._definition, ending.value)
            except BaseException as error:  # no fit: the run fails, visibly (R7)
                return failure_of(error, parent_id=self.run.parent_id)
        return finish_of(
            ending,
            result=result,
            cancelled=self.body.cancelled,
            reason=self._cancel_reason,
            parent_id=self.run.parent_id,
        )

    def _result_text(self, definition: WorkflowDefinition[Any, Any], value: object) -> str:
        if isinstance(self._encoded, BaseException):
            raise self._encoded
        if self._encoded is not None:
            return self._encoded
        return definition.encode_result(value, limit=self.around.result_limit)

    def _send(self, outcome: Park | Finish | None, count: int | None = None) -> None:
        """Send what has gathered; ``count``: only so many of the entries, the rest follows."""
        entries, consumed = self._entries, self._consumed
        rest: list[Entry] = []
        later: list[tuple[str, int]] = []
        if count is not None:
            entries, rest = entries[:count], entries[count:]
            later = [pair for pair in consumed if pair[1] >= rest[0].seq]
            consumed = [pair for pair in consumed if pair[1] < rest[0].seq]
        write = RunWrite(
            self.run.run_id,
            self.run.claim_id,
            self._revision,
            entries,
            consumed,
            self._events,
            outcome,
        )
        self._entries, self._consumed, self._events = rest, later, []
        self._poked = False
        self._flight = write
        self.around.submit(write, self._answered)

    def _answered(self, answer: Answer, batch_id: int) -> None:
        write, self._flight = self._flight, None
        if self.gone or write is None:
            return
        if isinstance(answer, DataRefused):
            self._refused(answer)
        elif answer is Verdict.COMMITTED or answer is Verdict.PARK_REFUSED:
            self._committed(write, refused=answer is Verdict.PARK_REFUSED)
        elif answer is Verdict.PARKED:
            assert isinstance(write.outcome, Park)
            self.around.telemetry.tally.parked += 1
            self._parked(write, write.outcome, batch_id)
        else:
            lost = answer is Verdict.FENCED
            if lost:
                self.around.telemetry.tally.fenced += 1
            else:
                self.around.telemetry.tally.reloaded += 1
            log.warning("run.fenced" if lost else "run.reload", run_id=self.run.run_id)
            self.drop(lost_ownership=lost)
            self.around.gone(self, Departure(reload=answer is Verdict.RELOAD))

    def _parked(self, write: RunWrite, park: Park, batch_id: int) -> None:
        departure = Departure(park=park, poked=self._poked)
        if park.reason.hold or self.leaving or self.body is None:
            self._depart(departure)
            return
        self._count(write)
        self._trace_end(f"parked: {park.reason}")
        self.gone = True
        self.rest = Rest(batch_id, write.revision + 1, self._next_seq)
        self._look_no_more()
        if write.entries:  # what they led to may start after the wake (R4)
            self.body.committed(write.entries[-1].seq)
        self.body.rest()
        self._hold_slot(False)
        self.around.gone(self, departure)

    def _count(self, write: RunWrite) -> None:
        """The write's entries are part of the journal now."""
        self._next_seq += len(write.entries)
        for entry in write.entries:
            self.bytes += entry_bytes(entry)

    def _committed(self, write: RunWrite, *, refused: bool) -> None:
        if isinstance(write.outcome, Finish):
            self._depart(Departure(finish=write.outcome))
            return
        self._revision += 1
        self._count(write)
        if self.body is None:
            if (
                refused
            ):  # the operator may have thought better: claim it anew, and read its mailbox anew
                self.drop(lost_ownership=False)
                self.around.gone(self, Departure(reload=True))
            return
        if write.entries:
            self.body.committed(write.entries[-1].seq)
            if self.suspect:
                self.suspect = False
                self.around.cleared(self)
        if isinstance(write.outcome, Park):
            assert refused, "a park that was not refused has left"
            self.around.telemetry.tally.parks_refused += 1
            self._mail_is_stale = True
            self._park_at = self.around.now() + Backoff.delay(self._refusals, 0.5)
            self._refusals += 1
            self.body.thaw()
            self.around.want_mail(self)
        self._advance()

    def _trace_end(self, outcome: str, error: str | None = None) -> None:
        span, self.span = self.span, None
        if span is not None:
            self.around.telemetry.left(span, outcome, error)

    def _depart(self, departure: Departure) -> None:
        if departure.finish is not None:
            self._trace_end(departure.finish.status, failure_summary(departure.finish.error))
        elif departure.park is not None:
            self._trace_end(f"parked: {departure.park.reason}")
        self.drop(lost_ownership=False)
        self.around.gone(self, departure)

    def _refused(self, error: DataRefused) -> None:
        """The database refuses this run's data: the run fails with that reason, its neighbours have committed (R8). If
        it refuses that as well it is put on hold, which touches neither its cold row nor, the second time, its
        events."""
        self._silence(lost_ownership=False)
        self._entries, self._consumed, self._events = [], [], []
        self._data_refused += 1
        if self._data_refused == 1:
            self._send(failure_of(error, parent_id=self.run.parent_id))
            return
        text = str(error)
        log.error("run.unstorable", run_id=self.run.run_id, error=text)
        if self._data_refused == 2:
            self._events.append(RunEvent("run-unstorable", self.around.now(), text))
        if self._data_refused <= 3:
            self._send(hold_of(Reason.FAILURE, self.seen))
        else:
            self._depart(Departure())
