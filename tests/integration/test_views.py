"""Everyday questions in plain SQL, the same on both engines: the views people read (DB1)."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from perdure.storage.connect import DatabaseSettings, migrate
from perdure.storage.model import EntryKind, Finish, MessageKind, Park, Reason, RunEvent, RunStatus
from tests.contract.world import World, entry, write
from tests.integration.postgres_world import world_of

pytestmark = pytest.mark.req("DB1")

AT = 1_700_000_000.000001
ERROR = json.dumps({"type": "ProviderDown", "module": "shop", "message": "no answer"})


@pytest.fixture
def url(db_url: str) -> str:
    migrate(DatabaseSettings(db_url))
    return db_url


async def ask(url: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query typed by somebody with a SQL shell."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            return file.execute(sql).fetchall()
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(sql)]
    finally:
        await connection.close()


async def lived(world: World) -> None:
    """Runs in every state: one failed, one ended well, one parked, one held, one running, one new, one cancelled."""
    runner = await world.runner(lease=60.0, replica="pod-1")
    names = ("failed", "good", "parked", "held", "running", "cancelled")
    await world.start(*names)
    runs = await runner.claim()
    step = replace(entry(1), key="0/1/charge-4#12", input="[4]", started_at=AT - 0.25)
    timer = replace(entry(2), kind=EntryKind.TIMER, key="0/sleep#0")
    attempt = entry(3, kind=EntryKind.ATTEMPT, status="error", output="1700000060000000")
    failure = Finish(RunStatus.FAILED, error=ERROR)
    await world.deliver("parked", "m1")
    await world.send("running", "c1", kind=MessageKind.CANCEL)
    await runner.commit(
        write(runs["failed"], entries=[step, timer, attempt], outcome=failure),
        write(runs["good"], outcome=Finish(RunStatus.SUCCEEDED, result="1")),
        write(runs["parked"], events=[RunEvent("timer-set", AT, "0/sleep#0")], outcome=Park(AT + 9e8, 1, Reason.TIMER)),
        write(runs["held"], outcome=Park(None, 0, Reason.CRASH_LOOP)),
        write(runs["running"], entries=[entry(1)]),
        write(runs["cancelled"], outcome=Finish(RunStatus.CANCELLED, reason="changed mind")),
    )  # fmt: skip
    await world.start("new")


async def test_lists_of_runs_show_one_status_whatever_the_table(url: str) -> None:
    async with world_of(url) as world:
        await lived(world)
        rows = await ask(
            url, "select run_id, status, reason, hold from perdure_run_list order by run_id"
        )
        assert rows == [
            ("cancelled", "cancelled", "changed mind", None),
            ("failed", "failed", None, None),
            ("good", "succeeded", None, None),
            ("held", "suspended", "crash-loop", "crash-loop"),
            ("new", "pending", None, None),
            ("parked", "suspended", "timer", None),
            ("running", "running", None, None),
        ]
        rows = await ask(
            url,
            "select cast(wake_at as text), started_at is not null, finished_at is not null"
            " from perdure_run_list where run_id = 'parked'",
        )
        assert rows[0][0].startswith("2052-05-")
        assert rows[0][0][18:].startswith("0.000001")
        assert [bool(value) for value in rows[0][1:]] == [True, False]


async def test_recent_failures(url: str) -> None:
    async with world_of(url) as world:
        await lived(world)
        rows = await ask(
            url,
            "select run_id, workflow, error_type, error_message from perdure_run_list"
            " where status = 'failed' order by finished_at desc limit 20",
        )
    assert rows == [("failed", "tests.flow", "ProviderDown", "no answer")]


async def test_runs_per_replica(url: str) -> None:
    async with world_of(url) as world:
        await lived(world)
        rows = await ask(
            url,
            "select o.replica_id, count(*) from perdure_run_list r join perdure_runners o on o.runner_id = r.runner_id"
            " where r.status = 'running' group by o.replica_id",
        )
    assert rows == [("pod-1", 1)]


async def test_how_long_steps_take(url: str) -> None:
    async with world_of(url) as world:
        await lived(world)
        rows = await ask(
            url,
            "select step_name, attempt, status, input, duration_ms > 250 from perdure_step_list"
            " where kind = 'step' and run_id = 'failed'",
        )
        assert [(*row[:4], bool(row[4])) for row in rows] == [("charge-4", 1, "ok", "[4]", True)]
        rows = await ask(
            url, "select cast(next_retry_at as text) from perdure_step_list where kind = 'attempt'"
        )
        assert rows[0][0].startswith("2023-11-14 22:14:20")


async def test_what_happened_to_a_run(url: str) -> None:
    async with world_of(url) as world:
        await lived(world)
        rows = await ask(
            url,
            "select run_id, type, detail from perdure_run_timeline where run_id in ('failed', 'parked')"
            " order by run_id, type",
        )
        assert rows == [
            ("failed", "run-failed", "no answer"),
            ("failed", "run-started", None),
            ("failed", "timer-fired", "0/sleep#0"),
            ("parked", "run-started", None),
            ("parked", "signal-sent", "go"),
            ("parked", "timer-set", "0/sleep#0"),
        ]
        events = await world.runs.read_events("parked")
        assert [event.type for event in events] == ["timer-set", "run-started", "signal-sent"]
        assert events[0] == RunEvent("timer-set", AT, "0/sleep#0")


async def test_a_signal_is_on_the_timeline_after_its_mailbox_is_gone(url: str) -> None:
    async with world_of(url) as world:
        runner = await world.runner(lease=60.0)
        await world.start("r1")
        run = await runner.claim_one("r1")
        await world.deliver("r1", "m1")
        took = replace(entry(1), kind=EntryKind.SIGNAL, key="0/go#0", started_at=AT - 1)
        await runner.commit(write(run, entries=[took], consumed=[("m1", 1)]))
        types = [event.type for event in await world.runs.read_events("r1")]
        assert sorted(types) == ["run-started", "signal-received", "signal-sent"]
        await runner.commit(
            write(run, revision=run.revision + 1, outcome=Finish(RunStatus.SUCCEEDED))
        )
        events = await world.runs.read_events("r1")
        assert [event.type for event in events][:2] == ["signal-sent", "signal-received"]
        assert sorted(e.type for e in events)[:2] == ["run-started", "run-succeeded"]
