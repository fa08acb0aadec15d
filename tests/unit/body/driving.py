"""Driving bodies without a database: a host on virtual time, and an engine reduced to what the port asks of it.

The real engine's promises are kept here (one write in flight, a step starts when told, the mailbox is read in one
piece), with delays drawn from a seed; whatever a body must never ask for is an AssertionError at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.runtime.body import Body, Ending, StepCall
from perdure.storage.clock import from_micros
from perdure.storage.model import Entry, EntryKind, Message, MessageKind, RunEvent

EPOCH = 1_700_000_000.0
"""Virtual time begins here; far from zero, as real instants are."""

Main = Callable[[Body], Coroutine[Any, Any, Any]]


@dataclass(eq=False, slots=True)
class Callback:
    """What `VirtualHost` schedules; can be cancelled like asyncio's handles."""

    at: float
    run: Callable[[], object] | None

    def cancel(self) -> None:
        self.run = None


class VirtualHost:
    """The part of an event loop a body uses, on virtual time. Equal times run in the order they were asked for."""

    def __init__(self, now: float = EPOCH) -> None:
        self.now = now
        self._queue: list[tuple[float, int, Callback]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        return self.call_later(0.0, callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Callback:
        home = contextvars.copy_context() if context is None else context
        item = Callback(max(when, self.now), lambda: home.run(callback, *args))
        heapq.heappush(self._queue, (item.at, next(self._numbers), item))
        return item

    def run(self, *, until: Callable[[], bool], horizon: float, limit: int = 200_000) -> None:
        """Until the condition holds, nothing is scheduled, or ``horizon`` (virtual time) is reached."""
        for _ in range(limit):
            if until() or not self._queue or self._queue[0][0] > horizon:
                return
            self.now, _, item = heapq.heappop(self._queue)
            if item.run is not None:
                item.run()
        raise AssertionError(f"{limit} callbacks and no end: something spins at {self.now}")


@dataclass(slots=True)
class Work:
    """What a step does. mode: ok, fail, stubborn (ends although cancelled), flaky (a recorded attempt fails first).

    called_after: entries the body had been given when it made the call, all to be durable at its start (R4).
    """

    tag: str
    mode: str = "ok"
    seconds: float = 1.0
    called_after: int = 0


class StepFailed(Exception):
    """A step's recorded error."""


def call_of(name: str, work: Work) -> StepCall:
    """A step that returns ``r(tag)``, or raises StepFailed(tag) if it fails."""
    text = f'"{work.tag}"'
    return StepCall(name, text, _hash(text), _decode, StepFailed, work)


def _hash(text: str) -> int:
    value = 7
    for character in text:
        value = (value * 31 + ord(character)) % 2**61
    return value


def _decode(text: str | None) -> str | None:
    return text


@dataclass(frozen=True, slots=True)
class Sent:
    """A message somebody sends at virtual second ``at`` after EPOCH; kind "cancel" or a signal's name."""

    at: float
    name: str


@dataclass(slots=True)
class Timing:
    """Delays drawn from a seed; 0: none at all. slow_commits: how long writes may be under way, seconds."""

    seed: int = 0
    slice_seconds: float = float("inf")
    slow_commits: Sequence[float] = (0.0,)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step(self, work: Work) -> float:
        if not self.seed:
            return work.seconds
        return random.Random(f"{self.seed} {work.tag}").choice((0.0, 0.5, 1.0, 2.0, 3.0, 7.0))

    def commit(self) -> float:
        return self._random.choice(self.slow_commits)

    def mail(self) -> float:
        return self._random.choice((0.0, 0.0, 0.25)) if self.seed else 0.0


class Life:
    """One life of a run under a `VirtualHost`; implements the body's port.

    journal: what earlier lives made durable. now: virtual time at which this life begins. log: what the body's own
    code noted; ``marks[n]`` is its length when the body had reacted to entry n and was quiescent.
    """

    def __init__(
        self,
        main: Main,
        *,
        journal: Sequence[Entry] = (),
        consumed: dict[str, int] | None = None,
        sent: Sequence[Sent] = (),
        timing: Timing | None = None,
        now: float = EPOCH,
        entered_at: float = EPOCH,
        name: str = "run-1",
    ) -> None:
        self.host = VirtualHost(now)
        self.timing = timing or Timing()
        self.entries = list(journal)
        self.loaded = len(journal)
        self.durable = self.loaded
        self.consumed = dict(consumed or {})
        self.events: list[RunEvent] = []
        self.log: list[Any] = []
        self.marks: dict[int, int] = {}
        self.at_switch: list[Any] | None = None
        self.started: list[tuple[str, int]] = []
        self.abandoned: list[str] = []
        self.ending: Ending | None = None
        self.quiet = 0
        self._writing = False
        self._running: dict[str, tuple[Callback, StepCall, int]] = {}
        self._stored: list[Message] = []
        self.body = Body(
            host=self.host,  # type: ignore[arg-type]
            main=main,
            entered_at=entered_at,
            journal=list(journal),
            clock=self.host.time,
            port=self,
            name=name,
            slice_seconds=self.timing.slice_seconds,
        )
        for number, message in enumerate(sent, 1):
            self._plan(message, number)

    # -- what the test does
    def run(self, horizon: float = 600.0) -> Life:
        """To the body's end, or until nothing happens before ``horizon`` (virtual seconds after EPOCH)."""
        self.body.begin()
        self.host.run(until=lambda: self.ending is not None, horizon=EPOCH + horizon)
        if self.ending is None:
            self._check_idle()
            self._mark()
            self._switch()
        return self

    def _check_idle(self) -> None:
        """A body that has not ended waits for something that can still come."""
        idle = self.body.idle()
        assert idle is not None, f"busy, and nothing happens any more: {self.body.stuck_at()}"
        assert idle.wake_at is None or idle.wake_at > self.host.now, "its timer was forgotten"

    def until(self, condition: Callable[[], bool], horizon: float = 600.0) -> Life:
        self.body.begin()
        self.host.run(until=lambda: condition() or self.ending is not None, horizon=EPOCH + horizon)
        return self

    def send(self, name: str, *, body: str | None = None, at: float | None = None) -> None:
        """Store a message now (or at an earlier time, as if a hint had been slow), and have the mailbox read."""
        number = len(self._stored) + 1
        self._store(_message(name, number, self.host.now if at is None else at, body))

    def note(self, *what: Any) -> None:
        """Called by the body's code. What it does while being unwound is not looked at."""
        if not asyncio.get_running_loop().is_closed():
            self.log.append((*what, self.body.now()))

    def work(
        self, name: str, tag: str, mode: str = "ok", seconds: float = 1.0
    ) -> Coroutine[Any, Any, Any]:
        """A step call that knows how much the body had been given when it was made."""
        return self._call(name, Work(tag, mode, seconds))

    async def _call(self, name: str, work: Work) -> Any:
        work.called_after = len(self.entries) if not self.body.replaying else 0
        return await self.body.step(call_of(name, work))

    def result(self) -> Any:
        assert self.ending is not None, self.body.stuck_at()
        if self.ending.error is not None:
            raise self.ending.error
        return self.ending.value

    def keys(self) -> list[str]:
        return [entry.key for entry in self.entries]

    # -- messages
    def _plan(self, sent: Sent, number: int) -> None:
        message = _message(sent.name, number, EPOCH + sent.at)
        if message.sent_at <= self.host.now:
            self._store(message)
        else:
            self.host.call_at(message.sent_at, self._store, message)

    def _store(self, message: Message) -> None:
        self._stored.append(message)
        self.host.call_later(self.timing.mail(), self._read_mail)

    def _read_mail(self) -> None:
        unread = [m for m in self._stored if self.consumed.get(m.message_id, 10**9) > self.durable]
        self.body.mail(unread, self.host.now)

    # -- BodyPort
    def recorded(self, entry: Entry, message_id: str | None) -> None:
        assert not self.body.replaying, "recorded during replay"
        self._switch()
        self._mark()
        assert entry.seq == len(self.entries) + 1, "a seq is missing or doubled"
        assert not self.entries or entry.at >= self.entries[-1].at, "time went back"
        first = self.body._loop.first_timer()
        happened = entry.at
        if message_id is not None:
            happened = next(m.sent_at for m in self._stored if m.message_id == message_id)
        assert first is None or first.key == entry.key or first.due >= happened, (
            f"{entry} was recorded before timer {first.key}, due at {first.due}"
        )
        if message_id is not None:
            assert message_id not in self.consumed, "one message was taken twice"
            self.consumed[message_id] = entry.seq
        self.entries.append(entry)

    def event(self, event: RunEvent) -> None:
        self.events.append(event)

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        work: Work = call.target
        assert not self.body.replaying, f"step {key} started during replay"
        assert self.durable >= work.called_after, f"step {key} started before its past was durable"
        assert key not in self._running, f"step {key} runs already"
        failed = [e for e in self.entries if e.key == key and e.kind is EntryKind.ATTEMPT]
        assert attempt == len(failed) + 1, f"step {key}: attempt {attempt} after {len(failed)}"
        assert not failed or self.host.now >= from_micros(int(failed[-1].output or 0))
        self.started.append((key, attempt))
        item = self.host.call_later(self.timing.step(work), self._step_ends, key, call, attempt)
        self._running[key] = (item, call, attempt)

    def _step_ends(self, key: str, call: StepCall, attempt: int) -> None:
        self._running.pop(key, None)
        work: Work = call.target
        if work.mode == "flaky" and attempt < 3:
            self.body.attempt_failed(
                key, attempt=attempt, error="not yet", retry_at=self.host.now + attempt
            )
            return
        failed = work.mode == "fail"
        self.body.step_done(
            key,
            attempt=attempt,
            output=None if failed else f"r({work.tag})",
            error=work.tag if failed else None,
            started_at=self.host.now,
        )

    def abandon_step(self, key: str) -> None:
        self.abandoned.append(key)
        item, call, attempt = self._running.pop(key, (None, None, 0))
        if item is None or call is None:
            return
        item.cancel()
        if call.target.mode in ("stubborn", "flaky"):
            self.host.call_later(1.0, self._step_ends, key, call, attempt)

    def want_mail(self) -> None:
        self.host.call_later(self.timing.mail(), self._read_mail)

    def quiescent(self) -> None:
        self.quiet += 1
        self._switch()
        self._write()

    def ended(self, ending: Ending) -> None:
        self._switch()
        self._mark()
        self.ending = ending

    # -- the one write under way
    def _write(self) -> None:
        if not self._writing and self.durable < len(self.entries):
            self._writing = True
            self.host.call_later(self.timing.commit(), self._written, len(self.entries))

    def _written(self, seq: int) -> None:
        self._writing = False
        self.durable = seq
        self.body.committed(seq)
        self._write()

    # -- the log
    def _mark(self) -> None:
        self.marks[len(self.entries)] = len(self.log)

    def _switch(self) -> None:
        """The first sign of live work: what had the body noted by then?"""
        if self.at_switch is None:
            self.at_switch = list(self.log)


def _message(name: str, number: int, sent_at: float, body: str | None = None) -> Message:
    kind = MessageKind.CANCEL if name == "cancel" else MessageKind.SIGNAL
    text = f"m{number}" if body is None else body
    return Message("run-1", f"id-{number}", kind, name, text, wake_seq=number, sent_at=sent_at)


def replay(
    main: Main, life: Life, upto: int | None = None, *, gap: float = 0.0, **more: Any
) -> Life:
    """A next life (not yet run) from the first ``upto`` entries of ``life``; None: all of them."""
    journal = life.entries if upto is None else life.entries[:upto]
    consumed = {key: seq for key, seq in life.consumed.items() if seq <= len(journal)}
    now = (journal[-1].at if journal else EPOCH) + gap
    return Life(main, journal=journal, consumed=consumed, now=now, **more)
