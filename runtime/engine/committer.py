"""The committer: every durable write of a held run goes through here, many runs sharing one transaction.

It knows nothing of bodies. A submission ends in exactly one verdict, given to its callback on the loop; what may be
sent again is sent again here, out of sight of the body (R1, R8, R9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from perdure.runtime.engine.group import BATCH_BYTES, GroupCommit
from perdure.runtime.engine.pacing import Backoff
from perdure.runtime.telemetry import Telemetry
from perdure.storage.clock import Randomness
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    RunnerDeclaredDead,
    StorageError,
    UnknownOutcome,
)
from perdure.storage.interface import RunStore
from perdure.storage.model import Entry, Finish, RunWrite, Verdict

log = structlog.get_logger("perdure.committer")

Answer = Verdict | DataRefused
Done = Callable[[Answer, int], None]
"""Gets what became of a write, and the batch that carried it."""
ENTRY_OVERHEAD = 200
LARGE = 64 * 1024
"""Bytes of a write that goes through the lane of the large ones."""
ALONE = BATCH_BYTES + 1
"""What a write counts as that failed alone: it leaves the small ones' lane, and nothing is sent with it. It is tried
again less often the longer that takes, so that there is room for the large ones between."""
LANES = 1
"""For small writes. Two make smaller batches: a fifth fewer steps a second with 50 runs at work, a seventh more with
500."""
IN_STEP = 16
"""Members of a batch from which on its runs are answered in two halves if none else is waiting."""
GOING_ON = 0.0001
"""Seconds of this loop that a run needs from a verdict to its next write, as measured. A batch that took less than all
of its runs need means a server that would be idle."""
TURNS = 8
"""Of the loop, in which a body that is told goes on through a step of no length to its next write."""


@dataclass(slots=True)
class Submission:
    """A run's write on its way. ``tries``: how often it was set aside."""

    write: RunWrite
    done: Done
    bytes: int
    tries: int = 0


Lane = GroupCommit[Submission]


def entry_bytes(entry: Entry) -> int:
    """Roughly what an entry weighs on the wire."""
    total = ENTRY_OVERHEAD
    if entry.input:
        total += len(entry.input)
    if entry.output:
        total += len(entry.output)
    if entry.error:
        total += len(entry.error)
    return total


def write_bytes(write: RunWrite) -> int:
    """Roughly what a write weighs on the wire."""
    total = ENTRY_OVERHEAD
    for entry in write.entries:
        total += entry_bytes(entry)
    if isinstance(write.outcome, Finish):
        total += len(write.outcome.result or "") + len(write.outcome.error or "")
    return total


