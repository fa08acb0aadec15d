"""Plans of the looping statements: by index whatever the planner believes, also generic and with old statistics (R12).

Tables are loaded after they were analysed empty, and nothing analyses them again; or their statistics are of a moment
at which they were large and all but empty, between two bursts. Each statement is explained as it is executed: the same
text, a generic plan, the settings of a hot connection.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import asyncpg
import pytest

from perdure.storage.connect import DatabaseSettings
from perdure.storage.interface import PAGE_BYTES, PAGE_ENTRIES
from perdure.storage.model import (
    SLOTS,
    ClaimRequest,
    Entry,
    EntryKind,
    Finish,
    NewRun,
    Park,
    Reason,
    RunEvent,
    RunFilter,
    RunStatus,
    RunWrite,
    ShardHold,
    StrayRequest,
)
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.lists import list_statement
from perdure.storage.postgres.session import Session, name_of, open_session
from tests.harness.postgres import PrivatePostgres
from tests.integration.postgres_world import migrated_database

ME = 7
SMALL_TABLES = {"perdure_runners", "perdure_shards", "perdure_meta"}
LOADS = [
    pytest.param((5_000, ""), id="5k"),
    pytest.param((5_000, "hollow"), id="5k-hollow"),
    pytest.param((100_000, ""), id="100k", marks=pytest.mark.slow),
    pytest.param((100_000, "hollow"), id="100k-hollow", marks=pytest.mark.slow),
]
HOLLOW = """
update pg_class set reltuples = 1, relpages = pg_relation_size(oid) / current_setting('block_size')::int
 where relname like 'perdure%' and relkind in ('r', 'i')
"""
"""What ANALYZE finds in a table full of dead or uncommitted rows, so that the planner counts on one row for ever."""

LOAD = """
insert into perdure_runners (runner_id, replica_id, address, expires_at)
  values (7, 'me', 'a', now() + interval '1 hour');
insert into perdure_shards select n, n * 256, n * 256 + 255, 7, 1 from generate_series(0, 255) as n;
insert into perdure_runs (run_id, slot, workflow, status, seed, start_token, payload, created_at, finished_at)
  select 'f' || n, n * 7919 % 65536, 'w', 'succeeded', 1, 1, '{}', now() - n * interval '1 s', now()
    from generate_series(1, SIZE) as n;
insert into perdure_steps (run_id, seq, step_key, kind, status, claim_id, at)
  select 'f' || n, k, 'k', 'step', 'ok', 1, now() from generate_series(1, SIZE) as n, generate_series(1, 2) as k;
insert into perdure_run_events (run_id, type, at)
  select 'f' || n, 'timer-set', now() from generate_series(1, SIZE) as n;
insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload, created_at)
  select 'p' || n, n * 7919 % 65536, 'w', 1, 1, '{}', now() - n * interval '1 s' from generate_series(1, SIZE) as n;
insert into perdure_fences (run_id, slot, workflow, status, revision)
  select 'p' || n, n * 7919 % 65536, 'w', 'suspended', 1 from generate_series(1, SIZE) as n;
insert into perdure_wakes (run_id, slot, wake_at)
  select 'p' || n, n * 7919 % 65536, case when n % 2 = 0 then now() + interval '1 day' end
    from generate_series(1, SIZE) as n;
insert into perdure_messages (run_id, message_id, wake_seq, kind, consumed_seq)
  select 'p' || n, 'm' || k, k, 'signal', case when k = 1 then 1 end
    from generate_series(1, SIZE) as n, generate_series(1, 2) as k;
insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload)
  select 'r' || n, n, 'w', 1, 1, '{}' from generate_series(1, 200) as n;
insert into perdure_fences (run_id, slot, workflow, status, revision, claim_id, runner_id, epoch)
  select 'r' || n, n, 'w', 'running', 1, n, 7, 1 from generate_series(1, 200) as n;
