"""Runs of shards that somebody else holds: strays of workflows this runner knows and that holder does not (R15), and
what runs under this runner without being in its memory, whatever became of the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

from perdure.runtime.dbclock import DatabaseClock
from perdure.runtime.engine.claiming import Claimer
from perdure.runtime.engine.pacing import Backoff, Portion
from perdure.runtime.engine.slots import Slots
from perdure.runtime.engine.suspects import SuspectLane
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError, RunnerDeclaredDead, UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import SLOTS, ClaimedRun, StrayRequest, Topology

log = structlog.get_logger("perdure.claim")

LOOK = 1.0
"""Seconds between two looks for strays while live runners differ in what they know; else a safety scan's period."""
MOST_AT_ONCE = 100


class Borrower:
    """Looks for runs outside the shards held.

    claimer: whose turns it shares, so that one claim is under way at a time. mixed: whether runners are alive that
    do not know all the workflows this one knows, or know others. The rest as in `Claimer`.
    """

    def __init__(
        self,
        store: RunStore,
        runner_id: int,
        randomness: Randomness,
        *,
        workflows: Callable[[], Sequence[str]],
        in_memory: Callable[[], Sequence[int]],
        taken: Callable[[Sequence[ClaimedRun]], None],
        mixed: Callable[[], bool],
        claimer: Claimer,
        slots: Slots,
        lane: SuspectLane,
        clock: DatabaseClock,
        declared_dead: Callable[[], None],
        scan: float,
        unknown_ends: float,
    ) -> None:
        self._store = store
        self._runner_id = runner_id
        self._randomness = randomness
        self._workflows = workflows
        self._in_memory = in_memory
        self._taken = taken
        self._mixed = mixed
        self._claimer = claimer
        self._slots = slots
        self._lane = lane
        self._clock = clock
        self._declared_dead = declared_dead
        self._scan = scan
        self._unknown_ends = unknown_ends
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._lost = False
        self._portion = Portion(MOST_AT_ONCE)
        self._over = False

    def look(self) -> None:
        """There may be strays of workflows I know."""
        self._wanted.set()

    def look_for_lost(self) -> None:
        """Something may be running under me that I know nothing of."""
        self._lost = True
        self._wanted.set()

    def stop(self) -> None:
        """Take nothing more."""
        self._over = True

    async def run(self) -> None:
        while not self._over:
            period = LOOK if self._mixed() else self._scan
            rest = period * (0.8 + 0.2 * self._randomness.fraction())
            # Not wait_for, which on Python 3.11 swallows a cancel that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._wanted.wait()
            self._wanted.clear()
            if self._slots.free:
                await self._claim()
            # My own runs must wait, those I do not know need not.
            if self._claimer.backlog and self._mixed() and await self._claimer.mark_strays():
                self._wanted.set()

    async def _claim(self) -> None:
        lost = self._lost  # who asks from here on is answered by the next look
        async with self._claimer.turn(orphans=lost):
            limit = min(self._slots.free, self._portion.size)
            if limit == 0 or self._over:
                return
            if lost:
                self._lost = False
            request = StrayRequest(
                runner_id=self._runner_id,
                workflows=self._workflows(),
                in_memory=self._in_memory(),
                limit=limit,
                suspects=self._lane.free,
                from_slot=int(self._randomness.fraction() * SLOTS),
                lost=lost,
            )
            await self._ask(request)

    async def _ask(self, request: StrayRequest) -> None:
        sent = self._clock.mark()
        try:
            claims = await self._store.claim_strays(request)
        except UnknownOutcome as error:
            log.warning("claim.unknown", error=str(error))
            self._portion.failed()
            if request.lost:
                self._claimer.orphans_unheard_of()
            self.look_for_lost()
            asyncio.get_running_loop().call_later(self._unknown_ends, self.look_for_lost)
            await Backoff(self._randomness).wait()
        except RunnerDeclaredDead:
            self._declared_dead()
        except PerdureError as error:  # also that a table, or the right to it, is not there now
            log.warning("claim.unavailable", error=str(error))
            self._portion.failed()
            self._lost = self._lost or request.lost
            await asyncio.sleep(Backoff.delay(4, self._randomness.fraction()))
        else:
            self._clock.observe(claims.db_now, sent)
            self._portion.worked()
            if claims.runs:
                log.info("runs.borrowed", runs=len(claims.runs))
            self._taken(claims.runs)
            if claims.more:
                self._wanted.set()


def runners_differ(topology: Topology | None, workflows: Sequence[str]) -> bool:
    """Whether a live runner knows another set of workflows than these."""
    mine = set(workflows)
    return topology is not None and any(
        not row.dead and set(row.workflows) != mine for row in topology.runners
    )
