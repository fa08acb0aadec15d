"""Claimer and borrower against what a store answers, and when: what each engine answers is proved by the contracts.

The loop here runs on virtual time, so periods of a minute take none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from perdure.runtime.dbclock import DatabaseClock
from perdure.runtime.engine.births import Births
from perdure.runtime.engine.borrowing import Borrower
from perdure.runtime.engine.claiming import Claimer
from perdure.runtime.engine.slots import Slots
from perdure.runtime.engine.suspects import SuspectLane
from perdure.storage.clock import SeededRandomness
from perdure.storage.errors import (
    ConfigurationError,
    ConflictError,
    PerdureError,
    SchemaError,
    StorageError,
    UnknownOutcome,
)
from perdure.storage.interface import RunStore
from perdure.storage.model import ClaimedRun, ClaimRequest, Claims, ShardHold, StrayRequest
from tests.simulation.loop import VirtualLoop

SHARDS = 4
ENDS = 5.0
SCAN = 5.0
Request = ClaimRequest | StrayRequest
Answer = Callable[[Request], Awaitable[Claims]]


class LoopClock:
    """The loop's time is both clocks'."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    monotonic = now


class Store:
    """Keeps what it is asked. ahead: seconds by which its clock is before the loop's. answers: what is done with the
    next requests, one after the other; nothing is found by those that follow."""

    def __init__(self) -> None:
        self.ahead = 1e9
        self.asked: list[tuple[float, Request]] = []
        self.answers: list[Answer] = []

    def nothing(self, **facts: Any) -> Claims:
        db_now = asyncio.get_running_loop().time() + self.ahead
        return Claims((), db_now, more=False, **({"complete": True} | facts))

    async def claim_runs(self, request: Request) -> Claims:
        self.asked.append((asyncio.get_running_loop().time(), request))
        if self.answers:
            return await self.answers.pop(0)(request)
        return self.nothing()

    claim_strays = claim_runs

    async def upcoming(self, *_: object) -> Sequence[tuple[str, int, float]]:
        return ()

    def borrowed(self) -> list[StrayRequest]:
        return [request for _, request in self.asked if isinstance(request, StrayRequest)]

    def claimed(self) -> list[ClaimRequest]:
        return [request for _, request in self.asked if isinstance(request, ClaimRequest)]


class Looks:
    """A claimer, a borrower and births as an engine puts them together, without the engine."""

    def __init__(self, *, slots: int = 10, unknown_ends: float = ENDS) -> None:
        self.store = Store()
        self.taken: list[ClaimedRun] = []
        self.mixed = False
        self.holds = {n: ShardHold(n, 1) for n in range(SHARDS)}
        self.slots = Slots(slots, lambda: self.claimer.slot_freed())
        self.lane = SuspectLane(lambda: self.claimer.suspect_cleared())
        self.clock = DatabaseClock(LoopClock())
        self.clock.on_jump(lambda _: self.claimer.clock_moved())
        store, randomness = cast("RunStore", self.store), SeededRandomness(1)

        async def may_write() -> None:
            return None

        self.claimer = Claimer(
            store,
            1,
            randomness,
            shard_count=SHARDS,
            workflows=lambda: ["w"],
            holds=lambda: self.holds,
            in_memory=lambda: (),
            taken=self.taken.extend,
            strays=lambda _: None,
            slots=self.slots,
            lane=self.lane,
            clock=self.clock,
            may_write=may_write,
            declared_dead=lambda: None,
            scan=SCAN,
            unknown_ends=unknown_ends,
            lost_sight=lambda: self.borrower.look_for_lost(),
        )
        self.borrower = Borrower(
            store,
            1,
            randomness,
            workflows=lambda: ["w"],
            in_memory=lambda: (),
            taken=self.taken.extend,
            mixed=lambda: self.mixed,
            claimer=self.claimer,
            slots=self.slots,
            lane=self.lane,
            clock=self.clock,
            declared_dead=lambda: None,
            scan=SCAN,
            unknown_ends=unknown_ends,
        )
        self.births = Births(
            1,
            randomness,
            shard_count=SHARDS,
            workflows=["w"],
            holds=lambda: self.holds,
            trusted=lambda: True,
            taken=self.taken.extend,
            slots=self.slots,
            claimer=self.claimer,
            unknown_ends=unknown_ends,
        )

    def serve(self, *services: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.tasks = [asyncio.get_running_loop().create_task(service()) for service in services]

    def has_fallen(self) -> bool:
        return any(task.done() for task in self.tasks)


def on_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        loop = VirtualLoop()  # type: ignore[abstract]
        try:
            loop.run(test())
        finally:
            loop.close()
        assert loop.errors == []

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def fails(error: PerdureError) -> Answer:
    async def answer(_: Request) -> Claims:
        raise error

    return answer


class Held:
    """An answer that comes when it is let go."""

    def __init__(self, looks: Looks, **facts: Any) -> None:
        self._looks, self._facts = looks, facts
        self.asked, self.answered = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Request) -> Claims:
        self.asked.set()
        await self.answered.wait()
        return self._looks.store.nothing(**self._facts)


