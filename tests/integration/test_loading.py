"""What a run needs is read again until the database gives it, in smaller parts; what cannot be read comes apart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from perdure import Client, Context, step, workflow
from perdure.runtime.engine import engine as engines
from perdure.runtime.runner import Runner
from perdure.storage.errors import ConfigurationError, ConflictError, SchemaError
from perdure.storage.interface import RunStore
from perdure.storage.model import Hint, HintKind, Reason, RunStatus
from tests.harness.waiting import until
from tests.integration.in_process import Watched, client_on, runner_on, until_all, until_status

SOON = 0.05

_done: Counter[int] = Counter()


@step
async def count(number: int) -> int:
    _done[number] += 1
    return number


@workflow(name="listens")
async def listens(ctx: Context, number: int) -> str:
    await ctx.step(count, number)
    return str(await ctx.wait_signal("go"))


class Guarded(Watched):
    """A database whose stores ask first, before they read mailboxes or journals: who raises refuses. claims_pass and
    answers_pass: claims are sent, starts are, and answers to claims come, while it is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.mailboxes: Callable[[Collection[str]], None] = lambda _: None
        self.journals: Callable[[Collection[str]], None] = lambda _: None
        self.claims_pass, self.answers_pass, self.starts_pass = (asyncio.Event() for _ in range(3))
        for passes in (self.claims_pass, self.answers_pass, self.starts_pass):
            passes.set()

    def runs(self) -> RunStore:
        store = super().runs()
        mailboxes, journals = store.read_mailboxes, store.read_journal_page
        claim, start = store.claim_runs, store.start_runs

        async def read_mailboxes(run_ids: Sequence[str]) -> Any:
            self.mailboxes(run_ids)
            return await mailboxes(run_ids)

        async def read_journal_page(after: Any, **limits: Any) -> Any:
            self.journals(after)
            return await journals(after, **limits)

        async def claim_runs(request: Any) -> Any:
            await self.claims_pass.wait()
            claims = await claim(request)
            await self.answers_pass.wait()
            return claims

        async def start_runs(runs: Any) -> Any:
            await self.starts_pass.wait()
            return await start(runs)

        store.read_mailboxes = read_mailboxes  # type: ignore[method-assign]
        store.read_journal_page = read_journal_page  # type: ignore[method-assign]
        store.claim_runs = claim_runs  # type: ignore[method-assign]
        store.start_runs = start_runs  # type: ignore[method-assign]
        return store


class Moment:
    """Raises this so many times."""

    def __init__(self, error: Exception, left: int) -> None:
        self.error, self.left = error, left

    def __call__(self, _: Collection[str]) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _done.clear()


async def woken_by_one_claim(database: Guarded, client: Client, run_ids: Sequence[str]) -> None:
    """All of these are parked and warm, and get their signal while no claim is let through."""
    for run_id in run_ids:
        await client.start(listens, int(run_id), run_id=run_id)
    await until_all(client, RunStatus.SUSPENDED, len(run_ids))
    database.claims_pass.clear()
    for run_id in run_ids:
        await client.signal(run_id, "go", "gone")
    database.claims_pass.set()


async def results(client: Client, run_ids: Sequence[str]) -> list[str]:
    handles = [client.handle(run_id, listens) for run_id in run_ids]
    return list(await asyncio.gather(*(handle.wait(20) for handle in handles)))


def runner_id(runner: Runner) -> int:
    return runner.session.runner_id


RUNS = [str(n) for n in range(8)]


@pytest.mark.req("SL2", "CL11")
async def test_mail_of_many_woken_runs_that_is_too_much_for_one_read(migrated_url: str) -> None:
    database = Guarded(migrated_url)
    largest: list[int] = []

    def at_most_two(run_ids: Collection[str]) -> None:
        largest.append(len(run_ids))
        if len(run_ids) > 2:
            raise ConflictError("too much for one statement's deadline")

    async with runner_on(migrated_url, [listens], database=database, park_after=SOON) as runner:
        database.mailboxes = at_most_two
        await woken_by_one_claim(database, runner.client, RUNS)
        assert await results(runner.client, RUNS) == ["gone"] * len(RUNS)
        assert max(largest) > 2, "they were woken together"
        assert runner.session.engine.at_work == 0
    assert _done == Counter(range(8)), "warm bodies went on, nothing was executed again"


@pytest.mark.req("SL2", "SL7", "WF1")
async def test_a_woken_run_whose_mail_cannot_be_read_hurts_nobody_beside_it(
    migrated_url: str,
) -> None:
    database = Guarded(migrated_url)

    def not_the_third(run_ids: Collection[str]) -> None:
        if "3" in run_ids:
            raise ValueError("a mailbox of another world")

    async with runner_on(migrated_url, [listens], database=database, park_after=SOON) as runner:
        client = runner.client
        database.mailboxes = not_the_third
        await woken_by_one_claim(database, client, RUNS)
        good = [run_id for run_id in RUNS if run_id != "3"]
        assert await results(client, good) == ["gone"] * len(good)
        await until_status(client, "3", RunStatus.SUSPENDED)
        info = await client.get("3")
        assert info is not None
        assert info.reason == Reason.NONDETERMINISM
        assert "a mailbox of another world" in str(await client.events("3"))
        await until(lambda: runner.session.engine.at_work == 0, what="no slot taken")
        database.mailboxes = lambda _: None
        await client.resume("3")
        assert await results(client, ["3"]) == ["gone"]


