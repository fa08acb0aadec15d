"""Many starts in one call: an outcome for each payload, in few commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import (
    Client,
    Context,
    DatabaseUnavailable,
    InputError,
    InvalidName,
    RunIdConflict,
    Settings,
    UnknownOutcome,
    WorkflowDefinition,
    WorkflowPayloadError,
    workflow,
)
from perdure.storage.model import NewRun, RunStatus, StartOutcome
from tests.harness.proxy import PostgresProxy
from tests.integration.in_process import client_on, port_and_name, runner_on

pytestmark = pytest.mark.req("WF1", "WF2")


@workflow(name="doubles")
async def doubles(ctx: Context, number: int) -> int:
    return 2 * number


@workflow(name="keyed", idempotency_key=lambda word: word.lower())
async def keyed(ctx: Context, word: str) -> str:
    return word


@workflow(name="other")
async def other(ctx: Context, word: str) -> str:
    return word


KNOWN: list[WorkflowDefinition[Any, Any]] = [doubles, keyed, other]


def chunks_of(client: Client) -> list[int]:
    """How many starts each commit of this client has, from now on."""
    store, sizes = client._parts.store, list[int]()
    start = store.start_runs

    async def start_runs(runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        sizes.append(len(runs))
        return await start(runs)

    store.start_runs = start_runs  # type: ignore[method-assign]
    return sizes


async def test_each_payload_has_its_outcome(migrated_url: str) -> None:
    async with client_on(migrated_url, KNOWN) as client:
        await client.start(keyed, "before")
        await client.start(other, "elsewhere", run_id="taken")
        words: list[Any] = ["One", "two", "ONE", "before", 4, "taken"]
        started = await client.start_many(keyed, words, tags=["bulk"])
        assert [(s.created, type(s.error)) for s in started] == [
            (True, type(None)),
            (True, type(None)),
            (False, type(None)),  # the key of the first
            (False, type(None)),  # made before
            (False, WorkflowPayloadError),
            (True, type(None)),
        ]
        assert started[0].handle is not None
        assert started[2].handle is not None
        assert started[0].handle.run_id == started[2].handle.run_id
        info = await started[0].handle.poll()
        assert info is not None
        assert info.tags == "bulk"

        ids = ["taken", "mine", ""]
        own = await client.start_many("keyed", ["x", "y", "z"], run_ids=ids)
        assert [type(s.error) for s in own] == [RunIdConflict, type(None), InvalidName]
        assert [s.handle.run_id for s in own if s.handle is not None] == ["mine"]
        assert await client.start_many(doubles, []) == []


async def test_what_fits_none_of_them_is_raised(migrated_sqlite_url: str) -> None:
    async with client_on(migrated_sqlite_url, KNOWN) as client:
        with pytest.raises(InputError, match="2 run_ids for 1 payloads"):
            await client.start_many(doubles, [1], run_ids=["a", "b"])
        with pytest.raises(InputError, match="run_ids, one for each"):
            await client.start_many(doubles, [1], run_id="a")
        with pytest.raises(TypeError, match="no option"):
            await client.start_many(doubles, [1], prio=3)  # type: ignore[call-overload]
        assert await client.list() == []


async def test_chunks_end_at_rows_and_bytes_and_are_told(migrated_url: str) -> None:
    async with client_on(migrated_url, KNOWN) as client:
        sizes, told = chunks_of(client), list[tuple[int, int]]()
        started = await client.start_many(
            doubles, range(1_200), progress=lambda done, total: told.append((done, total))
        )
        assert [s.created for s in started] == [True] * 1_200
        assert sorted(sizes) == [200, 500, 500]
        assert len(told) == 3
        assert told[-1] == (1_200, 1_200)
        assert len({s.handle.run_id for s in started if s.handle}) == 1_200

        sizes.clear()
        large = await client.start_many(keyed, [str(n) + "x" * 1_500_000 for n in range(5)])
        assert all(s.created for s in large)
        assert sorted(sizes) == [1, 2, 2]
        counts = await client._parts.store.count_runs()
        assert counts == {"pending": 1_205}


async def test_what_progress_raises_ends_the_call(migrated_url: str) -> None:
    async with client_on(migrated_url, KNOWN) as client:
        sizes = chunks_of(client)

        def enough(done: int, total: int) -> None:
            raise LookupError(f"{done} of {total} will do")

        with pytest.raises(LookupError, match=r"^500 of 10000 will do$"):
            await client.start_many(doubles, range(10_000), progress=enough)
        assert len(sizes) <= 4, "chunks under way are not stopped, others not sent"


async def test_runs_of_a_pod_are_born_claimed_as_far_as_there_are_slots(migrated_url: str) -> None:
    async with runner_on(migrated_url, KNOWN, slots=20) as runner:
        started = await runner.client.start_many(doubles, range(300))
        results = await asyncio.gather(*(s.handle.wait(30) for s in started if s.handle))
        assert results == [2 * n for n in range(300)]
        assert runner.session.engine.at_work == 0


@pytest.mark.req("CL11")
async def test_a_lost_answer_is_made_good_and_an_outage_ends_the_call(
    migrated_postgres_url: str,
) -> None:
    port, name = port_and_name(migrated_postgres_url)
    async with (
        PostgresProxy(port) as proxy,
        Client(Settings(db=proxy.url(name), storage_deadline=1.0), workflows=KNOWN) as client,
    ):
        ids = [f"run-{n}" for n in range(600)]
        proxy.cut(name="start", where="after_commit")
        started = await client.start_many(doubles, range(600), run_ids=ids)
        assert [(s.created, s.error) for s in started] == [(True, None)] * 600

        lost = proxy.cut(name="start_fresh", where="after_commit")
        started = await client.start_many(doubles, range(600))
        assert [(s.created, s.error) for s in started] == [(True, None)] * 600
        assert lost.happened.is_set()

        sizes = chunks_of(client)
        async with proxy.refusing():
            late = [f"late-{n}" for n in range(2_000)]
            refused = await client.start_many(doubles, range(2_000), run_ids=late)
        assert {type(s.error) for s in refused} <= {DatabaseUnavailable, UnknownOutcome}
        assert any("not sent" in str(s.error) for s in refused)
        assert sum(sizes) <= 1_000 * len(sizes), (
            "no chunk is sent once the database is known to be away"
        )
        again = await client.start_many(doubles, range(2_000), run_ids=late)
        assert [s.error for s in again] == [None] * 2_000
        counts = await client._parts.store.count_runs()
        assert counts == {RunStatus.PENDING: 3_200}


class Deep:
    """A payload whose own code fails."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@workflow(name="keyed-by-its-parts", idempotency_key=lambda order: order["id"].strip())