class Committer:
    """The group commits of one runner, in lanes: a batch of one lane does not wait for that of another.

    A large write has a lane of its own, so that small ones are not behind it; the others are spread by run. A run has
    one write under way at most, so no order depends on lanes. lanes: for small writes.
    may_write: awaited before each batch; returns while the runner's lease is trusted, so that a runner that lost the
    database waits here instead of sending what the fence would refuse.
    declared_dead: called once when the store says so; nothing is sent afterwards.
    """

    def __init__(
        self,
        store: RunStore,
        runner_id: int,
        randomness: Randomness,
        *,
        may_write: Callable[[], Awaitable[None]],
        declared_dead: Callable[[], None],
        telemetry: Telemetry | None = None,
        lanes: int = LANES,
    ) -> None:
        self._store = store
        self._telemetry = telemetry or Telemetry()
        self._runner_id = runner_id
        self._randomness = randomness
        self._may_write = may_write
        self._declared_dead = declared_dead
        self._dead = False
        self._delayed: set[asyncio.TimerHandle] = set()
        self._large = self._lane()
        self._small = [self._lane() for _ in range(lanes)]

    def _lane(self) -> Lane:
        async def flush(batch: list[Submission]) -> None:
            await self._flush(batch, lane)

        lane: Lane = GroupCommit(flush, size=lambda submission: submission.bytes)
        return lane

    def submit(self, write: RunWrite, done: Done) -> None:
        """``done`` gets COMMITTED, PARKED, PARK_REFUSED, RELOAD, FENCED or the `DataRefused` of this write alone."""
        self._add(Submission(write, done, write_bytes(write)))

    def _add(self, submission: Submission) -> None:
        if submission.bytes > LARGE:
            self._large.add(submission)
        else:
            self._small[hash(submission.write.run_id) % len(self._small)].add(submission)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as lanes:
                lanes.create_task(self._large.run(), name="commits of large writes")
                for lane in self._small:
                    lanes.create_task(lane.run(), name="commits")
        finally:
            for handle in self._delayed:
                handle.cancel()

    async def _flush(self, batch: list[Submission], lane: Lane) -> None:
        if self._dead:
            return
        batch_id = self._randomness.bits63()
        writes = [s.write for s in batch]
        backoff = Backoff(self._randomness)
        loop = asyncio.get_running_loop()
        while True:
            await self._may_write()
            began, sent = loop.time(), self._telemetry.now()
            try:
                verdicts = await self._store.commit_writes(self._runner_id, batch_id, writes)
            except UnknownOutcome as error:
                self._telemetry.tally.unknown += 1
                log.warning("commit.unknown", runs=len(batch), error=str(error))
                verdicts = await self._settle(batch_id, writes)
            except DatabaseUnavailable as error:
                log.warning("commit.unavailable", runs=len(batch), error=str(error))
                await backoff.wait()
                continue
            except (DataRefused, ConflictError) as error:
                await self._isolate(batch, batch_id, error, lane, loop.time() - began)
                return
            except RunnerDeclaredDead:
                self._die()
                return
            kind = "large" if batch[0].bytes > LARGE else "small"
            self._telemetry.committed(sent, len(batch), kind)
            idle = loop.time() - began < len(batch) * GOING_ON
            self._answer_in_turn(batch, batch_id, verdicts, lane, idle=idle)
            return

    async def _settle(self, batch_id: int, writes: Sequence[RunWrite]) -> Mapping[str, Verdict]:
        backoff = Backoff(self._randomness)
        while True:
            try:
                return await self._store.settle_writes(self._runner_id, batch_id, writes)
            except RunnerDeclaredDead:
                self._die()
                return {}
            except StorageError as error:
                log.warning("commit.unsettled", runs=len(writes), error=str(error))
                await backoff.wait()

    async def _isolate(
        self,
        batch: list[Submission],
        batch_id: int,
        error: DataRefused | ConflictError,
        lane: Lane,
        seconds: float,
    ) -> None:
        """Halve until the culprit is alone: a row that cannot be stored hurts nobody else (R8), nor does one that
        somebody has locked, and what is too much for one statement's deadline is done in parts. seconds: it took."""
        if isinstance(error, ConflictError):
            log.warning("commit.unavailable", runs=len(batch), error=str(error))
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._flush(batch[:middle], lane)
            await self._flush(batch[middle:], lane)
        elif isinstance(error, ConflictError):
            batch[0].bytes = ALONE
            self._set_aside(batch[0], longest=seconds)
        else:
            log.error("commit.refused", run_id=batch[0].write.run_id, error=str(error))
            batch[0].done(error, batch_id)

    def _answer_in_turn(
        self,
        batch: list[Submission],
        batch_id: int,
        verdicts: Mapping[str, Verdict],
        lane: Lane,
        *,
        idle: bool,
    ) -> None:
        """Keep the server and this loop at work at once. What waits leaves before the runs of this batch go on. If
        nothing waits, all runs are in step, and each waits for the server and then the server for all of them: unless
        the server is the slower one, half of them get a head start."""
        if lane.waiting:
            _after_turns(2, self._answer, batch, batch_id, verdicts)
        elif len(batch) < IN_STEP or not idle:
            self._answer(batch, batch_id, verdicts)
        else:
            middle = len(batch) // 2
            self._answer(batch[:middle], batch_id, verdicts)
            _after_turns(TURNS, self._answer, batch[middle:], batch_id, verdicts)

    def _answer(
        self, batch: list[Submission], batch_id: int, verdicts: Mapping[str, Verdict]
    ) -> None:
        for submission in batch:
            verdict = verdicts.get(submission.write.run_id)
            if verdict is None:
                continue  # declared dead while settling: nobody is told anything any more
            if verdict is Verdict.AGAIN:
                self._set_aside(submission)
            else:
                submission.done(verdict, batch_id)

    def _set_aside(self, submission: Submission, *, longest: float = 0.0) -> None:
        """Somebody holds one of its rows: the others have committed, this one is sent again a little later. longest: of
        the delay, in seconds, if that is above the usual."""
        self._telemetry.tally.set_aside += 1
        delay = Backoff.delay(submission.tries, self._randomness.fraction(), longest)
        submission.tries += 1
        loop = asyncio.get_running_loop()

        def again() -> None:
            self._delayed.discard(handle)
            self._add(submission)

        handle = loop.call_later(delay, again)
        self._delayed.add(handle)

    def _die(self) -> None:
        if not self._dead:
            self._dead = True
            self._declared_dead()


def _after_turns(turns: int, callback: Callable[..., None], *args: object) -> None:
    """Call it when the loop has gone round so many times: at once if nobody has anything to do."""
    if turns:
        asyncio.get_running_loop().call_soon(_after_turns, turns - 1, callback, *args)
    else:
        callback(*args)
