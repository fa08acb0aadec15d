"""What careless applications do: each run ends as it deserves, nothing is lost, and the runs beside it notice nothing.

The application is in `apps.careless`; each test runs it on a database in memory, on a SQLite file and on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure import Client, RunStatus
from perdure.runtime.errors import ClientClosed, RunEnded
from tests.harness.pods import Pods
from tests.harness.waiting import until
from tests.integration.apps import careless
from tests.integration.in_process import client_on, runner_on, status_of, until_status


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "sqlite:///:memory:"
    found: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def lasting_url(request: pytest.FixtureRequest) -> str:
    """A database that outlives its runner."""
    found: str = request.getfixturevalue(f"migrated_{request.param}_url")
    return found


def runner(url: str, *workflows: Any, **settings: Any):
    storage = "memory" if url.startswith("sqlite") else "sql"
    known: list[Any] = [careless.well_behaved, *workflows] if workflows else careless.WORKFLOWS
    return runner_on(url, known, **{"runner_storage": storage, **settings})


@asynccontextmanager
async def neighbours(client: Client) -> AsyncIterator[None]:
    """Well-behaved runs, one after the other, before, during and after the block; all of them succeed."""
    over = asyncio.Event()
    ended = 0

    async def live() -> None:
        nonlocal ended
        while not over.is_set() or ended == 0:
            assert await client.run(careless.well_behaved, 20, timeout=60) == 41
            ended += 1

    living = asyncio.create_task(live())
    await until(lambda: ended, what="a neighbour's end")
    yield
    over.set()
    await living


async def outcome(client: Client, workflow: Any, payload: Any = None) -> str:
    """The result or the error as text, with its status."""
    given = () if payload is None else (payload,)
    handle = await client.start(workflow, *given)
    try:
        text = str(await handle.wait(30))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return f"{await status_of(client, handle.run_id)} {text}"


async def outcomes(client: Client, cases: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    """What does not come out as its case says, all at once: name → what came instead. A case: run, payload, parts."""

    async def judge(run: Any, payload: Any, *parts: str) -> str | None:
        found = await outcome(client, run, payload)
        return None if all(part in found for part in parts) else found

    found = await asyncio.gather(*(judge(*case) for case in cases.values()))
    return {name: text for name, text in zip(cases, found, strict=True) if text is not None}


# ---- what steps do ----------------------------------------------------------------------------

STEPS = {
    "exits": ["RecordedError", "SystemExit: 3"],
    "exits_in_a_thread": ["RecordedError", "SystemExit: 3"],
    "interrupts": ["KeyboardInterrupt"],
    "interrupts_in_a_thread": ["KeyboardInterrupt"],
    "closes_itself": ["GeneratorExit"],
    "cancels_itself": ["CancelledError"],
    "awaits_what_it_cancelled": ["CancelledError"],
    "runs_out_of_items": ["RuntimeError", "StopIteration"],
    "runs_out_of_items_in_a_thread": ["RuntimeError", "step 'runs_out_of_items_in_a_thread'"],
    "recurses": ["RecursionError"],
    "runs_out_of_memory": ["MemoryError: all of it"],
    "raises_without_text": ["Mute", "its __str__ raised ValueError"],
    "raises_what_exits_when_read": ["Hostile", "reading it raised"],
    "raises_what_exits_when_judged": ["Hostile", "reading it raised"],
    "raises_a_book": ["ValueError: xxxx", "30,000,000 bytes in all"],
    "raises_a_long_chain": ["ValueError: 2999"],
    "raises_groups_in_groups": ["ExceptionGroup: g"],
    "has_a_predicate_that_exits": ["ValueError: judge me", "predicate", "SystemExit"],
    "returns_an_object": ["StepResultError", "'returns_an_object'", "JSON cannot hold"],
    "returns_a_coroutine": ["StepResultError", "awaitable"],
    "returns_a_generator": ["StepResultError", "generator"],
    "returns_itself_inside": ["StepResultError", "holds itself"],
    "leaves_a_task_that_fails": ["ok None"],
    "swallows_its_time_limit": ["ok 'late'"],
    "blocks_the_loop": ["ok None"],
}


@pytest.mark.req("WF1", "ST2")
async def test_steps_that_misbehave_fail_alone(url: str) -> None:
    cases = {name: (careless.one_step, name, "succeeded", *parts) for name, parts in STEPS.items()}
    async with runner(url) as used, neighbours(used.client):
        assert await outcomes(used.client, cases) == {}


def test_every_careless_step_has_a_case() -> None:
    assert set(careless.STEPS) - {"stubborn"} == set(STEPS)


# ---- what bodies do ---------------------------------------------------------------------------

BODIES = {
    "exits": ["failed", "SystemExit: 3"],
    "interrupts": ["failed", "KeyboardInterrupt"],
    "closes-itself": ["failed", "GeneratorExit"],
    "cancels-itself": ["failed", "nobody cancelled the run"],
    "recurses": ["failed", "RecursionError"],
    "runs-out-of-memory": ["failed", "MemoryError"],
    "raises-without-text": ["failed", "its __str__ raised ValueError"],
    "raises-a-book": ["failed", "10,000,000 bytes in all"],
    "returns-a-generator": ["failed", "WorkflowResultError", "generator"],
    "returns-a-step": ["failed", "WorkflowResultError", "coroutine"],
    "task-exits": ["failed", "SystemExit: 1"],
    "callback-exits": ["succeeded 1"],
    "bare-except-in-a-loop": ["succeeded 50"],
    "sleeps-in-the-loop": ["succeeded 1"],
    "threads": ["failed", "RefusedInBody", "put it in a step"],
    "another-loop": ["failed", "RuntimeError"],
    "connects": ["failed", "RefusedInBody", "create_connection"],
    "starts-a-process": ["failed", "RefusedInBody", "subprocess_exec"],
    "context-in-a-step": ["failed", "RefusedInBody", "outside of its workflow body"],
    "context-in-a-thread": ["failed", "RefusedInBody", "outside of its workflow body"],
    "context-as-an-argument": ["failed", "StepInputError", "argument 'given'"],
    "step-of-a-coroutine": ["failed", "DefinitionError", "ctx.step was given a coroutine"],
    "step-of-nothing": ["failed", "DefinitionError", "which is no function"],
    "step-of-a-lambda": ["failed", "InvalidName", "'<lambda>'"],
    "wrong-arguments": ["failed", "TypeError", "step 'number'", "too many positional arguments"],
    "bad-signal-name": ["failed", "InvalidName", "'a#b'"],
    "bad-duration": ["failed", "InvalidDuration", "'a while'"],
    "forgets-a-step": ["succeeded 3"],
    "awaits-twice": ["failed", "cannot reuse already awaited coroutine"],
    "waits-for-a-stranger": ["failed", "attached to a different loop"],
    "deep-groups": ["succeeded 1"],
    "deep-gathers-that-fail": ["failed", "ValueError: deep"],
    "deep-awaits": ["succeeded 1"],
    "stops-iterating": ["succeeded 2"],
    "changes-its-payload": ["succeeded {'a': [1, 2]}"],
    "changes-a-list-between-calls": ["succeeded [[0], [0, 1], [0, 1, 2]]"],
}


@pytest.mark.req("WF5", "WF6", "WF19")
async def test_bodies_that_misbehave_fail_alone(url: str) -> None:
    careless.STRANGER.append(asyncio.get_running_loop().create_future())
    cases = {
        name: (careless.BODIES[name], {"a": [1]} if name == "changes-its-payload" else None, *parts)
        for name, parts in BODIES.items()
    }
    async with runner(url) as used, neighbours(used.client):
        assert await outcomes(used.client, cases) == {}
    careless.STRANGER.clear()


def test_every_careless_body_has_a_case() -> None:
    assert set(careless.BODIES) == set(BODIES)


@pytest.mark.req("WF5", "WF7")
async def test_steps_that_change_their_arguments_change_no_replay(lasting_url: str) -> None:
    """A step's own objects: what it does to them, the body sees in no life, so that all lives are alike."""
    async with runner(lasting_url, careless.shares, park_after=0.05) as used:
        handle = await used.client.start(careless.shares, {"a": [1]})
        await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
    async with runner(lasting_url, careless.shares) as used:
        await used.client.signal(handle.run_id, "go")
        assert await used.client.wait(handle.run_id, 20) == [{"a": [1]}, [1, 2], [1]]


