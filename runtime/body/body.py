"""One run's body: a pure function of its journal (R14).

Live and replay are one code path. The loop turns until it is quiescent; then exactly one entry is delivered, the
next recorded one or, once the journal is used up, one made of what has arrived; then the loop turns again. A call
of a step only registers. Steps start, and the mailbox is looked at, when the journal is used up and nothing more
can be delivered: a call without an entry may be abandoned by a later entry.

What may be delivered live, in this order: messages sent before the first due timer, that timer, other wanted
messages, results of steps. A result is delivered from its recorded text, exactly as a replay will do it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from perdure.runtime.body.errors import JournalMismatch, NoBody, RefusedInBody, where_now
from perdure.runtime.body.loop import END_OF_TIME, RunLoop, Timer, log
from perdure.runtime.body.mail import Mail, OpenWait, Wanted
from perdure.runtime.body.mismatch import ended_early, not_awaited, other_input
from perdure.runtime.body.outcome import raise_in, resolve, time_out, wake
from perdure.runtime.body.port import BodyPort, Ending, Idle, MessageWait, StepCall
from perdure.runtime.body.steps import Arrival, Steps, StepWait
from perdure.runtime.body.unwinding import Forever, left_behind, position
from perdure.storage.clock import to_instant, to_micros
from perdure.storage.model import Entry, EntryKind, Message, Reason, RunEvent

CANCEL_TEXT = "the run was cancelled"

_LONGEST_ALARM = 3600.0
_SLICES_UNTIL_WARNING = 2000
_REPLAY_SHARE = 5  # a wake takes several turns of the host's loop, and each may come after a slice


class Body:
    """One life of one run's body, driven from plain callbacks of ``host``.

    main: makes the body's coroutine, called at the first turn. entered_at: run time of the start, the same in each
    life. journal: the entries so far, all durable. clock: database time as best known, Unix seconds. name: the
    run's id, for messages. slice_seconds: how long one turn may hold the host's loop (a replay: a fifth of it);
    ``math.inf``: until quiescent.

    Not thread-safe: everything is called in the host's thread.
    """

    def __init__(
        self,
        *,
        host: asyncio.AbstractEventLoop,
        main: Callable[[Body], Coroutine[Any, Any, Any]],
        entered_at: float,
        journal: Sequence[Entry],
        clock: Callable[[], float],
        port: BodyPort,
        name: str,
        slice_seconds: float = 0.005,
    ) -> None:
        self._host = host
        self._main_function: Callable[[Body], Coroutine[Any, Any, Any]] | None = main
        self._clock = clock
        self._port = port
        self._name = name
        self._slice = slice_seconds
        # The "abstract" methods are those it refuses; they are added to the class after it is made.
        self._loop = RunLoop(  # type: ignore[abstract]
            name=name, now=entered_at, foreign_wake=self._foreign_wake
        )
        self._main: asyncio.Task[Any] | None = None

        self._journal: Sequence[Entry] = journal
        self._position = 0
        self.replaying = self._loop.replaying = bool(journal)
        """True until the journal is used up and the body has reacted to all of it."""
        self._last_seq = journal[-1].seq if journal else 0
        self._last_at = journal[-1].at if journal else entered_at
        self.cancelled = False
        """The cancel has been delivered."""
        self._cancel_known = any(entry.kind is EntryKind.CANCEL for entry in journal)

        self._steps = Steps(port, durable=self._last_seq)
        self._not_awaited: dict[int, StepCall] = {}
        self._arrivals: deque[Arrival] = deque()
        self._mail = Mail()
        self._mail_due: float | None = None
        """A timer is due at this time and needs the mailbox as of then."""
        self._mail_asked_due: float | None = None
        self._mail_asked = False
        self._announce: list[Timer | OpenWait] = []

        # Turns run in this Context, not in that of whoever caused them (a step's task, a database answer).
        self._home = contextvars.copy_context()
        self._begun = False
        self._kicked = False
        self._frozen = False
        self._dead = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._spun = 0
        """Slices since it last waited, in those of a replay."""
        self._spinning_known = False

    # -- driven by the engine
    def begin(self) -> None:
        """Enter the body at the host's next turn."""
        self._begun = True
        self.kick()

    def kick(self) -> None:
        """Turn soon: something may have become deliverable."""
        if not self._kicked and not self._dead and self._begun:
            self._kicked = True
            self._host.call_soon(self._go, context=self._home)

    def clock_moved(self) -> None:
        """The clock was set: the alarm rings at the wrong moment, and so does a second question for mail."""
        self._silence_alarm()
        if self._mail_due is not None and self._mail_asked:
            self._ask_again()
        self.kick()

    def step_done(
        self, key: str, *, attempt: int, output: str | None, error: str | None, started_at: float
    ) -> None:
        """A step has ended; ``error`` None means well. The body hears of it in its turn."""
        self._arrive(Arrival(key, attempt, output, error, started_at, None))

    def attempt_failed(
        self,
        key: str,
        *,
        attempt: int,
        error: str,
        retry_at: float,
        began_at: float | None = None,
    ) -> None:
        """An attempt has failed; the next one starts not before ``retry_at`` (database time), also in a later life.

        began_at: when the first attempt began, kept as the entry's ``started_at``: retry budgets count from there."""
        self._arrive(Arrival(key, attempt, None, error, began_at, retry_at))

    def _arrive(self, arrival: Arrival) -> None:
        if self._dead:
            return
        if arrival.key not in self._steps.waits and arrival.key not in self._steps.gone:
            raise LookupError(
                f"run {self._name}: a result came for step {arrival.key}, which is not running"
            )
        self._arrivals.append(arrival)
        self.kick()

    def mail(self, messages: Sequence[Message], read_at: float) -> None:
        """The unread mailbox as just read, in mailbox order, and the database's clock at the read."""
        if self._dead:
            return
        self._mail_asked = False
        self._mail.replace(messages, read_at)
        self.kick()

    def committed(self, seq: int) -> None:
        """The entries up to ``seq`` are durable; steps that waited for them start (R4)."""
        if seq > self._steps.durable and not self._dead:
            self._steps.durable = seq
            self._steps.release()

    def freeze(self) -> None:
        """Deliver nothing until `thaw`: a park is being committed."""
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False
        self.kick()

    def rest(self) -> None:
        """The park is committed. Frozen, it may stay in memory: nothing of the host's points to it any more."""
        self._silence_alarm()

    def wake(self) -> None:
        """The rest is over; `thaw` follows. What was known of the mailbox is old: it is read anew, or known empty."""
        self._mail_asked = False
        self._mail_asked_due = self._mail_due = None
        self._mail.replace((), -math.inf)

    def hold_starts(self, on: bool) -> None:
        """Start no more steps: the shard is being handed over. `idle` then reports ``pending_starts``."""
        self._steps.held_back = on
        if not self._dead:
            self._steps.release()

    def idle(self) -> Idle | None:
        """What a quiescent body waits for; None while it is busy or its entries are not durable yet."""
        if self._dead or self._kicked or self.replaying or not self._begun or self._main is None:
            return None
        steps = self._steps
        if steps.running or self._arrivals or self._mail_due is not None or steps.called:
            return None
        if steps.ready and not steps.held_back:
            return None
        timer = self._loop.first_timer()
        retry = steps.first_retry()
        due = timer.due if timer is not None else math.inf
        wake_at = min(due, retry)
        never = wake_at == math.inf
        pending = bool(steps.ready)
        waits = bool(self._mail.waits)
        reason = Reason.SIGNAL
        if not waits and (pending or not never):
            reason = Reason.TIMER if due <= retry and not pending else Reason.RETRY
        return Idle(
            wake_at=None if never else wake_at,
            untimed=waits or (never and not pending),
            reason=reason,
            pending_starts=pending,
            stuck=never and not waits and not pending and not self._loop.timers,
        )

    def unwind(self) -> list[str]:
        """Out of memory (R7): nothing the body does from here on is looked at, its context is dead for ever.

        Returns the names of tasks that do not end. The engine stops the steps that run. May be called twice.
        """
        if self._dead:
            return []
        self._dead = True
        self._silence_alarm()
        left = self._loop.unwind()
        self._main = self._main_function = None
        self._journal = ()
        self._steps.clear()
        self._not_awaited.clear()
        self._arrivals.clear()
        self._announce.clear()
        self._mail.clear()
        return left

    def stuck_at(self) -> list[str]:
        """Each pending task and the line of its own code where it waits, for people."""
        return [
            f"{task.get_name()} at {position(task.get_coro())}"
            for task in self._loop.pending_tasks()
        ]

    # -- turning
    def _go(self) -> None:
        self._kicked = False
        if self._dead or self._frozen:
            return
        try:
            length = self._slice / _REPLAY_SHARE if self.replaying else self._slice
            self._go_on(self._run_slice(time.perf_counter() + length))
        except JournalMismatch as error:
            self._end(Ending("nondeterminism", error=error))
        except NoBody as error:
            self._end(Ending("raised", error=error.__cause__))
        except (RecursionError, MemoryError) as error:  # a cancel through too many nested gathers
            log.exception("run %s: its body cannot be driven any further", self._name)
            self._fail(error)

    def _go_on(self, quiescent: bool) -> None:
        """After a slice of the body's turn."""
        for key in self._steps.dropped:
            self._port.abandon_step(key)
        self._steps.dropped.clear()
        assert self._main is not None
        if self._main.done():
            self._finish(self._main)
        elif quiescent:
            self._settle()
        elif self._spinning() and (cancel := self._mail.cancel) is not None:
            self._cut_off(cancel)
        else:
            self.kick()

    def _run_slice(self, end: float) -> bool:
        """Turn and deliver until nothing is deliverable (True) or the slice is over (False)."""
        loop = self._loop
        before = loop.enter()
        try:
            if self._main is None:
                self._main = self._make_main()
            while loop.turn(end):
                self._spun = 0  # it waits: it may be told of something, be it the next entry of a long replay
                if self._main.done() or not self._deliver():
                    return True
                if time.perf_counter() > end:
                    return False
            return False
        finally:
            loop.leave(before)

    def _make_main(self) -> asyncio.Task[Any]:
        assert self._main_function is not None
        try:
            return self._loop.create_task(self._main_function(self), name="body")
        except BaseException as error:  # it has no coroutine: the body's failure, not the host's
            raise NoBody from error

    def _settle(self) -> None:
        """The journal is used up and nothing is deliverable: now the outside may move."""
        for waiting in self._announce:
            self._port_event(waiting)
        self._announce.clear()
        self._steps.settle(self._clock)
        self._set_alarm()
        if self._mail_due is not None and not self._mail_asked:
            self._ask_mail(self._mail_due)
        self._port.quiescent()

    def _spinning(self) -> bool:
        self._spun += 1 if self.replaying else _REPLAY_SHARE
        if self._spun < _SLICES_UNTIL_WARNING * _REPLAY_SHARE:
            return False
        if not self._spinning_known:
            self._spinning_known = True
            log.warning(
                "run %s keeps turning without waiting for anything; run time stands still meanwhile. Tasks: %s",
                self._name,
                self.stuck_at(),
            )
        return True

    def _cut_off(self, cancel: Message) -> None:
        """It will never be told of its cancel, since that takes a moment at which it waits: it ends without a word."""
        at = self.stuck_at()
        self._port.recorded(
            Entry(
                self._next_seq(),
                EntryKind.CANCEL,
                "",
                self._next_at(cancel.sent_at),
                output=cancel.body,
            ),
            cancel.message_id,
        )
        self.cancelled = True
        warning = f"it never waits for anything, so it ends without clean-up: {', '.join(at)}"
        self._end(Ending("cancelled", warnings=(warning,)))

    def _finish(self, main: asyncio.Task[Any]) -> None:
        for entry in itertools.islice(self._journal, self._position, None):
            if entry.key not in self._steps.gone:
                self._end(Ending("nondeterminism", error=JournalMismatch(ended_early(entry))))
                return
        if main.cancelled():
            if self.cancelled:
                self._end(Ending("cancelled", warnings=self._left_behind()))
            else:
                error = asyncio.CancelledError(
                    "the body raised CancelledError; nobody cancelled the run"
                )
                self._end(Ending("raised", error=error, warnings=self._left_behind()))
            return
        failure = main.exception()
        value = None if failure is not None else main.result()
        kind: Any = "raised" if failure is not None else "returned"
        self._end(Ending(kind, value=value, error=failure, warnings=self._left_behind()))

    def _left_behind(self) -> tuple[str, ...]:
        tasks = self._loop.pending_tasks()
        return left_behind(self._not_awaited.values(), self._steps.waits, tasks)

    def _end(self, ending: Ending) -> None:
        running = [key for key, wait in self._steps.waits.items() if wait.running]
        for name in self.unwind():
            log.warning("run %s: task %s does not end", self._name, name)
        for key in running:
            self._port.abandon_step(key)
        self._port.ended(ending)

    def _foreign_wake(self, error: Exception) -> None:
        """In another thread: the run cannot be replayed any more."""
        self._host.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self._dead:
            self._end(Ending("raised", error=error))

    # -- delivery
    def _deliver(self) -> bool:
        """Exactly the next entry. False: there is none now."""
        if self._position < len(self._journal):
            entry = self._journal[self._position]
            self._position += 1
            self._apply(entry)
            return True
        if self.replaying:
            self.replaying = self._loop.replaying = False
            self._journal = ()
            self._position = 0
        return self._deliver_live()

    def _deliver_live(self) -> bool:
        self._mail_due = None
        wanted = self._mail.wanted(cancelled=self._cancel_known) if self._mail.unread else None
        timer = self._loop.first_timer()
        if timer is not None:
            now = max(self._clock(), self._loop.now)
            if wanted is not None:
                now = max(now, wanted.message.sent_at)
            if timer.due <= now:
                wanted = self._mail.wanted(by=timer.due, cancelled=self._cancel_known)
                if wanted is None:
                    return self._fire(timer, now)
        if wanted is not None:
            self._take(wanted)
        elif self._arrivals:
            self._land(self._arrivals.popleft())
        else:
            return False
        return True

    def _fire(self, timer: Timer, now: float) -> bool:
        """The timer's entry, unless a message that was sent before it might still be unread."""
        if self._mail.waits and self._mail.read_at < timer.due:
            self._mail_due = timer.due
            return False
        self._record(
            Entry(
                self._next_seq(),
                EntryKind.TIMER,
                timer.key,
                self._next_at(now),
                input=timer.name,
                output=str(to_micros(timer.due)),
                started_at=timer.set_at,
            )
        )
        return True

    def _take(self, wanted: Wanted) -> None:
        message = wanted.message
        self._mail.take(message)
        kind, key = EntryKind.CANCEL, ""
        if wanted.by is not None:
            kind, key = EntryKind.SIGNAL, wanted.by.key
        at = self._next_at(message.sent_at)
        entry = Entry(self._next_seq(), kind, key, at, output=message.body)
        self._record(entry, message.message_id)

    def _land(self, arrival: Arrival) -> None:
        key, attempt, output, error, started_at, retry_at = arrival
        wait = self._steps.waits.get(key)
        call = wait.call if wait is not None else self._steps.gone[key]
        kind, text = EntryKind.STEP, call.input_text
        if retry_at is not None:
            kind, text, output = EntryKind.ATTEMPT, None, str(to_micros(retry_at))
        # Positional: this is the hot path, and keywords cost half a microsecond.
        self._record(
            Entry(
                self._next_seq(),
                kind,
                key,
                self._next_at(self._clock()),
                "ok" if error is None else "error",
                attempt,
                call.input_hash,
                text,
                output,
                error,
                started_at,
            )
        )

    def _next_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq

    def _next_at(self, at: float) -> float:
        """Never lower than the entry before, nor than run time (which a late timer may have moved by its due time)."""
        self._last_at = to_instant(max(at, self._loop.now, self._last_at))
        return self._last_at

    def _record(self, entry: Entry, message_id: str | None = None) -> None:
        self._port.recorded(entry, message_id)
        self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        kind = entry.kind
        if kind is EntryKind.STEP:
            self._apply_step(entry)
        elif kind is EntryKind.TIMER:
            timer = self._loop.timers.pop(entry.key, None)
            if timer is None:
                raise JournalMismatch(not_awaited(entry, self._awaited()))
            self._loop.now = max(entry.at, timer.due)
            assert timer.callback is not None
            self._loop.call_soon(timer.callback, *timer.args, context=timer.context)
            timer.cancel()
        elif kind is EntryKind.SIGNAL:
            self._apply_signal(entry)
        elif kind is EntryKind.ATTEMPT:
            wait = self._awaited_step(entry)
            if wait is not None:
                self._steps.try_again(wait, entry)
        elif kind is EntryKind.CANCEL:
            self._loop.now = entry.at
            self.cancelled = self._cancel_known = True
            assert self._main is not None
            self._main.cancel(CANCEL_TEXT)
        else:
            raise JournalMismatch(
                f"entry {entry.seq} is of kind {kind.value!r}, which this release does not write: "
                "this run needs the release that wrote it"
            )

    def _apply_step(self, entry: Entry) -> None:
        wait = self._awaited_step(entry)
        if wait is None:  # abandoned; run time stands still
            del self._steps.gone[entry.key]
            return
        self._steps.forget(wait)
        self._loop.now = entry.at
        call = wait.call
        if entry.error is None:
            resolve(wait.future, call.decode, entry.output)
        else:
            raise_in(wait.future, call.recorded_error, entry.error)

    def _awaited_step(self, entry: Entry) -> StepWait | None:
        """Who waits for this entry; None: who did has abandoned it."""
        wait = self._steps.waits.get(entry.key)
        if wait is None:
            if entry.key in self._steps.gone:
                return None
            raise JournalMismatch(not_awaited(entry, self._awaited()))
        call = wait.call
        recorded = entry.input_hash
        if (
            recorded != call.input_hash
            and recorded is not None
            and call.input_hash is not None
            and not (call.fits is not None and call.fits(recorded))
        ):
            raise JournalMismatch(other_input(entry, call))
        return wait

    def _apply_signal(self, entry: Entry) -> None:
        opened = self._mail.waits.get(entry.key)
        if opened is None:
            raise JournalMismatch(not_awaited(entry, self._awaited()))
        self._mail.close(opened)
        self._loop.now = entry.at
        # Quiescent: the future's own waiter is the next thing to run, nothing can cancel it in between and lose
        # the message.
        resolve(opened.future, opened.wait.decode, entry.output)

    def _awaited(self) -> list[str]:
        steps = [f"step {key}" for key in self._steps.waits]
        waits = [f"signal wait {key}" for key in self._mail.waits]
        return steps + waits + [f"timer {key}" for key in self._loop.timers]

    # -- time and mail
    def _set_alarm(self) -> None:
        """One host timer for the first timer or retry. One that rings early does no harm, so it is seldom moved."""
        timer = self._loop.first_timer()
        due = min(timer.due if timer is not None else math.inf, self._steps.first_retry())
        if due >= self._alarm_at or due == math.inf or self._mail_due is not None:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = due
        delay = min(max(0.0, due - self._clock()), _LONGEST_ALARM)
        self._alarm = self._host.call_later(delay, self._ring, context=self._home)

    def _silence_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self._alarm_at = math.inf

    def _ring(self) -> None:
        self._alarm = None
        self._alarm_at = math.inf
        self.kick()

    def _ask_mail(self, due: float) -> None:
        """At once the first time; again only when the database's clock, as last read, can have reached ``due``."""
        self._mail_asked = True
        if self._mail_asked_due != due:
            self._mail_asked_due = due
            self._port.want_mail()
            return
        delay = max(0.0, due - self._mail.read_at)
        self._host.call_later(delay, self._ask_again, context=self._home)

    def _ask_again(self) -> None:
        if not self._dead:
            self._port.want_mail()

    def _port_event(self, waiting: Timer | OpenWait) -> None:
        """Tell people of a sleep or a wait that lasts."""
        if isinstance(waiting, Timer):
            if not waiting.cancelled():
                self._event("timer-set", key=waiting.key, due=waiting.due, name=waiting.name)
        elif self._mail.waits.get(waiting.key) is waiting:
            self._event(
                "signal-awaited", key=waiting.key, due=waiting.deadline, name=waiting.wait.name
            )

    def _event(self, event_type: str, *, key: str, due: float | None, name: str | None) -> None:
        detail = json.dumps({"key": key, "due": due, "name": name}, ensure_ascii=False)
        self._port.event(RunEvent(event_type, self._loop.now, detail))

    # -- for the context: what the body sees
    def now(self) -> float:
        """Run time, Unix seconds: the time of the last delivered entry, the same on replay."""
        return self._loop.now

    @property
    def silent(self) -> bool:
        """What it says now was said in an earlier life, or is thrown away with all it does while unwound (R7)."""
        return self.replaying or self._dead

    def step(self, call: StepCall) -> Coroutine[Any, Any, Any]:
        """Lazy: the step takes its key, and may start, when this is first awaited (R13)."""
        self._not_awaited[id(call)] = call
        return self._step(call)

    async def _step(self, call: StepCall) -> Any:
        self._not_awaited.pop(id(call), None)
        if self._inside(f"step {call.name!r}"):
            await Forever(self._loop)
        loop = self._loop
        key = loop.node().key(call.name)
        future: asyncio.Future[Any] = asyncio.Future(loop=loop)
        wait = StepWait(key, call, future, contextvars.copy_context(), self._last_seq)
        self._steps.add(wait)
        try:
            return await future
        finally:
            if self._steps.waits.get(key) is wait:
                self._steps.abandon(wait)

    async def wait_message(self, wait: MessageWait) -> Any:
        """The decoded body of the oldest unread message of that name. Raises TimeoutError after ``wait.timeout``.

        A message sent at the deadline or before wins, whenever it is read; with a timeout of 0 this is a look.
        """
        if self._inside(f"wait for signal {wait.name!r}"):
            await Forever(self._loop)
        loop = self._loop
        key = loop.node().key(f"signal:{wait.name}")
        opened = OpenWait(key, wait, asyncio.Future(loop=loop), None)
        timer: Timer | None = None
        if wait.timeout is not None:
            timer = loop.set_timer(loop.now + wait.timeout, time_out, (opened.future,))
            opened.deadline = timer.due if timer.due < END_OF_TIME else None
        self._mail.open(opened)
        if not self.replaying:
            self._announce.append(opened)
        try:
            return await opened.future
        finally:
            if not self._dead:
                if not self.replaying and not opened.answered and opened not in self._announce:
                    self._event("signal-abandoned", key=key, due=None, name=wait.name)
                self._mail.close(opened)
                if timer is not None:
                    timer.cancel()

    async def sleep(self, seconds: float, name: str | None = None) -> None:
        """Until ``seconds`` of run time have passed, whatever happens to the process. Zero or less: one turn."""
        await self.sleep_until(self._loop.now + seconds, name)

    async def sleep_until(self, instant: float, name: str | None = None) -> None:
        """Until run time is ``instant`` (Unix seconds). A past one does not wait."""
        if self._inside("sleep" if name is None else f"sleep {name!r}"):
            await Forever(self._loop)
        loop = self._loop
        if instant <= loop.now:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.Future(loop=loop)
        timer = loop.set_timer(instant, wake, (future,), name=name)
        if not self.replaying:
            self._announce.append(timer)
        try:
            await future
        finally:
            timer.cancel()

    def _inside(self, what: str) -> bool:
        """True: the context is dead, suspend. Raises RefusedInBody outside of a living body's own turn.

        Dead comes first: code that catches everything around a context that raises would spin for ever.
        """
        if self._dead:
            return True
        if asyncio._get_running_loop() is not self._loop:
            raise RefusedInBody(
                f"{what}: the context of run {self._name} was used outside of its workflow body "
                f"({where_now()}). Steps, sleeps and waits belong in the body: pass their values to the step function"
            )
        return False