async def keyed_by_its_parts(ctx: Context, order: Any) -> None: ...


async def test_a_key_that_raises_is_its_payload_s_fault_alone(migrated_sqlite_url: str) -> None:
    async with client_on(migrated_sqlite_url, [keyed_by_its_parts]) as client:
        orders: list[Any] = [{"id": "a"}, {}, {"id": None}, nested(5_000), Deep(), {"id": "b"}]
        started = await client.start_many(keyed_by_its_parts, orders)
        assert [each.error is None for each in started] == [True, False, False, False, False, True]
        assert isinstance(started[1].error, KeyError)
        assert isinstance(started[2].error, AttributeError)
        assert len(await client.list()) == 2


async def test_what_progress_raises_ends_the_call_in_order(migrated_url: str) -> None:
    async with runner_on(migrated_url, KNOWN, slots=20) as runner:

        def progress(done: int, total: int) -> None:
            raise LookupError("no bar")

        with pytest.raises(LookupError, match="no bar"):  # as it is, not in a group
            await runner.client.start_many(doubles, range(5_000), progress=progress)
        counts = await runner.client._parts.store.count_runs()
        assert (
            500 <= sum(counts.values()) <= 2_000
        )  # what was under way has ended, no more was sent
        assert not runner.session.engine.births.claims
