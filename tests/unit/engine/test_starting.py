"""Starts that share commits, on a store that fails: each has its own patience, none is sent that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from perdure.runtime.starting import StartBatcher
from perdure.sharding.slots import slot_of
from perdure.storage.clock import Clock, SeededRandomness
from perdure.storage.errors import ConflictError, DatabaseUnavailable, StorageError, UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import NewRun, RunStatus, StartOutcome
from tests.harness.waiting import until

pytestmark = pytest.mark.req("CL11")

PATIENCE = 4.0


class Standing(Clock):
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class Server:
    """Takes a second of the clock for each try. fails: how a try ends. before: awaited in each."""

    def __init__(self, clock: Standing) -> None:
        self.clock = clock
        self.tries: list[list[str]] = []
        self.fails: Callable[[list[str]], StorageError | None] = lambda ids: None
        self.before: Callable[[list[str]], Awaitable[None]] | None = None

    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        ids = [run.run_id for run in runs]
        self.tries.append(ids)
        if self.before is not None:
            await self.before(ids)
        self.clock.at += 1.0
        error = self.fails(ids)
        if error is not None:
            raise error
        return [StartOutcome(run.run_id, True, run.workflow, RunStatus.PENDING) for run in runs]


@asynccontextmanager
async def starting() -> AsyncIterator[tuple[StartBatcher, Server, Standing]]:
    clock = Standing()
    server = Server(clock)
    starts = StartBatcher(cast(RunStore, server), SeededRandomness(1), clock, patience=PATIENCE)
    serving = asyncio.create_task(starts.run())
    try:
        yield starts, server, clock
    finally:
        serving.cancel()


def run(run_id: str) -> NewRun:
    return NewRun(run_id, slot_of(run_id), "any", 1, "null", seed=7)


async def test_all_starts_of_an_outage_fail_when_their_patience_is_over() -> None:
    """Not one batch after the other, each after a patience of its own."""
    async with starting() as (starts, server, clock):
        server.fails = lambda ids: DatabaseUnavailable("away")
        calls = [starts.start(run(f"{n:04}")) for n in range(1_500)]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert {type(outcome) for outcome in outcomes} == {DatabaseUnavailable}
        assert clock.at <= PATIENCE + 1
        sent = {run_id for ids in server.tries for run_id in ids}
        told = {f"{n:04}": str(outcome) for n, outcome in enumerate(outcomes)}
        assert all(("not sent" in text) == (run_id not in sent) for run_id, text in told.items())


async def test_a_start_whose_caller_has_gone_is_not_sent() -> None:
    async with starting() as (starts, server, _):
        let_go = asyncio.Event()

        async def wait(ids: list[str]) -> None:
            await let_go.wait()

        server.before = wait
        first = asyncio.create_task(starts.start(run("first")))
        await until(lambda: server.tries == [["first"]], what="the first is under way")
        gone = asyncio.create_task(starts.start(run("gone")))
        later = asyncio.create_task(starts.start(run("later")))
        await asyncio.sleep(0)
        gone.cancel()
        let_go.set()
        await asyncio.gather(first, later)
        assert server.tries == [["first"], ["later"]]


async def test_who_came_later_waits_longer_and_what_has_failed_is_not_sent_again() -> None:
    async with starting() as (starts, server, clock):
        let_go = asyncio.Event()

        async def wait(ids: list[str]) -> None:
            await let_go.wait()

        server.before = wait
        early = asyncio.create_task(starts.start(run("early")))
        await until(lambda: bool(server.tries), what="the first try")
        queued = [asyncio.create_task(starts.start(run("queued")))]
        await asyncio.sleep(0)
        clock.at = 3.0
        queued.append(asyncio.create_task(starts.start(run("late"))))
        await asyncio.sleep(0)
        server.fails = lambda ids: DatabaseUnavailable("away") if clock.at < 6.5 else None
        let_go.set()
        with pytest.raises(DatabaseUnavailable, match="away"):
            await early
        with pytest.raises(DatabaseUnavailable, match=r"not sent: .*away"):
            await queued[0]
        assert (await queued[1]).created
        assert server.tries == [["early"], ["late"], ["late"], ["late"]]


async def test_once_an_answer_was_lost_no_later_failure_says_otherwise() -> None:
    async with starting() as (starts, server, _):
        lost = UnknownOutcome("lost")
        server.fails = lambda ids: lost if len(server.tries) == 1 else DatabaseUnavailable("away")
        with pytest.raises(UnknownOutcome, match="lost"):
            await starts.start(run("a"))
        [answer] = await starts.start_all([run("b")])
        assert isinstance(answer, DatabaseUnavailable)


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_start_that_runs_into_a_lock_fails_alone(bulk: bool) -> None:
    async with starting() as (starts, server, _):
        server.fails = lambda ids: ConflictError("locked") if "c" in ids else None
        runs = [run(run_id) for run_id in "abcdefgh"]
        answers: Sequence[object]
        if bulk:
            answers = await starts.start_all(runs)
        else:
            answers = await asyncio.gather(*map(starts.start, runs), return_exceptions=True)
        assert isinstance(answers[2], ConflictError)
        assert [type(answer) for answer in answers].count(StartOutcome) == 7
        if not bulk:
            alone = [ids for ids in server.tries[server.tries.index(["c"]) :] if "c" in ids]
            assert set(map(tuple, alone)) == {("c",)}