# ---- births beside the looks for lost runs --------------------------------------------------------------


@pytest.mark.req("CL4", "CL11")
@on_virtual_time
async def test_no_run_is_born_beside_a_look_for_lost_runs_asked_for_while_it_waited_its_turn():
    looks = Looks()
    looked: list[tuple[bool, bool]] = []

    async def answer(request: Request) -> Claims:
        looked.append((cast("StrayRequest", request).lost, looks.births.open))
        return looks.store.nothing()

    looks.store.answers = [answer, answer]
    async with looks.claimer.turn(orphans=False):
        looks.serve(looks.borrower.run)
        await asyncio.sleep(0.1)
        looks.borrower.look_for_lost()
    await asyncio.sleep(0.1)
    assert (True, False) in looked
    assert (True, True) not in looked
    assert looks.births.open


@pytest.mark.req("CL4", "CL11")
@on_virtual_time
async def test_no_run_is_born_while_a_look_for_lost_runs_may_be_under_way_unanswered():
    looks = Looks()
    looks.store.answers = [fails(UnknownOutcome("lost"))]
    looks.borrower.look_for_lost()
    looks.serve(looks.borrower.run)
    await asyncio.sleep(ENDS - 1.0)
    assert looks.store.borrowed()[0].lost
    assert not looks.births.open
    await asyncio.sleep(2.0)
    assert looks.births.open


# ---- what a database may answer for a moment ------------------------------------------------------------


@pytest.mark.req("CL11", "SL7")
@pytest.mark.parametrize(
    "error", [ConfigurationError("no right"), SchemaError("no table"), StorageError("odd")]
)
def test_claims_and_looks_go_on_when_a_table_or_a_right_is_there_again(error: PerdureError):
    @on_virtual_time
    async def play() -> None:
        looks = Looks(slots=1)
        looks.mixed = True
        looks.store.answers = [fails(error)] * 6
        looks.serve(looks.claimer.run, looks.claimer.run_scans, looks.borrower.run)
        await asyncio.sleep(20.0)
        assert not looks.store.answers
        looks.slots.take()  # the borrower only marks strays now
        looks.store.answers = [fails(error)] * 2
        await asyncio.sleep(20.0)
        assert not looks.store.answers
        assert not looks.has_fallen()

    play()


# ---- strays that a holder without a free slot marks -----------------------------------------------------


def marking(looks: Looks) -> list[ClaimRequest]:
    return [request for request in looks.store.claimed() if request.limit == 0]


