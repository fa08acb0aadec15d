"""The claim loop: which shards are looked into when, and with how many slots.

Hinted shards are asked at once, due timers at their instant, everything every few seconds (the safety scan), orphans
after a take-over, when a runner has died, after a claim of unknown outcome and once a minute. One claim is under way at
a time. All but the looks for orphans begin at the low-water marks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

import structlog

from perdure.runtime.dbclock import DatabaseClock
from perdure.runtime.engine.due import DueTimes
from perdure.runtime.engine.low_water import LowWaterMarks
from perdure.runtime.engine.pacing import Backoff, Portion
from perdure.runtime.engine.slots import Slots
from perdure.runtime.engine.suspects import SuspectLane
from perdure.runtime.telemetry import Telemetry
from perdure.sharding.slots import shard_of
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError, RunnerDeclaredDead, UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import ClaimedRun, ClaimRequest, Claims, ShardHold

log = structlog.get_logger("perdure.claim")

PER_SHARD = 50
MOST_PER_CLAIM = 200
AHEAD = 0.01
"""Seconds before its instant that a due run may be taken: its body then waits the rest on the runner's own clock."""
HORIZON = 15.0
"""Seconds; parked runs due within it are noted in the heap at each scan."""
UPCOMING_LIMIT = 10_000
ORPHAN_PERIOD = 60.0


