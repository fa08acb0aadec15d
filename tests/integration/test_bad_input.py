"""Bad input is refused with words that help, and nothing is written: every row of every table is as it was.

Elsewhere: at the command line in ``tests/e2e/test_cli_input.py``, definitions and values in ``tests/unit/authoring``,
settings in ``tests/unit/settings``, a server that does not let us in in ``test_postgres_connecting.py``. Here: what
goes through a client or a runner, on each engine.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from perdure import (
    App,
    Client,
    ConfigurationError,
    Context,
    DefinitionError,
    DuplicateDefinitionError,
    InputError,
    InUseError,
    InvalidName,
    MailboxFull,
    PayloadTooLarge,
    RunEnded,
    RunIdConflict,
    Runner,
    RunNotFound,
    RunStatus,
    SchemaError,
    Settings,
    SignalPayloadError,
    StepResultError,
    StepResultTooLarge,
    UnknownWorkflowError,
    WorkflowPayloadError,
    WorkflowResultError,
    WorkflowResultTooLarge,
    WrongStatus,
    step,
    workflow,
)
from perdure.storage.connect import database_file
from tests.harness.postgres import free_port
from tests.integration.apps import refused
from tests.integration.in_process import client_on, runner_on, until_status

Rows = Mapping[str, list[str]]
SURROGATE = "a\ud800b"

BAD_IDS: dict[str, tuple[object, str]] = {
    "empty": ("", "is empty"),
    "blank": (" ", "begins or ends with a blank"),
    "blank before": (" a", "begins or ends with a blank"),
    "line end": ("a\n", "begins or ends with a blank"),
    "wide blank": ("\u3000a", "begins or ends with a blank"),
    "long": ("x" * 201, "201 bytes; at most 200"),
    "long in bytes": ("\u00fc" * 101, "202 bytes; at most 200"),
    "NUL": ("a\0b", "NUL character at position 1"),
    "surrogate": (SURROGATE, "lone surrogate (U+D800) at position 1"),
    "number": (5, "is int, not str"),
    "bytes": (b"x", "is bytes, not str"),
}
BAD_NAMES: dict[str, tuple[object, str]] = {
    **{name: BAD_IDS[name] for name in ("empty", "blank", "line end", "NUL", "surrogate", "bytes")},
    "long": ("x" * 201, "201 characters; at most 200"),
    "hash": ("a#1", "holds '#'"),
    "angle": ("a>b", "holds '>'"),
    "slash": ("a/b", "holds '/'"),
    "unprintable": ("a\u200bb", "unprintable"),
}


async def rows_of(url: str) -> Rows:
    """Every row of every table of ours, as text."""
    file = database_file(url)
    if file is not None:
        return _file_rows(file)
    connection = await asyncpg.connect(url)
    try:
        found = {}
        for record in await connection.fetch(
            "select tablename from pg_tables where tablename like 'perdure%'"
        ):
            table = record["tablename"]
            rows = await connection.fetch(f"select t::text as line from {table} t")
            found[table] = sorted(row["line"] for row in rows)
        return found
    finally:
        await connection.close()


def _file_rows(file: Path) -> Rows:
    with closing(sqlite3.connect(file)) as connection:
        tables = [
            name
            for [name] in connection.execute(
                "select name from sqlite_master where type = 'table' and name like 'perdure%'"
            )
        ]
        return {
            table: sorted(map(repr, connection.execute(f"select * from {table}")))
            for table in tables
        }


async def execute(url: str, statement: str) -> None:
    file = database_file(url)
    if file is not None:
        with closing(sqlite3.connect(file)) as opened, opened:
            opened.execute(statement)
        return
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def storage_of(url: str) -> dict[str, Any]:
    return {"runner_storage": "memory" if url.startswith("sqlite") else "sql"}


@dataclass(frozen=True)
class Refusal:
    """A call, the error it has to raise, and what its message has to say."""

    call: Callable[[Client], Awaitable[object]]
    error: type[BaseException]
    says: tuple[str, ...]


def refusal(
    call: Callable[[Client], Awaitable[object]], error: type[BaseException], *says: str
) -> Refusal:
    return Refusal(call, error, says)


Call = Callable[[Client], Awaitable[object]]


def starting(**options: Any) -> Call:
    return lambda client: client.start("plain", **options)


def signalling(name: Any, **options: Any) -> Call:
    return lambda client: client.signal("waiting", name, 1, **options)


def cancelling(reason: Any) -> Call:
    return lambda client: client.cancel("waiting", reason)


def asking(what: str, run_id: Any) -> Call:
    return lambda client: ASKED_BY_ID[what](client, run_id)


def ids_and_names() -> dict[str, Refusal]:
    table: dict[str, Refusal] = {}

    def add(title: str, call: Call, *says: str) -> None:
        table[title] = refusal(call, InvalidName, *says)

    for name, (value, says) in BAD_IDS.items():
        add(f"run id: {name}", starting(run_id=value), "run id", says)
        add(f"message id: {name}", signalling("number", id=value), "message id", says)
    for name, (value, says) in BAD_NAMES.items():
        add(f"signal name: {name}", signalling(value), "signal name", says)
    for name in ("NUL", "surrogate", "number", "bytes"):
        value, says = BAD_IDS[name]
        for what in ("tenant", "subject", "trace", "source"):
            add(f"{what}: {name}", starting(**{what: value}), what, says)
        add(f"reason of a cancel: {name}", cancelling(value), "reason", says)
        for what in ASKED_BY_ID:
            add(f"{what} of a run id: {name}", asking(what, value), "run id", says)
    return table


ASKED_BY_ID: dict[str, Callable[[Client, Any], Awaitable[object]]] = {
    "get": lambda client, run_id: client.get(run_id),
    "wait": lambda client, run_id: client.wait(run_id, 1),
    "signal": lambda client, run_id: client.signal(run_id, "number", 1),
    "cancel": lambda client, run_id: client.cancel(run_id),
    "retry": lambda client, run_id: client.retry(run_id),
    "resume": lambda client, run_id: client.resume(run_id),
    "journal": lambda client, run_id: client.journal(run_id),
    "events": lambda client, run_id: client.events(run_id),
    "why": lambda client, run_id: client.why(run_id),
}

REFUSALS: dict[str, Refusal] = {
    "payload: of another type": refusal(
        lambda c: c.start(refused.ordered, 5),  # type: ignore[misc]
        WorkflowPayloadError,
        "'ordered'",
        "got 5",
    ),
    "payload: fields": refusal(
        lambda c: c.start("ordered", {"number": "many"}),
        WorkflowPayloadError,
        "'ordered'",
        "number:",
        "got 'many'",
        "name: field required",
    ),
    "payload: none": refusal(lambda c: c.start("ordered"), WorkflowPayloadError, "'ordered'"),
    "payload: not taken": refusal(
        lambda c: c.start("plain", 5), WorkflowPayloadError, "'plain'", "takes no payload", "got 5"
    ),
    "payload: no JSON": refusal(
        lambda c: c.start("any", {"a": object()}), WorkflowPayloadError, "a:", "JSON cannot hold"
    ),
    "payload: NaN": refusal(
        lambda c: c.start("any", [1, float("nan")]), WorkflowPayloadError, "1:", "no finite number"
    ),
    "payload: NUL": refusal(
        lambda c: c.start("any", {"a": "x\0"}), WorkflowPayloadError, "a:", "NUL", "position 1"
    ),
    "payload: surrogate": refusal(
        lambda c: c.start("any", [SURROGATE]), WorkflowPayloadError, "0:", "lone surrogate"
    ),
    "payload: too large": refusal(
        lambda c: c.start("any", "x" * refused.BIG),
        PayloadTooLarge,
        "'any'",
        "3,000,002 bytes",
        "2,097,152 bytes",
        "pass a reference",
        "payload_limit",
    ),
    "payload: too large in bytes": refusal(
        lambda c: c.start("any", "\u00fc" * 1_500_000), PayloadTooLarge, "3,000,002 bytes"
    ),
    "key: no text": refusal(
        lambda c: c.start("keyed", 5), DefinitionError, "idempotency_key gave 5"
    ),
    "key: empty": refusal(lambda c: c.start("keyed", ""), DefinitionError, "not empty"),
    "workflow: unknown": refusal(
        lambda c: c.start("orderd", {}), UnknownWorkflowError, "'orderd'", "ordered", "waits"
    ),
    "workflow: empty": refusal(lambda c: c.start(""), UnknownWorkflowError, "''"),
    "workflow: a function": refusal(
        lambda c: c.start(rows_of),  # type: ignore[call-overload]
        InputError,
        "is not a workflow",
        "@workflow",
    ),
    "one id, two workflows": refusal(
        lambda c: c.start("plain", run_id="waiting"),
        RunIdConflict,
        "'waiting'",
        "'waits'",
        "'plain'",
        "use another id",
    ),
    "option: unknown": refusal(
        lambda c: c.start("plain", runid="x"),  # type: ignore[call-overload]
        TypeError,
        "'runid'",
        "run_id",
    ),
    "tags: one text": refusal(
        lambda c: c.start("plain", tags="abc"), InvalidName, "'abc'", "a list of texts"
    ),
    "tags: empty": refusal(lambda c: c.start("plain", tags=[""]), InvalidName, "tag is empty"),
    "tags: comma": refusal(lambda c: c.start("plain", tags=["a,b"]), InvalidName, "'a,b'", "comma"),
    "tags: number": refusal(
        lambda c: c.start("plain", tags=[5]),  # type: ignore[list-item]
        InvalidName,
        "tag 5 is int",
    ),
    "tenant: long": refusal(
        lambda c: c.start("plain", tenant="x" * 501),
        InvalidName,
        "tenant",
        "501 bytes; at most 500",
    ),
    "signal: too large": refusal(
        lambda c: c.signal("waiting", "number", "x" * refused.BIG),
        PayloadTooLarge,
        "signal 'number'",
        "3,000,002",
        "2,097,152",
    ),
    "signal: no JSON": refusal(
        lambda c: c.signal("waiting", "number", object()), SignalPayloadError, "'number'", "object"
    ),
    "signal: NUL": refusal(
        lambda c: c.signal("waiting", "number", ["\0"]), SignalPayloadError, "NUL"
    ),
    "signal: holds itself": refusal(
        lambda c: c.signal("waiting", "number", _itself()), SignalPayloadError, "number"
    ),
    "signal: full mailbox": refusal(
        lambda c: c.signal("full", "number", 1),
        MailboxFull,
        "'full'",
        "3 unread",
        "mailbox_limit",
    ),
    "list: status": refusal(
        lambda c: c.list(status="done"), InputError, "'done'", "succeeded", "suspended"
    ),
    "list: limit": refusal(lambda c: c.list(limit=-1), InputError, "limit = -1"),
    "list: offset": refusal(
        lambda c: c.list(offset="x"),  # type: ignore[arg-type]
        InputError,
        "offset = 'x'",
    ),
    "list: since": refusal(
        lambda c: c.list(since="yesterday"),  # type: ignore[arg-type]
        InputError,
        "since = 'yesterday'",
    ),
    "list: prefix": refusal(lambda c: c.list(id_prefix="\0"), InvalidName, "NUL"),
    "list: workflow": refusal(lambda c: c.list(workflow=SURROGATE), InvalidName, "lone surrogate"),
    **{
        f"{what}: unknown run": refusal(
            asking(what, "nobody"),
            RunNotFound,
            "'nobody'",
            "check the id",
            "database URL",
        )
        for what in ASKED_BY_ID
        if what != "get"
    },
    **{
        f"{what}: ended run": refusal(
            asking(what, "ended"), RunEnded, "'ended'", "already ended", what
        )
        for what in ("signal", "cancel")
    },
    "retry: succeeded": refusal(
        lambda c: c.retry("ended"), WrongStatus, "cannot retry", "'ended'", "is succeeded", "failed"
    ),
    "retry: pending": refusal(
        lambda c: c.retry("waiting"), WrongStatus, "cannot retry", "is pending", "cancelled"
    ),
    "retry: wrong payload": refusal(
        lambda c: c.retry("failed", 5), WorkflowPayloadError, "'fails'", "takes no payload"
    ),
    "resume: pending": refusal(
        lambda c: c.resume("waiting"), WrongStatus, "cannot resume", "is pending", "on hold"
    ),
    "resume: ended": refusal(
        lambda c: c.resume("ended"), WrongStatus, "cannot resume", "is succeeded"
    ),
    "resume: cancelled": refusal(
        lambda c: c.resume("cancelled"), WrongStatus, "cannot resume", "is cancelled"
    ),
    **ids_and_names(),
}


def _itself() -> list[Any]:
    itself: list[Any] = []
    itself.append(itself)
    return itself


@pytest.mark.req("WF3", "WF7", "ST12", "SL2", "SL5")
async def test_a_client_refuses_and_writes_nothing(migrated_url: str) -> None:
    url = migrated_url
    async with runner_on(url, refused.WORKFLOWS, **storage_of(url)) as runner:
        await runner.client.run(refused.plain, run_id="ended", timeout=20)
        with pytest.raises(ValueError, match="as it should"):
            await runner.client.run(refused.fails, run_id="failed", timeout=20)
    async with client_on(url, refused.WORKFLOWS, mailbox_limit=3) as client:
        for run_id in ("waiting", "full", "cancelled"):
            await client.start(refused.waits, run_id=run_id)
        await client.cancel("cancelled")
        for number in range(3):
            await client.signal("full", "number", number)
        before = await rows_of(url)
        assert sum(map(len, before.values())) > 10
        faults = {}
        for name, case in REFUSALS.items():
            fault = await fault_of(client, case)
            after = await rows_of(url)
            if fault is None and after != before:
                fault = "something was written"
                before = after
            if fault is not None:
                faults[name] = fault
        assert faults == {}


async def fault_of(client: Client, case: Refusal) -> str | None:
    """What is wrong with how it was refused."""
    try:
        answer = await asyncio.wait_for(case.call(client), 20)
    except case.error as error:
        missing = [part for part in case.says if part not in str(error)]
        return f"does not say {missing}: {error}" if missing else None
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return f"answered {answer!r}"


@pytest.mark.req("SL5")
async def test_asking_again_is_no_bad_input(migrated_url: str) -> None:
    async with client_on(migrated_url, refused.WORKFLOWS) as client:
        handle = await client.start(refused.waits, run_id="twice")
        assert (await client.start(refused.waits, run_id="twice")).run_id == handle.run_id
        await handle.signal("number", 1, id="one")
        await handle.cancel("first")
        before = await rows_of(migrated_url)
        await handle.cancel("second")
        assert await client.get("nobody") is None
        assert await rows_of(migrated_url) == before


# ---- what a run is refused: it ends as failed, visibly ----------------------------------------


@pytest.mark.req("ST12", "WF1", "SL2")
async def test_results_and_signals_that_cannot_be_recorded_fail_their_run(
    migrated_url: str,
) -> None:
    async with runner_on(migrated_url, refused.WORKFLOWS, **storage_of(migrated_url)) as runner:
        client = runner.client
        cases: dict[str, tuple[type[BaseException], list[str]]] = {
            "step": (
                StepResultTooLarge,
                ["step 'grow'", "3,000,002", "2,097,152", "step_result_limit"],
            ),
            "odd step": (StepResultError, ["step 'odd'", "JSON cannot hold"]),
            "odd result": (WorkflowResultError, ["workflow 'grows'", "JSON cannot hold"]),
            "result": (
                WorkflowResultTooLarge,
                ["workflow 'grows'", "3,000,002", "2,097,152", "payload_limit"],
            ),
        }
        for how, (kind, says) in cases.items():
            handle = await client.start(refused.grows, how)
            with pytest.raises(kind) as caught:
                await handle.wait(20)
            assert not [part for part in says if part not in str(caught.value)]
            info = await handle.poll()
            assert info is not None
            assert (info.status, info.result) == (RunStatus.FAILED, None)
            assert all(
                len(entry.output or "") < 1_000 for entry in await client.journal(handle.run_id)
            )
        handle = await client.start(refused.waits)
        await handle.signal("number", "many")
        with pytest.raises(SignalPayloadError, match=r"signal 'number'.*got 'many'"):
            await handle.wait(20)


# ---- definitions ------------------------------------------------------------------------------


@pytest.mark.req("WF4", "WF7")
def test_definitions_that_cannot_be() -> None:
    @workflow(name="twin")
    async def one(ctx: Context) -> None: ...

    @workflow(name="twin")
    async def two(ctx: Context) -> None: ...

    with pytest.raises(DuplicateDefinitionError) as caught:
        App("twins", workflows=[one, two])
    assert "'twin'" in str(caught.value)
    assert str(caught.value).count("test_bad_input.py:") == 2

    def plain(ctx: Context) -> None: ...

    with pytest.raises(
        DefinitionError, match=r"'plain' \(.*test_bad_input.py:\d+\): a workflow is an async def"
    ):
        workflow(plain)  # type: ignore[arg-type]
    for name, (value, says) in BAD_NAMES.items():
        with pytest.raises(InvalidName) as bad:
            step(name=value)(plain)  # type: ignore[call-overload]
        assert says in str(bad.value), name
        assert "test_bad_input.py:" in str(bad.value)


# ---- runners and databases --------------------------------------------------------------------


async def refused_start(url: str, **settings: Any) -> str:
    """What a runner says that does not start; nothing of it is left, and nothing was written."""
    before = await rows_of(url)
    runner = Runner(App("refused"), Settings(db=url, **settings))
    with pytest.raises(ConfigurationError) as caught:
        await runner.start()
    assert await rows_of(url) == before
    return str(caught.value)


@pytest.mark.req("OP3")
@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0", ["is version 0, this release needs 2", "perdure migrate --db"]),
        ("9", ["version 9", "install a newer perdure"]),
    ],
)
async def test_a_schema_of_another_time(migrated_url: str, version: str, says: list[str]) -> None:
    url = migrated_url
    await execute(
        url,
        f"update perdure_meta set value = '{version}' where key = 'schema_version' "
        f"or (key = 'min_code_version' and {version} > 1)",
    )
    text = await refused_start(url, runner_port=0, **storage_of(url))
    assert not [part for part in says if part not in text]
    before = await rows_of(url)
    with pytest.raises(SchemaError) as caught:
        async with Client(url):
            pass
    assert not [part for part in says if part not in str(caught.value)]
    assert await rows_of(url) == before


@pytest.mark.req("OP3")
async def test_no_schema_at_all(db_url: str) -> None:
    with pytest.raises(SchemaError, match="perdure migrate --db"):
        await Runner(App("refused"), Settings(db=db_url, **storage_of(db_url))).start()
    with pytest.raises(SchemaError, match="perdure migrate --db"):
        async with Client(db_url):
            pass
    assert await rows_of(db_url) == {}


@pytest.mark.req("CL3")
async def test_another_shard_count(migrated_url: str) -> None:
    async with runner_on(migrated_url, refused.WORKFLOWS, **storage_of(migrated_url)):
        pass
    text = await refused_start(migrated_url, shards=7, runner_port=0, **storage_of(migrated_url))
    assert "PERDURE_SHARDS=256" in text
    assert "7" in text


@pytest.mark.req("CL7")
async def test_a_port_that_is_taken_is_noticed_before_anything_is_agreed(migrated_url: str) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        text = await refused_start(migrated_url, runner_port=port, **storage_of(migrated_url))
    assert f"port {port} on 127.0.0.1 is taken" in text
    assert "PERDURE_RUNNER_PORT" in text
    text = await refused_start(
        migrated_url, runner_host="203.0.113.9", runner_port=0, **storage_of(migrated_url)
    )
    assert "203.0.113.9" in text
    assert "PERDURE_RUNNER_HOST" in text


@pytest.mark.req("CL6")
async def test_memory_runner_storage_on_a_server(migrated_postgres_url: str) -> None:
    text = await refused_start(migrated_postgres_url, runner_storage="memory")
    assert "PERDURE_RUNNER_STORAGE=memory needs a SQLite database" in text
    assert "use sql" in text


@pytest.mark.req("CL6")
async def test_a_second_runner_on_one_file(migrated_sqlite_url: str) -> None:
    url = migrated_sqlite_url
    async with runner_on(url, refused.WORKFLOWS, runner_storage="memory") as runner:
        for storage in ("memory", "sql"):
            text = await refused_start(url, runner_storage=storage, runner_port=0)
            assert "perdure.db is in use by process" in text
            assert "PERDURE_RUNNER_STORAGE=sql" in text
        assert await runner.client.run(refused.anything, 3, timeout=20) == 3


@pytest.mark.req("CL1", "CL7")
async def test_two_live_runners_with_one_name(migrated_url: str) -> None:
    """The later one gives up; the first and its runs do not notice."""
    settings: dict[str, Any] = {"replica_id": "same", "lease": 5.0, "renewal": 0.3}
    async with runner_on(migrated_url, refused.WORKFLOWS, **settings) as first:
        handle = await first.client.start(refused.waits)
        later = Runner(
            App("later", workflows=refused.WORKFLOWS),
            Settings(db=migrated_url, runner_storage="sql", runner_port=0, **settings),
        )
        await later.start()
        try:
            with pytest.raises(InUseError, match="'same' is used by two live processes") as caught:
                await asyncio.wait_for(later.closed(), 20)
        finally:
            await later.stop()
        assert "PERDURE_REPLICA_ID" in str(caught.value)
        await handle.signal("number", 4)
        assert await handle.wait(20) == 4


async def test_a_runner_starts_once(migrated_url: str) -> None:
    async with runner_on(migrated_url, refused.WORKFLOWS, **storage_of(migrated_url)) as runner:
        with pytest.raises(RuntimeError, match="has been started"):
            await runner.start()
        assert await runner.client.run(refused.anything, 3, timeout=20) == 3


@pytest.mark.req("CL11", "DB1")
async def test_urls_of_no_database() -> None:
    """At once, with what to check, and without the password."""
    urls = {
        f"postgresql://me:secret@127.0.0.1:{free_port()}/x": "Check host and port",
        "postgresql://me:secret@127.0.0.1:99999/x": "port 99999",
        "mysql://me:secret@127.0.0.1/x": "mysql is not in this release",
        "sqlite:////no/such/folder/x.db": "folder",
    }
    found = await asyncio.gather(*map(opening, urls))
    for text, (url, says) in zip(found, urls.items(), strict=True):
        assert says in text, url
        assert "secret" not in text


async def opening(url: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        async with Client(url):
            pass
    return str(caught.value)


async def test_a_cancelled_wait_leaves_the_run_alone(migrated_url: str) -> None:
    async with runner_on(migrated_url, refused.WORKFLOWS, **storage_of(migrated_url)) as runner:
        handle = await runner.client.start(refused.waits)
        with pytest.raises(TimeoutError):
            await handle.wait(0.05)
        with pytest.raises(TimeoutError):
            await handle.wait(-1)
        await until_status(runner.client, handle.run_id, RunStatus.RUNNING)
        await handle.signal("number", 5)
        assert await handle.wait(20) == 5