@pytest.mark.req("SL2", "SL7", "WF1")
async def test_a_run_in_memory_whose_mail_cannot_be_read_hurts_nobody_beside_it(
    migrated_url: str,
) -> None:
    database = Guarded(migrated_url)
    asked: list[str] = []

    def not_the_third(run_ids: Collection[str]) -> None:
        asked.extend(run_ids)
        if "3" in run_ids:
            raise ValueError("a mailbox of another world")

    async with runner_on(migrated_url, [listens], database=database) as runner:
        client, before = runner.client, runner_id(runner)
        database.mailboxes = not_the_third
        for run_id in RUNS:
            await client.start(listens, int(run_id), run_id=run_id)
        await until(lambda: len(_done) == len(RUNS), what="all of them waiting in memory")
        await asyncio.gather(*(client.signal(run_id, "go", "gone") for run_id in RUNS))
        good = [run_id for run_id in RUNS if run_id != "3"]
        assert await results(client, good) == ["gone"] * len(good)
        await until(lambda: "3" in asked, what="the third's mail asked for")
        assert runner_id(runner) == before, "the runner went on"
    assert _done == Counter(range(8))


@pytest.mark.req("CL11", "SL7")
@pytest.mark.parametrize("error", [ConfigurationError("no right"), SchemaError("no table")])
async def test_a_table_or_a_right_missing_for_a_moment_puts_no_run_on_hold(
    migrated_url: str, error: Exception
) -> None:
    async with runner_on(migrated_url, [listens], park_after=SOON) as runner:
        for run_id in RUNS:
            await runner.client.start(listens, int(run_id), run_id=run_id)
        await until_all(runner.client, RunStatus.SUSPENDED, len(RUNS))
    database = Guarded(migrated_url)
    database.journals = moment = Moment(error, 6)
    async with runner_on(migrated_url, [listens], database=database, park_after=SOON) as runner:
        client, before = runner.client, runner_id(runner)
        for run_id in RUNS:
            await client.signal(run_id, "go", "gone")
        assert await results(client, RUNS) == ["gone"] * len(RUNS)
        assert runner_id(runner) == before
        assert moment.left == 0, "it was raised"
    assert _done == Counter(range(8))


@pytest.mark.req("CL11", "SL7")
async def test_a_table_missing_for_a_moment_ends_no_runner(migrated_url: str) -> None:
    database = Guarded(migrated_url)
    async with runner_on(migrated_url, [listens], database=database) as runner:
        client, before = runner.client, runner_id(runner)
        database.mailboxes = moment = Moment(SchemaError("no table"), 3)
        for run_id in RUNS:
            await client.start(listens, int(run_id), run_id=run_id)
        await until(lambda: len(_done) == len(RUNS), what="all of them waiting in memory")
        await asyncio.gather(*(client.signal(run_id, "go", "gone") for run_id in RUNS))
        assert await results(client, RUNS) == ["gone"] * len(RUNS)
        assert moment.left == 0, "it was raised"
        assert runner_id(runner) == before, "the runner went on"
    assert _done == Counter(range(8))


@pytest.mark.req("SL2", "CL4")
async def test_a_birth_beside_a_claim_loses_no_signal_of_a_run_being_claimed(
    migrated_url: str,
) -> None:
    """The claim has not seen it, no scan comes, and the run is not there yet when it is hinted at."""
    database = Guarded(migrated_url)
    async with (
        runner_on(
            migrated_url, [listens], database=database, scan=600.0, park_after=60.0
        ) as runner,
        client_on(migrated_url, [listens]) as other,
    ):
        engine = runner.session.engine
        await until(lambda: engine.births.open and not engine.looking, what="births")
        database.answers_pass.clear()
        claims = len(database.claims)
        await other.start(listens, 1, run_id="claimed")
        await until(lambda: any(database.claims[claims:]), what="its claim, not answered yet")
        await other.signal("claimed", "go", "gone")
        await until(
            lambda: "claimed" in engine._early_wakes or engine._any_early,
            what="the hint of its signal",
        )
        await runner.client.start(listens, 2, run_id="born")
        await until(lambda: _done[2], what="the birth")
        database.answers_pass.set()
        assert await other.handle("claimed", listens).wait(10) == "gone"


@pytest.mark.req("CL4")
async def test_hints_for_runs_of_others_are_forgotten_also_where_runs_are_born_without_a_pause(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "EARLY", 0.0)
    database = Guarded(migrated_url)
    async with runner_on(migrated_url, [listens], database=database, scan=600.0) as runner:
        engine = runner.session.engine
        await until(lambda: engine.births.open and not engine.looking, what="births")
        database.starts_pass.clear()
        birth = asyncio.create_task(runner.client.start(listens, 1, run_id="born"))
        await until(lambda: engine.births.claims, what="a birth under way")
        for number in range(100):
            engine._hinted([Hint(HintKind.WAKE, f"of-others-{number}", number)])
        assert len(engine._early_wakes) < 3
        database.starts_pass.set()
        await birth