class Claimer:
    """Looks for runs to take.

    holds: the shards held now (shard_id → hold), vacating ones left out.
    in_memory: claim ids being executed. taken: gets each claimed run, on the loop.
    strays: gets the workflows of runs marked as strays. lane: how many suspects may be taken.
    scan: seconds between safety scans, ± 20 %. unknown_ends: seconds after which a statement cut off in flight has
    certainly ended (the storage deadline). lost_sight: called when something may be running under me that I do not
    know of, in shards that I may have given up since: after a lost answer, and once a minute.
    """

    def __init__(
        self,
        store: RunStore,
        runner_id: int,
        randomness: Randomness,
        *,
        shard_count: int,
        workflows: Callable[[], Sequence[str]],
        holds: Callable[[], Mapping[int, ShardHold]],
        in_memory: Callable[[], Sequence[int]],
        taken: Callable[[Sequence[ClaimedRun]], None],
        strays: Callable[[Sequence[str]], None],
        slots: Slots,
        lane: SuspectLane,
        clock: DatabaseClock,
        may_write: Callable[[], Awaitable[None]],
        declared_dead: Callable[[], None],
        scan: float,
        unknown_ends: float,
        lost_sight: Callable[[], None],
        telemetry: Telemetry | None = None,
    ) -> None:
        self._store = store
        self._runner_id = runner_id
        self._randomness = randomness
        self._shard_count = shard_count
        self._workflows = workflows
        self._holds = holds
        self._in_memory = in_memory
        self._taken = taken
        self._strays = strays
        self._slots = slots
        self._lane = lane
        self._clock = clock
        self._now = clock.now
        self._monotonic = clock.mark
        """What periods are measured by: the database's clock may be set."""
        self._may_write = may_write
        self._declared_dead = declared_dead
        self._scan = scan
        self._unknown_ends = unknown_ends
        self._lost_sight = lost_sight
        self._telemetry = telemetry or Telemetry()
        self._portion = Portion(MOST_PER_CLAIM)
        self._noted_at_once = Portion(UPCOMING_LIMIT)
        self.due = DueTimes()
        self._hinted: dict[int, None] = {}
        self._orphaned: dict[int, None] = {}
        self._gained: set[int] = set()
        self._any_gained = asyncio.Event()
        self._wanted = asyncio.Event()
        self._waiting_since: float | None = None
        self._marks = LowWaterMarks(unknown_ends)
        self._marked = LowWaterMarks(unknown_ends)
        """Of the looks that take nothing and only mark strays."""
        self._marked_at_once = Portion(shard_count)
        self._suspects_waiting = False
        self._turn = asyncio.Lock()
        self._resting = asyncio.Event()
        self._resting.set()
        self._more = False
        self._taking_orphans = False
        self._orphans_free_at = -math.inf

    # -- what asks for a claim
    def hint_slots(self, slots: Iterable[int]) -> None:
        """A run of each of these slots may be due."""
        holds = self._holds()
        for slot in slots:
            shard = shard_of(slot, self._shard_count)
            if shard in holds:
                self._hinted[shard] = None
        if self._hinted:
            self._wanted.set()
            if self._waiting_since is None:
                self._waiting_since = self._monotonic()

    def hint_all(self) -> None:
        self._hinted.update(dict.fromkeys(self._holds()))
        self._wanted.set()

    def look_for_orphans(self, shards: Iterable[int]) -> None:
        """Runs left `running` by a dead runner, or claimed by me without my knowing."""
        self._orphaned.update(dict.fromkeys(shards))
        self._wanted.set()

    def gained(self, shards: Sequence[int]) -> None:
        """Shards just taken: whatever their last holder left is looked for at once, due now or soon."""
        self._marks.forget(shards)
        self._marked.forget(shards)
        self.look_for_orphans(shards)
        self.note_upcoming(shards)

    def note_upcoming(self, shards: Iterable[int]) -> None:
        """Runs of these shards may fall due soon that no scan has seen yet."""
        self._gained.update(shards)
        self._any_gained.set()

    def suspect_cleared(self) -> None:
        """There is a place for a suspect: whoever was passed over for want of one is looked for."""
        if self._suspects_waiting:
            self._suspects_waiting = False
            self.look_for_orphans(self._holds())

    def slot_freed(self) -> None:
        if self._hinted or self._orphaned:
            self._wanted.set()

    @property
    def due_waiting(self) -> float:
        """Seconds for which runs that may be due have been known of, and no claim could take them."""
        since = self._waiting_since
        return 0.0 if since is None else self._monotonic() - since

    @property
    def under_way(self) -> bool:
        """A claim was sent and has not been answered."""
        return not self._resting.is_set()

    @property
    def looking(self) -> bool:
        """A claim is under way or will be as soon as there is a slot."""
        return self.under_way or bool(self._hinted or self._orphaned)

    @property
    def backlog(self) -> bool:
        """More runs are due than slots are free."""
        return self._more or self._slots.free == 0

    @property
    def behind(self) -> bool:
        """Runs are waiting that came before any new one; or orphans may be being taken just now by a statement that
        was told of the claims of its own moment only, so that none may be made beside it."""
        over = self._monotonic() >= self._orphans_free_at
        return self._more or self._taking_orphans or not over

    def orphans_unheard_of(self) -> None:
        """A claim that took orphans has lost its answer, and may go on for a while."""
        self._orphans_free_at = self._monotonic() + self._unknown_ends

    async def resting(self) -> None:
        """Returns when no claim is under way: what one took has been reported by then."""
        await self._resting.wait()

    # -- the loops
    async def run(self) -> None:
        while True:
            await self._until_wanted()
            for_slots = self.due.pop_due(self._now() + AHEAD)
            self.hint_slots(for_slots)
            if self._slots.free == 0:
                self._wanted.clear()
                continue
            if self._hinted or self._orphaned:
                await self._claim()

    async def run_scans(self) -> None:
        """The safety scan: finds what every hint missed (R5)."""
        last_orphans = self._monotonic()
        while True:
            await asyncio.sleep(self._scan * (0.8 + 0.4 * self._randomness.fraction()))
            if self._monotonic() - last_orphans >= ORPHAN_PERIOD:
                last_orphans = self._monotonic()
                self.look_for_orphans(self._holds())
                self._lost_sight()
            self.hint_all()
            await self._note_upcoming(self._holds())

    async def run_gained(self) -> None:
        """Timers in shards just taken fire on time, too; no scan has seen them yet."""
        backoff = Backoff(self._randomness)
        while True:
            await self._any_gained.wait()
            self._any_gained.clear()
            shards, self._gained = self._gained, set()
            if await self._note_upcoming(shards):
                backoff = Backoff(self._randomness)
            else:
                self._gained |= shards
                self._any_gained.set()
                await backoff.wait()

    async def _note_upcoming(self, shards: Iterable[int]) -> bool:
        """False: the database could not be asked."""
        known = self._holds()
        holds = [known[shard] for shard in shards if shard in known]
        if not holds:
            return True
        try:
            upcoming = await self._store.upcoming(
                self._runner_id, holds, self._now() + HORIZON, self._noted_at_once.size
            )
        except PerdureError as error:
            log.warning("claim.upcoming-unavailable", error=str(error))
            self._noted_at_once.failed()
            return False
        self._noted_at_once.worked()
        for run_id, slot, wake_at in upcoming:
            self.note_due(run_id, slot, wake_at)
        return True

    def clock_moved(self) -> None:
        """The database's clock was set: what is due may be due already, or not for a while."""
        self._marks.forget(self._holds())
        self._marked.forget(self._holds())
        self.hint_all()
        self.note_upcoming(self._holds())

    def note_due(self, run_id: str, slot: int, wake_at: float) -> None:
        """A parked run of mine falls due at ``wake_at``."""
        if wake_at <= self._now() + HORIZON:
            first = self.due.first()
            self.due.note(run_id, slot, wake_at)
            if first is None or wake_at < first:
                self._wanted.set()

    async def _until_wanted(self) -> None:
        """Until somebody asks or the first timer falls due."""
        if (self._hinted or self._orphaned) and self._slots.free:
            return
        self._wanted.clear()
        first = self.due.first()
        if first is None:
            await self._wanted.wait()
            return
        rest = first - self._now()
        if rest <= AHEAD:
            return
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(rest, self._wanted.set)
        try:
            await self._wanted.wait()
        finally:
            alarm.cancel()

    @contextlib.asynccontextmanager
    async def turn(self, *, orphans: bool) -> AsyncIterator[None]:
        """One claim at a time: another would take for lost what this one has got and not yet told.

        orphans: whether it looks for any. Settled before the wait for the turn, and the claim has to keep to it."""
        async with self._turn:
            await self._may_write()
            self._resting.clear()
            self._taking_orphans = orphans
            try:
                yield
            finally:
                self._taking_orphans = False
                self._resting.set()

    async def _claim(self) -> None:
        orphans = bool(self._orphaned)
        async with self.turn(orphans=orphans):
            holds, wanted = self._holds(), self._orphaned if orphans else self._hinted
            asked = [shard for shard in wanted if shard in holds]
            wanted.clear()
            limit = min(self._slots.free, self._portion.size)
            if not asked or limit == 0:
                self._ask_again(asked, orphans)
                return
            request = ClaimRequest(
                runner_id=self._runner_id,
                holds=[holds[s] for s in asked],
                workflows=self._workflows(),
                in_memory=self._in_memory() if orphans else (),
                limit=limit,
                per_shard=PER_SHARD,
                orphans=orphans,
                ahead=AHEAD,
                floor=None if orphans else self._marks.floor(asked),
                suspects=self._lane.free,
            )
            await self._ask(request, asked)

    def _look_again(self, shards: Sequence[int]) -> None:
        self.look_for_orphans(shards)
        self._lost_sight()

    async def mark_strays(self) -> bool:
        """Claim nothing, but mark due runs of workflows that are unknown here, so that others can have them.
        True: there are more. Known runs are not looked at: however many are waiting, they hide none of the others."""
        async with self.turn(orphans=False):
            holds = self._holds()
            asked = self._marked.unmarked_first(holds)[: self._marked_at_once.size]
            if not asked:
                return False
            request = ClaimRequest(
                runner_id=self._runner_id,
                holds=[holds[shard] for shard in asked],
                workflows=self._workflows(),
                in_memory=(),
                limit=0,
                per_shard=PER_SHARD,
                floor=self._marked.floor(asked),
            )
            try:
                claims = await self._store.claim_runs(request)
            except RunnerDeclaredDead:
                self._declared_dead()
            except PerdureError as error:
                log.warning("claim.unavailable", error=str(error))
                self._marked_at_once.failed()
            else:
                self._marked_at_once.worked()
                if claims.complete:
                    self._marked.raise_to(claims.db_now, asked)
                if claims.strays:
                    self._strays(claims.strays)
                return claims.more
        return False

    async def _ask(self, request: ClaimRequest, asked: Sequence[int]) -> None:
        sent, sent_ns = self._clock.mark(), self._telemetry.now()
        try:
            claims = await self._store.claim_runs(request)
        except UnknownOutcome as error:
            self._telemetry.tally.unknown += 1
            log.warning("claim.unknown", error=str(error))
            if request.orphans:
                self.orphans_unheard_of()
            self._portion.failed()
            self._ask_again(asked, orphans=True)
            loop = asyncio.get_running_loop()
            loop.call_later(self._unknown_ends, self._look_again, list(asked))
            await Backoff(self._randomness).wait()
        except RunnerDeclaredDead:
            self._declared_dead()
        except PerdureError as error:  # also that a table, or the right to it, is not there now
            log.warning("claim.unavailable", error=str(error))
            self._portion.failed()
            self._ask_again(asked, request.orphans)
            await asyncio.sleep(Backoff.delay(4, self._randomness.fraction()))
        else:
            self._clock.observe(claims.db_now, sent)
            self._telemetry.claimed(sent_ns, len(claims.runs))
            self._portion.worked()
            self._received(claims, asked, request)

    def _received(self, claims: Claims, asked: Sequence[int], request: ClaimRequest) -> None:
        self._waiting_since = self._monotonic() if claims.more or self._hinted else None
        for run in claims.runs:
            self.due.forget(run.run_id)
        if claims.suspects_left or request.suspects == 0:
            self._suspects_waiting = True
            if request.suspects == 0 and self._lane.free:  # the place came free meanwhile
                self.suspect_cleared()
        self._taken(claims.runs)
        if claims.strays:
            self._strays(claims.strays)
        if claims.complete:
            self._marks.raise_to(claims.db_now, asked)
        self._more = claims.more
        if claims.more:
            self._ask_again(asked, request.orphans)
            return
        per_shard = Counter(shard_of(run.slot, self._shard_count) for run in claims.runs)
        full = [shard for shard, n in per_shard.items() if n >= PER_SHARD]
        if full:
            self._ask_again(full, request.orphans)

    def _ask_again(self, shards: Sequence[int], orphans: bool) -> None:
        (self._orphaned if orphans else self._hinted).update(dict.fromkeys(shards))
        self._wanted.set()