insert into perdure_wakes (run_id, slot) select 'r' || n, n from generate_series(1, 200) as n;
insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload)
  select 's' || n, n * 7919 % 65536, 'w', 1, 1, '{}' from generate_series(1, 300) as n;
insert into perdure_fences (run_id, slot, workflow)
  select 's' || n, n * 7919 % 65536, 'w' from generate_series(1, 300) as n;
insert into perdure_wakes (run_id, slot, wake_at, stray, stray_revision, stray_since)
  select 's' || n, n * 7919 % 65536, now() + interval '1 h', 'w', 0, now() from generate_series(1, 300) as n;
insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload) values ('due', 65535, 'w', 1, 1, '{}');
insert into perdure_fences (run_id, slot, workflow) values ('due', 65535, 'w');
insert into perdure_wakes (run_id, slot, wake_at) values ('due', 65535, now());
"""
TABLES = ("runs", "fences", "wakes", "steps", "messages", "run_events", "runners", "shards")


class Loaded(NamedTuple):
    session: Session
    size: int
    hollow: bool


@pytest.fixture(scope="module", params=LOADS)
def loaded_url(
    request: pytest.FixtureRequest, postgres: PrivatePostgres
) -> Iterator[tuple[str, int, bool]]:
    postgres.start()
    url = migrated_database(postgres)
    database = url.rpartition("/")[2]
    for table in TABLES:
        postgres.run_sql(
            f"alter table perdure_{table} set (autovacuum_enabled = false)", database=database
        )
    postgres.run_sql("analyze", database=database)
    size, statistics = request.param
    for statement in LOAD.replace("SIZE", str(size)).split(";\n"):
        if statement.strip():
            postgres.run_sql(statement, database=database)
    if statistics:
        postgres.run_sql(HOLLOW, database=database)
    yield url, size, bool(statistics)
    postgres.start()
    postgres.drop_database(database)


@pytest.fixture
async def loaded(loaded_url: tuple[str, int, bool]) -> AsyncIterator[Loaded]:
    url, size, hollow = loaded_url
    settings = DatabaseSettings(url, deadline=60.0)
    session = await open_session(settings, address_of(url), hot=True)
    yield Loaded(session, size, hollow)
    await session.close()


# ---- explaining -------------------------------------------------------------------------------


def literal(value: Any, kind: str) -> str:
    """A parameter as SQL text: PREPARE by name has no other way to take one."""
    if value is None:
        return f"null::{kind}"
    if isinstance(value, (list, tuple, range)):
        return f"array[{', '.join(literal(v, kind.removesuffix('[]')) for v in value)}]::{kind}"
    if kind.startswith("timestamptz"):
        return f"to_timestamp({value})"
    if isinstance(value, str):
        return f"'{value}'::{kind}"
    return f"{str(value).lower()}::{kind}"


async def plan_of(session: Session, sql: str, *args: Any) -> dict[str, Any]:
    """The plan with what its execution touched; the execution is rolled back."""
    connection: asyncpg.Connection = session.connection
    kinds = [p.name for p in (await connection.prepare(sql)).get_parameters()]
    await connection.execute(f"prepare looped as {sql}")
    values = ", ".join(literal(value, kind) for value, kind in zip(args, kinds, strict=True))
    call = f"looped({values})" if args else "looped"
    transaction = connection.transaction()
    await transaction.start()
    try:
        found = await connection.fetchval(
            f"explain (analyze, buffers, timing off, format json) execute {call}"
        )
    finally:
        await transaction.rollback()
        await connection.execute("deallocate looped")
    plan: dict[str, Any] = json.loads(found)[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def whole_readings(plan: dict[str, Any]) -> list[str]:
    """Scans of tables that grow which read them whole, as far as they were executed."""
    found = []
    for node in nodes(plan):
        table = node.get("Relation Name")
        scan = node["Node Type"].endswith("Scan")
        executed = node["Actual Loops"] > 0
        if scan and table and table not in SMALL_TABLES and executed:
            by_index = "Index Cond" in node or node["Node Type"] == "Bitmap Heap Scan"
            if not by_index:
                found.append(f"{node['Node Type']} on {table} {node.get('Index Name', '')}")
        if node["Node Type"] == "Bitmap Index Scan" and executed and "Index Cond" not in node:
            found.append(f"Bitmap Index Scan of all {node['Index Name']}")
    return found


def indexes(plan: dict[str, Any]) -> set[str]:
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def blocks(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


# ---- the statements ---------------------------------------------------------------------------

ENTRY = Entry(1, EntryKind.STEP, "k", 1.0, output="1")
ALL_SHARDS = [ShardHold(shard, 1) for shard in range(256)]


def claim(holds: list[ShardHold], *, orphans: bool) -> list[object]:
    request = ClaimRequest(
        ME, holds, ["w"], list(range(1, 201)), limit=50, orphans=orphans, ahead=0.01
    )
    return columns.claim_columns(request, range(1000, 1050))


def claim_strays(*, lost: bool) -> list[object]:
    request = StrayRequest(ME, ["w"], list(range(1, 201)), limit=50, from_slot=30_000, lost=lost)
    return columns.stray_columns(request, range(1000, 1050))


def commit_of_steps() -> list[object]:
    writes = [RunWrite(f"r{n}", n, 1, [ENTRY]) for n in range(1, 201)]
    writes.sort(key=lambda write: write.run_id)
    return columns.commit_steps_columns(ME, 99, writes)


def commit_of_ends() -> list[object]:
    outcomes = [None, Finish(RunStatus.SUCCEEDED, result="1")]
    writes = [RunWrite(f"r{n}", n, 1, [ENTRY], outcome=outcomes[n % 2]) for n in range(1, 201)]
    writes.sort(key=lambda write: write.run_id)
    assert columns.only_ends(writes)
    return columns.commit_ends_columns(ME, 99, writes)


def commit(outcome: Park | Finish | None) -> list[object]:
    writes = [
        RunWrite(f"r{n}", n, 1, [ENTRY], [("m1", 1)], [RunEvent("timer-set", 1.0)], outcome)
        for n in range(1, 201)
    ]
    writes.sort(key=lambda write: write.run_id)
    return columns.commit_columns(ME, 99, writes)


STARTS = [NewRun(f"new{n:03}", n, "w", n, "{}", n) for n in range(200)]
RUNNING = sorted(f"r{n}" for n in range(1, 201))
PARKED = sorted(f"p{n}" for n in range(1, 201))
FINISHED = sorted(f"f{n}" for n in range(1, 201))
DUE, RUNNING_INDEX = "perdure_wakes_due", "perdure_fences_running"

# name: text, arguments, an index it must use, blocks it may touch at most
LOOPING: dict[str, tuple[str, list[object], str, int]] = {
    "claim by hint": (queries.CLAIM, claim([ShardHold(255, 1)], orphans=False), DUE, 250),
    "claim": (queries.CLAIM, claim(ALL_SHARDS, orphans=False), DUE, 3_000),
    "claim with orphans": (queries.CLAIM, claim(ALL_SHARDS, orphans=True), RUNNING_INDEX, 5_000),
    "claim of strays": (queries.CLAIM_STRAYS, claim_strays(lost=False), "perdure_wakes_stray", 3_000),
    "claim of lost ones": (queries.CLAIM_STRAYS, claim_strays(lost=True), RUNNING_INDEX, 4_000),
    "upcoming": (queries.UPCOMING, [ME, list(range(256)), [1] * 256, 1.0, 100], DUE, 3_000),
    "due in memory": (queries.DUE_IN_MEMORY, [RUNNING, [0] * 200], "perdure_wakes_pkey", 3_000),
    "mailbox": (queries.MAILBOX, [PARKED], "perdure_messages_open", 3_000),
    "journal": (queries.JOURNAL, [FINISHED, [0] * 200, PAGE_BYTES, PAGE_ENTRIES], "perdure_steps_pkey", 3_000),
    "commit of steps": (queries.COMMIT_STEPS, commit_of_steps(), "perdure_fences_pkey", 10_000),
    "commit of steps and more": (queries.COMMIT, commit(None), "perdure_fences_pkey", 15_000),
    "commit of parks": (queries.COMMIT, commit(Park(1.0, 0, Reason.TIMER)), "perdure_wakes_pkey", 15_000),
    "commit of ends": (queries.COMMIT_ENDS, commit_of_ends(), "perdure_runs_pkey", 25_000),
    "commit of ends and more": (queries.COMMIT, commit(Finish(RunStatus.SUCCEEDED)), "perdure_runs_pkey", 25_000),
    "careful commit": (queries.COMMIT_CAREFUL, commit(Finish(RunStatus.SUCCEEDED)), "perdure_runs_pkey", 30_000),
    "settle": (queries.SETTLE, [RUNNING], "perdure_fences_pkey", 3_000),
    "settle one": (queries.SETTLE_ONE, ["r1"], "perdure_fences_pkey", 100),
    "settle rest": (queries.SETTLE_REST, [RUNNING], "perdure_runs_pkey", 4_000),
    "start": (queries.START, columns.start_columns(STARTS), "", 20_000),
    "start of fresh ones": (queries.START_FRESH, columns.fresh_columns(STARTS), "", 20_000),
    "find run": (queries.FIND_RUN, ["p1"], "perdure_runs_pkey", 100),
    "read runs": (queries.READ_RUNS, [PARKED], "perdure_fences_pkey", 5_000),
    "find runs": (queries.FIND_RUNS, [PARKED], "perdure_runs_pkey", 4_000),
    "note events": (
        queries.NOTE_EVENTS,
        [RUNNING, ["step-started"] * 200, [1.0] * 200, ["{}"] * 200],
        "perdure_fences_pkey",
        3_000,
    ),
    "signal": (queries.SIGNAL, ["p1", "x", "signal", "go", "1", 1, 10_000, 1 << 26], "perdure_messages_open", 200),
    "results": (queries.READ_RESULTS, [FINISHED], "perdure_runs_pkey", 3_000),
    "delete finished": (queries.DELETE_FINISHED, [2e9, 100], "perdure_runs_by_end", 6_000),
    "dead runners": (queries.DELETE_DEAD_RUNNERS, [2e9], "", 300),
    "suspend": (queries.HOLD_RUN, ["p1", 1, "why"], "perdure_wakes_pkey", 200),
    "take a suspend back": (queries.WITHDRAW_SUSPEND, ["p1"], "perdure_messages_open", 200),
    "resume": (queries.RELEASE_HOLD, ["p1", 1], "perdure_wakes_pkey", 200),
    "before a cancel": (queries.LOCK_UNENTERED, ["due"], "perdure_wakes_pkey", 200),
    "cancel": (queries.CANCEL_UNENTERED, ["due", 1, "why"], "perdure_wakes_pkey", 200),
    "timeline": (queries.READ_EVENTS, ["f1"], "perdure_steps_pkey", 200),
}  # fmt: skip
SMALL = {
    "renew",
    "topology",
    "take_shards",
    "release_shards",
    "leave",
    "register",
    "set_draining",
    "declare_dead",
    "is_dead",
    "bury_runners",
    "declare_lost",
    "live_runners",
    "lock_mode",
    "record_fact",
    "set_lock_mode",
}
"""They loop over runners and shards alone, tables of a few hundred rows."""
SELDOM = {
    "agree",
    "create_shards",
    "declare_others_dead",
    "hint_key",
    "read_hint_key",
    "read_meta",
}
"""Once a boot."""
WITHOUT_TABLES = {
    "notify",
    "server_now",
    "find_ghost",
    "end_ghost",
    "end_lock_holder",
    "free_locks",
    "hold_lock",
    "about_session",
    "about_session_plain",
}
ON_REQUEST = {
    "count_runs",
    "open_attempts",
    "open_events",
    "examine_connections",
    "examine_held",
    "examine_sessions",
    "examine_settings",
    "examine_stuck",
    "examine_tables",
    "examine_workflows",
}
"""Of what a person asks for: the live runs whole, or one run's events."""
UPKEEP = {
    "lock_runners",
    "replace_shards",
    "set_meta",
    "void_claims",
    "void_runners",
    "void_shards",
}
"""Of a whole cluster, while no pod runs."""


