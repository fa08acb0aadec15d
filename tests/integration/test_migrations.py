"""`migrate` on both engines: races, roles, schemas, and one schema under two dialects."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, migrate
from perdure.storage.errors import ConfigurationError, PerdureError, SchemaError
from perdure.storage.model import Hint, HintKind, Verdict
from tests.contract.world import entry, write
from tests.harness.audit import install_audit_now
from tests.harness.pods import ROOT
from tests.harness.postgres import PrivatePostgres
from tests.harness.releases import FIRST, make_version_1, source_of, start_by_hand
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats, beats
from tests.integration.fault_world import World
from tests.integration.postgres_world import world_of

pytestmark = pytest.mark.req("OP3")

MIGRATE = """
import sys
from perdure.storage.connect import DatabaseSettings, migrate
sys.stdin.readline()
print(*migrate(DatabaseSettings(sys.argv[1])))
"""


def test_processes_that_migrate_at_once_all_succeed_and_one_does_it(db_url: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATE, db_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for racer in racers:  # all have imported what they need when the first may go
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = []
    for racer in racers:
        out, err = racer.communicate(timeout=60)
        assert racer.returncode == 0, err
        outcomes.append(out.strip())
    assert sorted(outcomes) == ["0 2", "2 2", "2 2", "2 2"]


async def test_migrating_below_a_running_loop_and_a_second_time(db_url: str) -> None:
    assert migrate(DatabaseSettings(db_url)) == (0, 2)
    store = connect(DatabaseSettings(db_url), clock=SystemClock()).runs()
    meta = await store.open()
    await store.close()
    assert migrate(DatabaseSettings(db_url)) == (2, 2)
    again = connect(DatabaseSettings(db_url), clock=SystemClock()).runs()
    assert await again.open() == meta  # the same cluster
    await again.close()
    assert (meta.schema_version, meta.min_code_version, meta.hash_name) == (2, 1, "xxh3_64")


async def test_what_a_newer_release_made_is_left_alone(db_url: str) -> None:
    migrate(DatabaseSettings(db_url))
    newer = (
        "update perdure_meta set value = '3' where key = 'schema_version'",
        "update perdure_alembic_version set version_num = '0003'",
    )
    if db_url.startswith("sqlite"):
        with sqlite3.connect(db_url.removeprefix("sqlite:///")) as file:
            for statement in newer:
                file.execute(statement)
    else:
        connection = await asyncpg.connect(db_url)
        await connection.execute(";".join(newer))
        await connection.close()
    assert migrate(DatabaseSettings(db_url)) == (3, 3)


@pytest.mark.req("DB1")
async def test_both_engines_have_the_same_tables_views_and_columns(
    postgres_url: str, sqlite_url: str
) -> None:
    migrate(DatabaseSettings(postgres_url))
    migrate(DatabaseSettings(sqlite_url))
    connection = await asyncpg.connect(postgres_url)
    rows = await connection.fetch(
        "select table_name, column_name, is_nullable = 'NO' and data_type <> '' as required"
        " from information_schema.columns where table_name like 'perdure%'"
    )
    await connection.close()
    there = {(row["table_name"], row["column_name"]) for row in rows}
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as file:
        names = [
            name
            for (name,) in file.execute(
                "select name from sqlite_schema where type in ('table', 'view')"
            )
        ]
        here = {
            (name, column)
            for name in names
            for (column,) in file.execute("select name from pragma_table_info(?)", [name])
        }
    assert here == there
    tables = {table for table, _ in there}
    assert {"perdure_run_list", "perdure_step_list", "perdure_run_timeline"} <= tables


async def test_a_file_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="check that its folder exists"):
        migrate(DatabaseSettings(f"sqlite:///{tmp_path}/missing/perdure.db"))
    (tmp_path / "text.db").write_text(
        "this is no database, and it is long enough to be looked at" * 20
    )
    with pytest.raises(ConfigurationError, match=r"text\.db"):
        migrate(DatabaseSettings(f"sqlite:///{tmp_path}/text.db"))


# ---- from one version to the next, while runs are alive ---------------------------------------


@pytest.mark.req("CL3")
async def test_runs_go_on_while_the_schema_is_updated_and_both_releases_share_it(
    postgres_url: str, tmp_path: Path
) -> None:
    first_release = source_of(FIRST, tmp_path / "first")
    make_version_1(postgres_url)
    install_audit_now(postgres_url)
    assert isinstance(await opened(DatabaseSettings(postgres_url)), SchemaError)
    world = World(postgres_url, tmp_path, lease=4.0)
    with world.pods:
        old = world.pods.start(
            env={"PERDURE_DB": postgres_url, "PYTHONPATH": f"{first_release}:{ROOT}"}
        )
        await old.wait_http("/readyz", deadline=30)
        plan = Beats(work=0.02)
        runs = [f"early-{number}" for number in range(40)]
        await start_by_hand(postgres_url, dict.fromkeys(runs, plan.model_dump_json()), "beats")
        await world.beating(runs, steps=3)
        assert await asyncio.to_thread(migrate, DatabaseSettings(postgres_url)) == (1, 2)
        moment = time.monotonic()
        async with world:
            world.handles += [world.client.handle(run_id, beats) for run_id in runs]
            new = world.start_pod()
            await world.even(2)
            runs += await world.start_runs(40, plan)
            await world.beating(runs, since=moment, steps=3)
            await world.finish()
            assert await world.check() == 0
        assert {e.pid for e in world.executions if e.started > moment} == {old.pid, new.pid}
        assert "unavailable" not in old.log


async def test_a_table_in_use_is_not_waited_for(postgres_url: str) -> None:
    """Whoever comes after a waiting ALTER TABLE waits, too: it gives up before anybody's deadline."""
    make_version_1(postgres_url)
    reader = await asyncpg.connect(postgres_url)
    async with reader.transaction():
        await reader.fetch("select 1 from perdure_run_list")
        began = time.monotonic()
        with pytest.raises(ConfigurationError, match=r"nothing was changed.*Run it again"):
            await asyncio.to_thread(migrate, DatabaseSettings(postgres_url))
        assert time.monotonic() - began < 5
    assert (
        await reader.fetchval("select value from perdure_meta where key = 'schema_version'") == "1"
    )
    await reader.close()
    assert migrate(DatabaseSettings(postgres_url)) == (1, 2)


