"""What `perdure doctor` looks at, on each engine; on PostgreSQL each fault is made on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from perdure.storage.clock import SystemClock
from perdure.storage.connect import upkeep
from perdure.storage.examination import HeldRun
from perdure.storage.model import Reason
from perdure.storage.sqlite import SqliteDatabase
from perdure.storage.sqlite.upkeep import SqliteUpkeepStore
from perdure.storage.upkeep import UpkeepStore
from tests.contract.world import WORKFLOW, World, entry, write

pytestmark = pytest.mark.req("DB11")
HOUR = 3_600


@pytest.fixture
async def store(world: World) -> AsyncIterator[UpkeepStore]:
    database = world.database
    opened = (
        SqliteUpkeepStore(database)
        if isinstance(database, SqliteDatabase)
        else upkeep(world.settings, clock=SystemClock())
    )
    await opened.open()
    yield opened
    await opened.close()


async def ago(world: World, table: str, column: str, run_id: str) -> None:
    """Make an instant an hour older."""
    older = (
        f"{column} - {HOUR}000000"
        if isinstance(world.database, SqliteDatabase)
        else f"{column} - interval '1 hour'"
    )
    await world.execute(f"update perdure_{table} set {column} = {older} where run_id = '{run_id}'")


async def test_runs_that_do_not_move_are_found_and_others_are_not(
    world: World, store: UpkeepStore
) -> None:
    runner = await world.runner()
    await world.start("running", "stepping", "parked", "held", "lost-timer", "sleeps")
    runs = await runner.claim()
    await runner.park(runs["parked"], wake_at=None, reason=Reason.SIGNAL)
    await runner.park(runs["held"], reason=Reason.CRASH_LOOP)
    await runner.park(runs["lost-timer"], wake_at=None, reason=Reason.TIMER)
    await runner.park(runs["sleeps"], wake_at=await world.now() + 60)
    for run_id in runs:
        await ago(world, "fences", "claimed_at", run_id)
    await runner.commit(write(runs["stepping"], entries=[entry(1)]))
    await world.start("overdue", "fresh")
    await ago(world, "wakes", "wake_at", "overdue")
    facts = await store.run_facts(idle=1_800.0, limit=10)
    assert {(run.run_id, run.why) for run in facts.stuck} == {
        ("running", "running"),
        ("lost-timer", "timer"),
        ("overdue", "due"),
    }
    assert all(HOUR - 60 < run.idle < HOUR + 60 for run in facts.stuck)
    assert list(facts.held) == [HeldRun("held", WORKFLOW, "crash-loop")]
    assert (facts.held_count, dict(facts.workflows)) == (1, {WORKFLOW: 8})
    assert len((await store.run_facts(idle=1_800.0, limit=2)).stuck) == 2
    assert (await store.run_facts(idle=2.0 * HOUR, limit=9)).stuck == []


async def test_held_runs_are_counted_beyond_those_named(world: World, store: UpkeepStore) -> None:
    for number in range(5):
        await world.start(f"r{number}")
        await world.runs.hold_run(f"r{number}", batch_id=number + 1, reason=None)
    facts = await store.run_facts(idle=60.0, limit=3)
    assert ([run.run_id for run in facts.held], facts.held_count) == (["r0", "r1", "r2"], 5)


async def test_nothing_is_found_in_an_empty_database(world: World, store: UpkeepStore) -> None:
    facts = await store.run_facts(idle=1.0, limit=3)
    assert (list(facts.stuck), list(facts.held), facts.held_count) == ([], [], 0)
    assert dict(facts.workflows) == {}


async def test_how_commits_are_kept(world: World, store: UpkeepStore) -> None:
    facts = await store.server_facts(open_for=60.0, idle_for=10.0)
    if facts.server:
        assert facts.settings["fsync"] == "off"  # the tests' server
        assert facts.settings["synchronous_commit"] in ("on", "off")
        assert 1 <= facts.connections <= facts.connections_most < 10_000
        assert facts.rotated is None
        assert len(facts.tables) == 5
    else:
        assert facts.settings["synchronous"] == "2"
        assert (list(facts.sessions), list(facts.tables)) == ([], [])


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_open_transactions_and_tables_that_are_not_cleaned(
    world: World, store: UpkeepStore
) -> None:
    await world.execute("alter table perdure_wakes set (autovacuum_enabled = false)")
    connection = await asyncpg.connect(
        world.settings.url, server_settings={"application_name": "left open"}
    )
    try:
        await connection.execute("begin; select 1")
        facts = await store.server_facts(open_for=0.0, idle_for=0.0)
        mine = [session for session in facts.sessions if session.application == "left open"]
        assert [(s.state, s.pid) for s in mine] == [
            ("idle in transaction", connection.get_server_pid())
        ]
        assert mine[0].seconds > 0
        tables = {table.name: table.autovacuum for table in facts.tables}
        assert (tables["perdure_wakes"], tables["perdure_fences"]) == (False, True)
        later = await store.server_facts(open_for=600.0, idle_for=600.0)
        assert [s for s in later.sessions if s.application == "left open"] == []
    finally:
        await connection.close()
        await world.execute("alter table perdure_wakes reset (autovacuum_enabled)")


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_role_without_the_right_is_told_that_sessions_are_hidden(world: World) -> None:
    """And it still sees everything else."""
    await world.execute(
        "do $$ begin create role perdure_onlooker login; exception when duplicate_object then null; end $$"
    )
    await world.execute("grant select on all tables in schema public to perdure_onlooker")
    other = await asyncpg.connect(world.settings.url)
    url = make_url(world.settings.url).set(username="perdure_onlooker")
    store = upkeep(
        replace(world.settings, url=url.render_as_string(hide_password=False)), clock=SystemClock()
    )
    await store.open()
    try:
        facts = await store.server_facts(open_for=60.0, idle_for=10.0)
        assert facts.hidden >= 1
        assert facts.settings["fsync"] == "off"
    finally:
        await store.close()
        await other.close()