def test_every_statement_is_explained_here_or_never_loops_over_runs() -> None:
    explained = {name_of(text) for text, *_ in LOOPING.values()}
    known = {name_of(text) for text in vars(queries).values() if str(text).startswith("-- name: ")}
    assert known - explained == SMALL | SELDOM | WITHOUT_TABLES | ON_REQUEST | UPKEEP


@pytest.mark.parametrize("name", LOOPING)
async def test_a_looping_statement_reads_by_index(loaded: Loaded, name: str) -> None:
    if loaded.hollow and name == "timeline":
        pytest.skip("not applicable: one run's timeline is read once, when a person asks")
    sql, args, index, most = LOOPING[name]
    plan = await plan_of(loaded.session, sql, *args)
    assert whole_readings(plan) == []
    assert not index or index in indexes(plan)
    assert blocks(plan) <= most


async def test_the_checker_sees_a_statement_that_reads_a_table_whole(loaded: Loaded) -> None:
    plan = await plan_of(loaded.session, "select run_id from perdure_fences where reason = 'x'")
    assert whole_readings(plan) != []
    plan = await plan_of(
        loaded.session, "select run_id from perdure_wakes where slot between $1 and $2", 1, 100
    )
    assert whole_readings(plan) != []


FILTERS = {
    "everything": RunFilter(),
    "running": RunFilter(statuses=[RunStatus.RUNNING]),
    "parked of a workflow": RunFilter(workflow="w", statuses=[RunStatus.SUSPENDED]),
    "ended": RunFilter(statuses=[RunStatus.SUCCEEDED, RunStatus.FAILED]),
    "mixed": RunFilter(statuses=[RunStatus.SUCCEEDED, RunStatus.SUSPENDED]),
    "by id": RunFilter(id_prefix="p77"),
}