# ---- roles and schemas on PostgreSQL ----------------------------------------------------------


@pytest.fixture
def roles(postgres: PrivatePostgres, postgres_url: str) -> Iterator[tuple[str, str]]:
    """URLs of a role that may create tables in this database, and of one that may not."""
    database = postgres_url.rpartition("/")[2]
    for role in ("perdure_ddl", "perdure_dml"):
        postgres.run_sql(f"create role {role} login")
    postgres.run_sql(f'grant create on database "{database}" to perdure_ddl')
    yield tuple(
        postgres_url.replace("postgres@", f"{role}@") for role in ("perdure_ddl", "perdure_dml")
    )  # type: ignore[misc]
    postgres.start()
    postgres.run_sql("drop owned by perdure_ddl, perdure_dml cascade", database=database)
    for role in ("perdure_ddl", "perdure_dml"):
        postgres.run_sql(f"drop role {role}")


GRANTS = """
grant usage on schema "our jobs" to perdure_dml;
grant select, insert, update, delete on all tables in schema "our jobs" to perdure_dml
"""


async def opened(settings: DatabaseSettings) -> PerdureError | None:
    store = connect(settings, clock=SystemClock()).runs()
    try:
        await store.open()
    except PerdureError as error:
        return error
    finally:
        await store.close()
    return None


async def test_one_role_makes_the_tables_and_another_uses_them(
    roles: tuple[str, str], postgres_url: str
) -> None:
    ddl, dml = (DatabaseSettings(url, schema="our jobs") for url in roles)
    with pytest.raises(ConfigurationError, match="may create tables") as caught:
        migrate(dml)
    assert "permission denied" in str(caught.value)
    assert migrate(ddl) == (0, 2)
    missing = await opened(dml)
    assert isinstance(missing, SchemaError)  # without USAGE the tables are out of sight
    assert "'our jobs'" in str(missing)
    assert "grant this role USAGE" in str(missing)
    owner = await asyncpg.connect(roles[0])
    grants = GRANTS.split(";")
    await owner.execute(grants[0])
    assert isinstance(await opened(dml), ConfigurationError)
    await owner.execute(grants[1])
    in_public = await owner.fetch("select 1 from pg_tables where schemaname = 'public'")
    await owner.close()
    assert in_public == []
    async with world_of(roles[1], schema="our jobs") as world:
        runner = await world.runner()
        await world.start("r1")
        run = await runner.claim_one("r1")
        assert await runner.commit(write(run, entries=[entry(1)])) == {"r1": Verdict.COMMITTED}
        await world.deliver("r1", "m1")
        assert (await world.record("r1")).unread == 1
        assert migrate(ddl) == (2, 2)
    assert isinstance(await opened(DatabaseSettings(roles[1])), SchemaError)


async def test_two_schemas_of_one_database_are_two_clusters(postgres_url: str) -> None:
    first, second = (DatabaseSettings(postgres_url, schema=name) for name in ("one", "two"))
    assert [migrate(first), migrate(second)] == [(0, 2), (0, 2)]
    async with (
        world_of(postgres_url, schema="one") as world,
        world_of(postgres_url, schema="two") as other,
    ):
        await world.start("r1")
        assert await other.runs.read_run("r1") is None
        heard: list[Hint] = []
        channels = [w.database.hints() for w in (world, world, other)]
        await channels[0].open(lambda _: None)
        await channels[1].open(heard.extend)
        await channels[2].open(lambda hints: pytest.fail(f"a hint of another schema: {hints}"))
        channels[0].send([Hint(HintKind.START, slot=7)])
        await until(lambda: heard, what="the hint in its own schema")
        await asyncio.gather(*(channel.close() for channel in channels))
    assert heard == [Hint(HintKind.START, slot=7)]
