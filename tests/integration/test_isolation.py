"""What cannot be run, cannot be stored, or is locked by somebody else hurts nobody beside it (R8)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from pydantic import BaseModel

from perdure import Context, step, workflow
from perdure.runtime.authoring.errors import WorkflowPayloadError, WorkflowResultError
from perdure.storage.errors import DataRefused
from perdure.storage.model import Reason, RunStatus, Verdict
from tests.harness.waiting import until
from tests.integration import in_process
from tests.integration.in_process import (
    Watched,
    client_on,
    execute,
    milliseconds,
    percentile,
    rows_held,
    runner_on,
    status_of,
    until_all,
    until_status,
)

pytestmark = pytest.mark.alone

NEIGHBOURS = 8


@pytest.fixture(autouse=True, params=["advisory", pytest.param("row", marks=pytest.mark.slow)])
def shard_lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all runners here."""
    monkeypatch.setitem(in_process.SETTINGS, "shard_lock", request.param)


class Order(BaseModel):
    number: int


@workflow(name="ordered")
async def ordered(ctx: Context, order: Order) -> int:
    return order.number


@workflow(name="ordered")
async def ordered_by_older_code(ctx: Context, number: int) -> int:
    return number


@workflow(name="unheard-of")
async def unheard_of(ctx: Context, number: int) -> int:
    return number


@step
async def double(number: int) -> int:
    return 2 * number


@workflow(name="doubled")
async def doubled(ctx: Context, number: int) -> int:
    return await ctx.step(double, number)


# ---- in one claim -----------------------------------------------------------------------------