@pytest.fixture(scope="module")
def analysed_url(loaded_url: tuple[str, int, bool], postgres: PrivatePostgres) -> Iterator[str]:
    """A copy of the load with statistics of it: lists are for people, not for loops."""
    copy = postgres.create_database(template=loaded_url[0].rpartition("/")[2])
    postgres.run_sql("analyze", database=copy)
    yield postgres.url(copy)
    postgres.drop_database(copy)


@pytest.mark.parametrize("name", FILTERS)
async def test_a_list_of_fifty_runs_reads_a_few_pages(analysed_url: str, name: str) -> None:
    text, args = list_statement(FILTERS[name])
    settings = DatabaseSettings(analysed_url, deadline=60.0)
    session = await open_session(settings, address_of(analysed_url), hot=True)
    try:
        plan = await plan_of(session, text, *args)
    finally:
        await session.close()
    # Two statuses from two tables are merged by age, so how far it reads depends on the sample of the statistics; one
    # that looked up the fences of the whole load would touch hundreds of thousands.
    assert blocks(plan) <= 10_000


async def test_slots_of_the_load_cover_all_shards(loaded: Loaded) -> None:
    """What the bounds above rest on."""
    [row] = await loaded.session.fetch(
        "select count(distinct slot >> 8) as n, max(slot) as top from perdure_wakes",
        writes=False,
        deadline=30.0,
    )
    assert (row["n"], row["top"] < SLOTS) == (256, True)