@pytest.mark.req("CL13")
@on_virtual_time
async def test_a_look_that_left_strays_behind_is_followed_by_one_that_begins_where_it_did():
    looks = Looks(slots=0)
    looks.mixed = True

    async def some_left(_: Request) -> Claims:
        return looks.store.nothing(complete=False)

    async def many_left(_: Request) -> Claims:
        return replace(looks.store.nothing(complete=False), more=True)

    looks.store.answers = [some_left, many_left]
    looks.serve(looks.borrower.run)
    await asyncio.sleep(10.0)
    first, second, third, fourth, *_ = [(at, r) for at, r in looks.store.asked]
    floors = [cast("ClaimRequest", request).floor for _, request in (first, second, third, fourth)]
    assert floors[:3] == [None] * 3
    assert floors[3] is not None
    assert third[0] - second[0] < 0.1, "at once: there are more"


@pytest.mark.req("CL13")
@on_virtual_time
async def test_shards_just_taken_are_looked_through_from_their_beginning():
    looks = Looks(slots=0)
    looks.mixed = True
    looks.serve(looks.borrower.run)
    await asyncio.sleep(3.0)
    assert marking(looks)[-1].floor is not None
    del looks.store.asked[:]
    looks.claimer.gained([2])
    await asyncio.sleep(1.5)
    assert marking(looks)[0].floor is None


@pytest.mark.req("CL13")
@on_virtual_time
async def test_too_many_shards_for_one_look_are_looked_through_in_parts():
    looks = Looks(slots=0)
    looks.mixed = True

    async def at_most_one(request: Request) -> Claims:
        if len(cast("ClaimRequest", request).holds) > 1:
            raise ConflictError("too much for one statement's deadline")
        answered.extend(hold.shard_id for hold in cast("ClaimRequest", request).holds)
        return looks.store.nothing()

    answered: list[int] = []
    looks.store.answers = [at_most_one] * 100
    looks.serve(looks.borrower.run)
    await asyncio.sleep(20.0)
    assert set(answered) == set(looks.holds)


@pytest.mark.req("CL13")
@on_virtual_time
async def test_a_slot_free_now_and_then_does_not_keep_a_busy_holder_from_marking_strays():
    looks = Looks(slots=1)
    looks.mixed = True

    async def backlog(_: Request) -> Claims:
        return replace(looks.store.nothing(complete=False), more=True)

    next_claim = Held(looks)
    looks.store.answers = [backlog, next_claim]
    looks.claimer.hint_all()
    claims = asyncio.get_running_loop().create_task(looks.claimer.run())
    await next_claim.asked.wait()
    claims.cancel()
    looks.serve(looks.borrower.run)
    await asyncio.sleep(3.0)
    assert looks.claimer.behind
    assert marking(looks)


# ---- a database's clock that was set --------------------------------------------------------------------


@pytest.mark.req("CL5", "CL11")
@pytest.mark.parametrize("seconds", [-3_600.0, 3_600.0])
def test_the_periodic_looks_go_on_whatever_the_database_takes_for_the_time(seconds: float):
    @on_virtual_time
    async def play() -> None:
        looks = Looks()
        looks.serve(looks.claimer.run, looks.claimer.run_scans, looks.borrower.run)
        await asyncio.sleep(70.0)
        looks.store.ahead += seconds
        await asyncio.sleep(SCAN)  # the clock's jump has been seen
        del looks.store.asked[:]
        await asyncio.sleep(75.0)
        assert len([r for r in looks.store.claimed() if r.orphans]) == 1
        assert any(request.lost for request in looks.store.borrowed())

    play()


@pytest.mark.req("CL4", "CL11")
@on_virtual_time
async def test_births_are_closed_as_long_as_a_statement_may_last_by_any_clock():
    looks = Looks()
    looks.store.answers = [fails(UnknownOutcome("lost"))]
    looks.claimer.look_for_orphans([1])
    looks.serve(looks.claimer.run, looks.claimer.run_scans)
    await asyncio.sleep(0.1)
    assert not looks.births.open
    looks.store.ahead -= 3_600.0
    await asyncio.sleep(2 * ENDS)
    assert looks.births.open