@pytest.mark.req("SL7", "WF1")
async def test_a_claim_with_an_undecodable_payload_and_an_unknown_workflow(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    watched = Watched(url)
    async with client_on(url, [ordered_by_older_code, unheard_of, doubled]) as client:
        wrong = await client.start("ordered", 7, run_id="a-wrong-type")
        broken = await client.start("ordered", 7, run_id="b-no-json")
        await execute(
            url, "update perdure_runs set payload = '{\"number' where run_id = $1", broken.run_id
        )
        unknown = await client.start(unheard_of, 1, run_id="c-unknown")
        good = [await client.start(doubled, n, run_id=f"d-{n}") for n in range(NEIGHBOURS)]
        async with runner_on(url, [ordered, doubled], database=watched):
            assert await asyncio.gather(*(h.wait(20) for h in good)) == [
                2 * n for n in range(NEIGHBOURS)
            ]
            for handle in (wrong, broken):
                with pytest.raises(WorkflowPayloadError, match="ordered"):
                    await handle.wait(20)
                info = await handle.poll()
                assert info is not None
                assert info.status is RunStatus.FAILED
                assert info.error is not None
                assert "WorkflowPayloadError" in info.error
                assert "ordered" in (await client.why(handle.run_id)).summary
            together = {wrong.run_id, broken.run_id, *(h.run_id for h in good)}
            assert any(together <= {run.run_id for run in claim} for claim in watched.claims)
            assert await status_of(client, unknown.run_id) is RunStatus.PENDING
            why = await client.why(unknown.run_id)
            assert "no live runner knows the workflow 'unheard-of'" in why.summary
        async with runner_on(url, [unheard_of]):
            assert await unknown.wait(20) == 1


FOREIGN_ENTRY = """
insert into perdure_steps (run_id, seq, step_key, kind, status, claim_id, at)
  values ($1, 1, 'k', 'telepathy', 'ok', 1, now())
"""
FOREIGN_MESSAGE = """
insert into perdure_messages (run_id, message_id, wake_seq, kind, name) values ($1, 'thought', 1, 'telepathy', 'go')
"""


@workflow(name="listens")
async def listens(ctx: Context, number: int) -> str:
    return str(await ctx.wait_signal("go"))


@pytest.mark.req("WF1", "SL2", "SL7")
async def test_a_claim_with_a_journal_and_a_mailbox_of_a_later_release(migrated_postgres_url: str):
    """What this code cannot read it leaves alone: such a run is held, such a message stays unread."""
    url = migrated_postgres_url
    watched = Watched(url)
    async with runner_on(url, [listens], database=watched, park_after=0.05) as runner:
        client = runner.client
        handles = [await client.start(listens, n, run_id=f"{n:02}") for n in range(NEIGHBOURS)]
        await until_all(client, RunStatus.SUSPENDED, NEIGHBOURS)
    journal, mailbox, *good = handles
    await execute(url, FOREIGN_ENTRY, journal.run_id)
    await execute(url, "update perdure_fences set next_seq = 2 where run_id = $1", journal.run_id)
    await execute(url, FOREIGN_MESSAGE, mailbox.run_id)
    await execute(url, "update perdure_wakes set wake_seq = wake_seq + 1, wake_at = now()")
    async with runner_on(url, [listens], database=watched, park_after=0.05) as runner:
        client = runner.client
        together = {h.run_id for h in handles}
        await until(
            lambda: any(together <= {run.run_id for run in claim} for claim in watched.claims),
            what="one claim of all of them",
        )
        for handle in handles:
            await client.signal(handle.run_id, "go", "gone")
        for handle in (mailbox, *good):
            assert await client.handle(handle.run_id, listens).wait(20) == "gone"
        info = await client.get(journal.run_id)
        assert info is not None
        assert (info.status, info.reason) == (RunStatus.SUSPENDED, Reason.NONDETERMINISM)
        assert "telepathy" in str(await client.events(journal.run_id))
        assert "put the old code back" in (await client.why(journal.run_id)).summary


# ---- in one commit ----------------------------------------------------------------------------


class Gate:
    """Steps that end in the same turn of the loop, so that what follows is written in one batch."""

    def __init__(self) -> None:
        self.waiting = 0
        self.opened = asyncio.Event()

    async def passed(self) -> None:
        self.waiting += 1
        await self.opened.wait()


_gates: list[Gate] = []


@step
async def pass_gate() -> None:
    await _gates[-1].passed()


@step
async def forbidden() -> str:
    """Its result is one that a test's database has a constraint against."""
    return "forbidden"


@workflow(name="ends")
async def ends(ctx: Context, how: str) -> int:
    await ctx.step(pass_gate)
    match how:
        case "raises":
            raise ValueError("NUL \0 and a lone surrogate \udc80 in one text")
        case "returns no int":
            return object()  # type: ignore[return-value]
        case "leaves a task behind":
            asyncio.create_task(ctx.sleep(3600), name="a task \0 named \udc80")  # noqa: RUF006
            await asyncio.sleep(0)
        case "sleeps to the end of time":
            await ctx.sleep_until(datetime.max.replace(tzinfo=UTC))
        case "is refused":
            await ctx.step(forbidden)
    return 7


@pytest.mark.req("WF1", "WF19")
async def test_a_commit_with_a_text_no_database_takes_and_a_result_that_cannot_be_encoded(
    migrated_postgres_url: str,
):
    gate = Gate()
    _gates.append(gate)
    watched = Watched(migrated_postgres_url)
    odd = ["raises", "returns no int", "leaves a task behind", "sleeps to the end of time"]
    hows = [*odd, *["returns"] * NEIGHBOURS]
    async with runner_on(migrated_postgres_url, [ends], database=watched, park_after=0.1) as runner:
        client = runner.client
        handles = [await client.start(ends, how, run_id=f"{n:02}") for n, how in enumerate(hows)]
        await until(lambda: gate.waiting == len(hows), what="all runs in their step")
        gate.opened.set()
        raising, wrong, left, sleeping, *good = handles
        assert await asyncio.gather(*(h.wait(20) for h in good)) == [7] * NEIGHBOURS
        with pytest.raises(ValueError, match="in one text"):
            await raising.wait(20)
        with pytest.raises(WorkflowResultError, match="ends"):
            await wrong.wait(20)
        assert await left.wait(20) == 7
        assert [await status_of(client, h.run_id) for h in (raising, wrong, left)] == [
            RunStatus.FAILED, RunStatus.FAILED, RunStatus.SUCCEEDED,
        ]  # fmt: skip
        [event] = [e for e in await client.events(left.run_id) if e.type == "left-pending"]
        assert "a task" in (event.detail or "")
        await until_status(client, sleeping.run_id, RunStatus.SUSPENDED)
    together = {h.run_id for h in handles}
    assert any(together <= set(batch.verdicts) for batch in watched.batches), "not in one batch"


@pytest.mark.req("WF1")
async def test_a_commit_that_the_database_refuses_for_one_run(migrated_postgres_url: str):
    """A real refusal, by a constraint: the batch is halved until the culprit is alone."""
    url = migrated_postgres_url
    await execute(url, "alter table perdure_steps add check (output <> '\"forbidden\"')")
    gate = Gate()
    _gates.append(gate)
    watched = Watched(url)
    hows = [*["returns"] * NEIGHBOURS, "is refused", *["returns"] * NEIGHBOURS]
    async with runner_on(url, [ends], database=watched) as runner:
        client = runner.client
        handles = [await client.start(ends, how, run_id=f"{n:02}") for n, how in enumerate(hows)]
        await until(lambda: gate.waiting == len(hows), what="all runs in their step")
        gate.opened.set()
        refused = handles.pop(NEIGHBOURS)
        assert await asyncio.gather(*(h.wait(20) for h in handles)) == [7] * len(handles)
        with pytest.raises(DataRefused, match="commit"):
            await refused.wait(20)
        assert await status_of(client, refused.run_id) is RunStatus.FAILED
        assert [entry.name for entry in await client.journal(refused.run_id)] == ["pass_gate#0"]
    failed = [batch for batch in watched.batches if isinstance(batch.error, DataRefused)]
    assert [batch.run_ids for batch in failed][-1] == {refused.run_id}


@pytest.mark.req("WF1", "ST12")
async def test_starts_that_share_a_statement_with_one_the_database_refuses(
    migrated_postgres_url: str,
):
    url = migrated_postgres_url
    await execute(url, "alter table perdure_runs add check (subject <> 'nobody')")
    async with client_on(url, [doubled]) as client:
        starts = [client.start(doubled, n, run_id=f"{n:02}") for n in range(NEIGHBOURS)]
        starts.insert(3, client.start(doubled, 1, run_id="bad", subject="nobody"))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert isinstance(outcomes.pop(3), DataRefused)
        assert [getattr(handle, "status", handle) for handle in outcomes] == [
            "running"
        ] * NEIGHBOURS
        assert await client.get("bad") is None


# ---- locked by somebody else ------------------------------------------------------------------


Spans = list[tuple[float, float]]


@dataclass
class Pace:
    """When each step of each run began, on the monotonic clock."""

    began: dict[str, list[float]] = field(default_factory=dict)
    stop: bool = False

    def gaps(self, run_ids: set[str], spans: Spans) -> list[float]:
        """Seconds from step to step of these runs, for steps that began within a span."""
        return [
            after - before
            for run_id in run_ids
            for before, after in pairwise(self.began[run_id])
            if any(start <= before and after <= end for start, end in spans)
        ]


_paces: list[Pace] = []


@step
async def note_time(run_id: str) -> bool:
    """Takes as long as a quick call of something else."""
    pace = _paces[-1]
    await asyncio.sleep(0.02)
    pace.began.setdefault(run_id, []).append(time.monotonic())
    return pace.stop


@workflow(name="paced")
async def paced(ctx: Context, start: int) -> int:
    steps = 0
    while not await ctx.step(note_time, ctx.run_id):
        steps += 1
    return steps


@pytest.mark.req("CL4")
@pytest.mark.parametrize(
    ("tries", "rounds", "seconds"),
    [
        pytest.param(3, 8, 0.3, id="short"),
        pytest.param(2, 1, 30.0, id="30s", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
async def test_a_foreign_idle_transaction_on_one_runs_rows(
    migrated_postgres_url: str, tries: int, rounds: int, seconds: float
):
    """Steps of the other runs are as quick as without it, measured in turns in the same runs.

    Whatever an open transaction has locked, it also keeps the server from removing the row versions made since it
    began. Each step makes one: runs of thousands of empty steps would measure that, and not the lock.
    """
    url = migrated_postgres_url
    pace = Pace()
    _paces.append(pace)
    watched = Watched(url)
    async with runner_on(url, [paced], database=watched) as runner:
        handles = [await runner.client.start(paced, 0, run_id=f"{n:02}") for n in range(12)]
        locked, *others = [h.run_id for h in handles]
        await until(lambda: len(pace.began) == len(handles), what="all runs at work")
        figures = []
        for _ in range(tries):
            free, held = await in_turns(url, locked, rounds, seconds)
            without, beside = pace.gaps(set(others), free), pace.gaps(set(others), held)
            figures.append(f"{milliseconds(without)}; beside a locked run: {milliseconds(beside)}")
            print(f"without: {figures[-1]}")
            stood_still = max(pace.gaps({locked}, [(free[0][0], free[-1][1])]))
            assert stood_still >= seconds * 0.8, "the lock had no effect"
            if percentile(beside, 0.99) <= 1.5 * percentile(without, 0.99):
                break  # other work of the machine may have spoiled a try before
        else:
            raise AssertionError(figures)
        pace.stop = True
        assert all(await asyncio.gather(*(h.wait(30) for h in handles)))


async def in_turns(url: str, locked: str, rounds: int, seconds: float) -> tuple[Spans, Spans]:
    """Spans of so many seconds, without the lock and with it in turns."""
    free, held = [], []
    for _ in range(rounds):
        free.append(await span(seconds))
        async with rows_held(url, locked, "fences", "wakes"):
            held.append(await span(seconds))
    free.append(await span(seconds / 2))
    return free, held


@workflow(name="rests")
async def rests(ctx: Context, timed: bool) -> str:
    await ctx.step(pass_gate)
    if timed:
        await ctx.sleep(3600)
    return str(await ctx.wait_signal("go"))


@pytest.mark.req("CL4", "SL2")
@pytest.mark.parametrize("timed", [False, True], ids=["wait", "sleep"])
async def test_a_run_that_cannot_park_for_a_foreign_lock_does_not_spin(
    migrated_postgres_url: str, timed: bool
):
    """Its wake row is locked, so each park is refused: it tries again ever more slowly, and gets its signal later."""
    url = migrated_postgres_url
    gate = Gate()
    _gates.append(gate)
    watched = Watched(url)
    async with runner_on(url, [rests], database=watched, park_after=0.02) as runner:
        handle = await runner.client.start(rests, timed, run_id="resting")
        await until(lambda: gate.waiting == 1, what="the run in its step")
        async with rows_held(url, "resting", "wakes"):
            gate.opened.set()
            await until(lambda: watched.verdicts(Verdict.PARK_REFUSED) > 0, what="a refused park")
            before = len(watched.batches)
            await span(1.0)
            tries = len(watched.batches) - before
        print(f"tries to park within a second: {tries}")
        assert 1 <= tries <= 20
        await until_status(runner.client, "resting", RunStatus.SUSPENDED)
        if not timed:
            await handle.signal("go", "gone")
            assert await handle.wait(20) == "gone"


async def span(seconds: float) -> tuple[float, float]:
    """Let so much time pass: the time is what is measured here, nothing is waited for."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return began, time.monotonic()