# ---- how much of it ---------------------------------------------------------------------------


@pytest.mark.req("WF6")
@pytest.mark.parametrize(
    "steps", [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_a_run_of_many_steps_and_its_replay(lasting_url: str, steps: int) -> None:
    async with runner(lasting_url, careless.long) as used, neighbours(used.client):
        handle = await used.client.start(careless.long, steps)
        await until_entries(used.client, handle.run_id, steps)
    async with runner(lasting_url, careless.long) as used, neighbours(used.client):
        await used.client.signal(handle.run_id, "go")
        assert await used.client.wait(handle.run_id, 120) == steps
        assert len(await used.client.journal(handle.run_id)) == steps + 1


async def until_entries(client: Client, run_id: str, count: int) -> None:
    async def look() -> bool:
        return len(await client.journal(run_id)) >= count

    await until(look, what=f"{count} entries of {run_id}", deadline=500, interval=0.2)


@pytest.mark.req("WF6")
async def test_two_thousand_steps_at_once(url: str) -> None:
    async with runner(url, careless.wide) as used, neighbours(used.client):
        for kind in ("gather", "group"):
            assert await used.client.run(careless.wide, kind, timeout=60) == 2_000


@pytest.mark.req("ST12")
@pytest.mark.parametrize("steps", [30, pytest.param(150, marks=pytest.mark.slow)])
async def test_large_results_of_parallel_steps_come_in_parts(lasting_url: str, steps: int) -> None:
    """Each is under the limit; together they would outlast any statement's deadline, at every try."""
    async with runner(lasting_url, careless.heavy) as used, neighbours(used.client):
        handle = await used.client.start(careless.heavy, steps)
        await until_entries(used.client, handle.run_id, steps)
        assert [e.seq for e in await used.client.journal(handle.run_id)] == [*range(1, steps + 1)]
    async with runner(lasting_url, careless.heavy) as used, neighbours(used.client):
        await used.client.signal(handle.run_id, "go")
        assert await used.client.wait(handle.run_id, 120) == steps * careless.HEAVY


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("ST12")
async def test_large_payloads_and_results_of_many_runs(url: str) -> None:
    text = "x" * careless.HEAVY
    async with runner(url, careless.echoes) as used, neighbours(used.client):
        handles = await asyncio.gather(
            *(used.client.start(careless.echoes, text) for _ in range(150))
        )
        for handle in handles:
            assert await handle.wait(200) == text


@pytest.mark.req("SL2")
@pytest.mark.parametrize(
    "signals", [500, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_a_storm_of_signals_is_taken_in_order(url: str, signals: int) -> None:
    async with runner(url, careless.listens) as used:
        async with neighbours(used.client):
            handle = await used.client.start(careless.listens, signals)
            for first in range(0, signals, 100):
                await asyncio.gather(
                    *(
                        handle.signal("heard", number, id=str(number))
                        for number in range(first, first + 100)
                        for _ in range(2)
                    )
                )
        heard = await handle.wait(120)
    assert sorted(heard) == list(range(signals))
    hundreds = [number // 100 for number in heard]
    assert hundreds == sorted(hundreds)


@pytest.mark.req("WF2", "WF8")
@pytest.mark.parametrize(
    ("runs", "clients"),
    [
        (500, 5),
        pytest.param(5_000, 1, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(5_000, 20, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
async def test_many_starts_at_once(lasting_url: str, runs: int, clients: int) -> None:
    async with runner(lasting_url) as used, contextlib.AsyncExitStack() as stack:
        several = [
            await stack.enter_async_context(
                client_on(lasting_url, careless.WORKFLOWS, storage_deadline=20.0)
            )
            for _ in range(clients)
        ]
        async with neighbours(used.client):
            handles = await asyncio.gather(
                *(
                    several[n % clients].start(careless.well_behaved, n, run_id=f"many-{n}")
                    for n in range(runs)
                )
            )
            results = await asyncio.gather(*(handle.wait(200) for handle in handles))
        assert results == [2 * n + 1 for n in range(runs)]


@pytest.mark.req("WF2")
async def test_one_key_from_fifty_tasks_is_one_run(lasting_url: str) -> None:
    async with runner(lasting_url) as used, client_on(lasting_url) as other:
        clients = (used.client, other)
        handles = await asyncio.gather(
            *(clients[n % 2].start(careless.keyed, 7) for n in range(50))
        )
        assert len({handle.run_id for handle in handles}) == 1
        assert {await handle.wait(20) for handle in handles} == {7}
        assert (await other.start(careless.keyed, 7)).status == "replayed"
        assert len(await other.list(workflow="keyed")) == 1


# ---- names ------------------------------------------------------------------------------------

ODD_IDS = [
    "\U0001f600" * 50,
    "é",
    "e\u0301",
    "A",
    "a",
    "a/b#c>d",
    "..",
    "%",
    "_",
    "x" * 200,
    "'; drop table perdure_runs; --",
    "a\tb\nc",
    "\u200b",
    "\ufeffbom",
    "null",
]


@pytest.mark.req("WF7", "WF15", "WF18")
async def test_odd_ids_and_names_are_kept_byte_for_byte(url: str) -> None:
    async with runner(url, careless.named) as used:
        client = used.client
        for run_id in ODD_IDS:
            await client.start(
                careless.named, run_id, run_id=run_id, tenant=run_id, trace=run_id, subject=run_id
            )
        for run_id in reversed(ODD_IDS):
            assert await client.wait(run_id, 20) == run_id
            info = await client.get(run_id)
            assert info is not None
            assert info.run_id == run_id
            [step, _] = await client.journal(run_id)
            assert step.name.startswith(careless.LONG_NAME)
        assert {info.run_id for info in await client.list()} == set(ODD_IDS)
        assert [info.run_id for info in await client.list(id_prefix="%")] == ["%"]


# ---- cancels ----------------------------------------------------------------------------------


@pytest.mark.req("SL5")
async def test_cancels_at_awkward_moments(url: str) -> None:
    async with runner(url, *careless.CANCELLED, park_after=0.05) as used:
        client = used.client
        async with neighbours(client):
            unheard = [await client.start(careless.waits) for _ in range(50)]
            answers = await asyncio.gather(
                *(handle.cancel("first") for handle in unheard),
                *(handle.signal("go", 1) for handle in unheard),
                *(handle.cancel("second") for handle in unheard),
                return_exceptions=True,
            )
            assert {type(answer) for answer in answers} <= {type(None), RunEnded}
            for handle in unheard:
                await settled(client, handle.run_id)
            parked = [
                await client.start(workflow)
                for workflow in (careless.goes_on, careless.compensates, careless.waits)
            ]
            for handle in parked:
                await until_status(client, handle.run_id, RunStatus.SUSPENDED)
            await asyncio.gather(*(h.cancel(why) for h in parked for why in ("first", "first")))
            for handle in parked:
                assert await settled(client, handle.run_id) == (RunStatus.CANCELLED, "first")
                await handle.cancel("again, long after")


async def settled(client: Client, run_id: str) -> tuple[RunStatus, str | None]:
    with contextlib.suppress(Exception):
        await client.wait(run_id, 20)
    info = await client.get(run_id)
    assert info is not None
    assert info.status.final
    return info.status, info.reason


@pytest.mark.req("SL5", "WF19")
async def test_a_step_that_ignores_its_cancellation_holds_up_nobody(url: str) -> None:
    careless.freed().clear()
    async with runner(url, careless.calls_stubborn) as used:
        handle = await used.client.start(careless.calls_stubborn)
        await until(lambda: careless.AT_WORK, what="the step at work")
        await handle.cancel("enough")
        assert await settled(used.client, handle.run_id) == (RunStatus.CANCELLED, "enough")
        async with neighbours(used.client):
            assert careless.AT_WORK, "it goes on, and nobody listens to it"
        careless.freed().set()
        await until(lambda: not careless.AT_WORK, what="the step's own end")
        assert [e.kind for e in await used.client.journal(handle.run_id)] == ["cancel"]


async def test_a_body_that_ignores_its_cancel_goes_on_and_says_so(url: str) -> None:
    async with runner(url, careless.never_ends, park_after=0.05) as used:
        handle = await used.client.start(careless.never_ends)
        await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
        await handle.cancel("please")
        await until_entries(used.client, handle.run_id, 1)
        await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
        await handle.cancel("please!")
        assert await status_of(used.client, handle.run_id) is RunStatus.SUSPENDED


@pytest.mark.req("SL5")
async def test_a_body_that_never_waits_ends_when_it_is_cancelled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be told of nothing, so it ends without a word; until then the others have their turns."""
    monkeypatch.setattr("perdure.runtime.body.body._SLICES_UNTIL_WARNING", 50)
    async with runner(url, careless.spins) as used:
        handle = await used.client.start(careless.spins)
        async with neighbours(used.client):
            await until_status(used.client, handle.run_id, RunStatus.RUNNING)
        await handle.cancel("enough")
        assert await settled(used.client, handle.run_id) == (RunStatus.CANCELLED, "enough")
        assert [entry.kind for entry in await used.client.journal(handle.run_id)] == ["cancel"]
        assert "left-pending" in [event.type for event in await used.client.events(handle.run_id)]


@pytest.mark.req("SL5")
async def test_a_body_too_deep_to_be_cancelled_fails(url: str) -> None:
    async with runner(url, careless.nested, park_after=0.05) as used:
        deep, shallow = [await used.client.start(careless.nested, depth) for depth in (2_000, 50)]
        for handle in (deep, shallow):
            await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
        async with neighbours(used.client):
            await asyncio.gather(deep.cancel("all"), shallow.cancel("all"))
            with pytest.raises(RecursionError):
                await deep.wait(20)
            assert await settled(used.client, deep.run_id) == (RunStatus.FAILED, None)
            assert await settled(used.client, shallow.run_id) == (RunStatus.CANCELLED, "all")


# ---- stops, restarts, other code --------------------------------------------------------------


@pytest.mark.req("CL5", "CL6")
async def test_a_runner_stopped_in_the_middle_of_everything(lasting_url: str) -> None:
    """Without a drain: everything in memory is dropped. What had ended before is not done again."""
    careless.DONE.clear()
    run_ids = [f"run-{n}" for n in range(60)]
    async with runner(lasting_url, careless.counts) as used:
        client = used.client
        await asyncio.gather(*(client.start(careless.counts, r, run_id=r) for r in run_ids))
        await until(lambda: len(careless.DONE) > 100, what="some of the work done")
    before = collections.Counter(careless.DONE)
    assert sum(before.values()) < 60 * 5
    async with runner(lasting_url, careless.counts) as used, neighbours(used.client):
        for run_id in run_ids:
            assert await used.client.wait(run_id, 60) == 5
            entries = await used.client.journal(run_id)
            assert [entry.seq for entry in entries] == [1, 2, 3, 4, 5]
    again = collections.Counter(careless.DONE)
    assert set(again) == {(run_id, n) for run_id in run_ids for n in range(5)}
    assert max(again.values()) <= 2


@pytest.mark.req("CL5", "SL7")
async def test_code_changed_under_a_run_and_put_back(lasting_url: str) -> None:
    first, other = careless.two_versions()
    async with runner(lasting_url, first, park_after=0.05) as used:
        handle = await used.client.start(first)
        await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
    async with runner(lasting_url, other) as used, neighbours(used.client):
        await used.client.signal(handle.run_id, "go")
        await until_reason(used.client, handle.run_id, "nondeterminism")
        assert (
            "put the old code back, then resume" in (await used.client.why(handle.run_id)).summary
        )
        [event] = [
            event
            for event in await used.client.events(handle.run_id)
            if event.type == "nondeterminism-suspected"
        ]
        assert "number#0" in str(event.detail)
        assert "other#0" in str(event.detail)
    async with runner(lasting_url, first) as used, neighbours(used.client):
        assert await status_of(used.client, handle.run_id) is RunStatus.SUSPENDED
        await used.client.resume(handle.run_id)
        assert await used.client.wait(handle.run_id, 20) == 2


async def until_reason(client: Client, run_id: str, reason: str) -> None:
    async def look() -> bool:
        info = await client.get(run_id)
        return info is not None and info.reason == reason

    await until(look, what=f"{run_id} on hold for {reason}", deadline=20)


@pytest.mark.req("WF4")
async def test_a_reloaded_module_runs_what_the_old_one_started(lasting_url: str) -> None:
    old, new = careless.loaded_twice()
    assert old.error is not new.error
    async with runner(lasting_url, old.workflow, park_after=0.05) as used:
        handle = await used.client.start(old.workflow, old.payload(3))
        await until_status(used.client, handle.run_id, RunStatus.SUSPENDED)
    async with runner(lasting_url, new.workflow) as used:
        await used.client.signal(handle.run_id, "go")
        with pytest.raises(new.error, match="3"):
            await used.client.wait(handle.run_id, 20)


# ---- clients ----------------------------------------------------------------------------------


async def test_a_client_that_is_not_open_says_so(lasting_url: str) -> None:
    client = Client(lasting_url, workflows=careless.WORKFLOWS)
    calls = [
        lambda: client.start(careless.well_behaved, 1),
        lambda: client.get("x"),
        lambda: client.wait("x"),
        lambda: client.handle("x").wait(),
        lambda: client.list(),
        lambda: client.signal("x", "go"),
        lambda: client.cancel("x"),
        lambda: client.retry("x"),
        lambda: client.resume("x"),
        lambda: client.why("x"),
    ]
    for call in calls:
        with pytest.raises(ClientClosed, match="async with"):
            await asyncio.wait_for(call(), 5)
    async with client:
        assert await client.get("x") is None
        handle = await client.start(careless.waits)
        waiting = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0)
        elsewhere: list[BaseException] = []

        def use_elsewhere() -> None:
            try:
                asyncio.run(asyncio.wait_for(client.start(careless.waits), 5))
            except BaseException as error:
                elsewhere.append(error)

        thread = threading.Thread(target=use_elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert "another event loop" in str(elsewhere[0])
    with pytest.raises(ClientClosed, match="closed meanwhile"):
        await asyncio.wait_for(waiting, 5)
    for call in calls:
        with pytest.raises(ClientClosed):
            await asyncio.wait_for(call(), 5)


@pytest.mark.req("WF3")
async def test_a_bad_start_harms_no_start_of_the_same_moment(lasting_url: str) -> None:
    async with client_on(lasting_url, careless.WORKFLOWS) as client:
        bad: list[dict[str, Any]] = [
            {"tenant": 5},
            {"subject": "\0"},
            {"trace": "\ud800"},
            {"tags": [b"x"]},
            {"run_id": ""},
        ]
        starts = [client.start(careless.waits, **each) for each in bad]
        good = [client.start(careless.well_behaved, n) for n in range(20)]
        answers = await asyncio.gather(*starts, *good, return_exceptions=True)
        assert [isinstance(answer, Exception) for answer in answers] == [True] * 5 + [False] * 20
        assert len(await client.list()) == 20


# ---- whole processes --------------------------------------------------------------------------


@pytest.mark.req("CL5")
async def test_a_pod_of_a_careless_application(lasting_url: str, tmp_path) -> None:
    """Background tasks that exit, a step that ignores its cancellation, a thread that never ends: the pod lives on, and
    stops when it is told to."""
    storage = "memory" if lasting_url.startswith("sqlite") else "sql"
    env = {"PERDURE_RUNNER_STORAGE": storage, "PERDURE_GRACE": "1"}
    with Pods("tests.integration.apps.careless:app", lasting_url, tmp_path, env=env) as pods:
        pod = await pods.ready()
        async with client_on(lasting_url, careless.WORKFLOWS) as client:
            async with neighbours(client):
                for what in careless.EXITS:
                    found = await outcome(client, careless.exits_beside, what)
                    assert found.startswith("succeeded"), (what, found)
            stuck = [
                await client.start(careless.calls_stubborn),
                await client.start(careless.calls_endless_thread),
            ]
            await pod.wait_log("endless thread")
            await pod.wait_log("stubborn step")
            await stuck[0].cancel("enough")
            await settled(client, stuck[0].run_id)
            assert pod.log.count("tried to end the process; it goes on") >= 4
            pod.terminate()
            assert await pod.wait_end(deadline=15) == 4
            assert await status_of(client, stuck[1].run_id) in (
                RunStatus.RUNNING,
                RunStatus.SUSPENDED,
                RunStatus.PENDING,
            )


@pytest.mark.req("CL3", "CL11")
async def test_a_step_that_blocks_its_pod_for_several_leases_loses_nothing(
    migrated_postgres_url: str, tmp_path
) -> None:
    """The lease is renewed beside the blocked loop: nobody takes anything over, and the step runs once."""
    env = {"PERDURE_LEASE": "1", "PERDURE_RENEWAL": "0.3"}
    url = migrated_postgres_url
    with Pods("tests.integration.apps.careless:app", url, tmp_path, env=env) as pods:
        await asyncio.gather(pods.ready(), pods.ready())
        async with client_on(url, careless.WORKFLOWS) as client:
            handle = await client.start(careless.calls_blocking, 4.0)
            blocked = await until(
                lambda: [pod for pod in pods.all if "blocking the loop" in pod.log],
                what="the step at work",
            )
            assert (await blocked[0].http("/livez")) == (200, "ok\n")
            await blocked[0].wait_http("/readyz", status=503, deadline=3)
            assert "step blocks_for of run " in str(await blocked[0].http("/readyz"))
            await handle.wait(20)
            assert [pod.log.count("blocking the loop") for pod in blocked] == [1]
            runners = (await client.cluster()).runners
            assert sorted(runner.replica_id for runner in runners) == ["pod-1", "pod-2"]
            assert all("going on as a new runner" not in pod.log for pod in pods.all)
            await blocked[0].wait_http("/readyz")