@on_virtual_time
async def test_how_long_due_runs_have_been_waiting_is_no_matter_of_the_databases_clock():
    looks = Looks(slots=1)
    looks.serve(looks.claimer.run, looks.claimer.run_scans)
    await asyncio.sleep(SCAN)
    looks.slots.take()
    looks.claimer.hint_slots([1])
    await asyncio.sleep(2.0)
    for ahead in (3_600.0, -3_600.0):
        looks.clock.observe(looks.store.ahead + looks.clock.mark() + ahead, looks.clock.mark())
        assert 1.9 < looks.claimer.due_waiting < 2.5


# ---- suspects -------------------------------------------------------------------------------------------


@pytest.mark.req("CL5", "WF1")
@on_virtual_time
async def test_a_suspect_passed_over_is_looked_for_when_its_place_came_free_beside_the_claim():
    looks = Looks()
    looks.lane.enter("another")
    answer = Held(looks, suspects_left=True)
    looks.store.answers = [answer]
    looks.claimer.look_for_orphans([1])
    looks.serve(looks.claimer.run)
    await answer.asked.wait()
    looks.lane.leave("another")
    answer.answered.set()
    await asyncio.sleep(0.1)
    _, again = looks.store.claimed()
    assert (again.orphans, again.suspects) == (True, 1)
    await asyncio.sleep(SCAN)
    assert len(looks.store.claimed()) == 2, "once"


# ---- low-water marks ------------------------------------------------------------------------------------


@pytest.mark.req("CL11")
@pytest.mark.parametrize(("ends", "behind"), [(5.0, 10.0), (600.0, 1_200.0)])
def test_marks_stay_behind_by_more_than_a_statement_may_last(ends: float, behind: float):
    """A row shows when its transaction has committed: so much later than its due time."""

    @on_virtual_time
    async def play() -> None:
        looks = Looks(unknown_ends=ends)
        looks.serve(looks.claimer.run)
        for _ in range(2):
            looks.claimer.hint_all()
            await asyncio.sleep(1.0)
        (asked, _), (_, request) = looks.store.asked
        assert cast("ClaimRequest", request).floor == asked + looks.store.ahead - behind
        looks.slots.limit = 0
        for _ in range(2):
            await looks.claimer.mark_strays()
        assert marking(looks)[-1].floor == pytest.approx(
            looks.store.ahead + looks.store.asked[-2][0] - behind
        )

    play()


# ---- what is too much for one statement -----------------------------------------------------------------


@pytest.mark.req("CL5", "CL13")
@on_virtual_time
async def test_the_looks_beyond_the_shards_ask_for_less_after_each_failure():
    looks = Looks(slots=1_000)

    async def at_most_three(request: Request) -> Claims:
        if request.limit > 3:
            raise ConflictError("too much for one statement's deadline")
        return looks.store.nothing()

    looks.store.answers = [at_most_three] * 20
    looks.borrower.look_for_lost()
    looks.serve(looks.borrower.run)
    await asyncio.sleep(60.0)
    assert min(request.limit for request in looks.store.borrowed()) <= 3
    assert any(request.lost and request.limit <= 3 for request in looks.store.borrowed())


@pytest.mark.req("SL1")
@on_virtual_time
async def test_timers_of_shards_just_taken_are_read_in_parts_after_a_failure():
    looks = Looks()
    asked: list[int] = []

    async def upcoming(_me: int, _holds: object, _until: float, limit: int) -> Sequence[Any]:
        asked.append(limit)
        if limit > 50:
            raise ConflictError("too much for one statement's deadline")
        return ()

    looks.store.upcoming = upcoming  # type: ignore[method-assign,assignment]
    looks.serve(looks.claimer.run_gained)
    looks.claimer.gained([1])
    await asyncio.sleep(60.0)
    assert asked[-1] <= 50
