"""Opening a PostgreSQL database: what is wrong is said in words, within ten seconds, and never with a password."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, migrate
from perdure.storage.errors import ConfigurationError, PerdureError, SchemaError
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.session import open_session
from tests.harness.postgres import MISSING, PrivatePostgres, find_binaries, free_port

PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def guarded() -> Iterator[PrivatePostgres]:
    """A server of our own that wants a password from the role `guarded`."""
    if find_binaries() is None:
        pytest.skip(MISSING)
    with PrivatePostgres() as server:
        server.run_sql(f"create role guarded login password '{PASSWORD}'")
        rules = Path(server.run_sql("show hba_file")[0][0])
        rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        server.run_sql("select pg_reload_conf()")
        yield server


async def refusal(url: str, **settings: object) -> PerdureError:
    """What opening says; no part of it, cause and context included, may hold a password."""
    store = connect(DatabaseSettings(url, **settings), clock=SystemClock()).runs()  # type: ignore[arg-type]
    with pytest.raises(PerdureError) as caught:
        try:
            await store.open()
        finally:
            await store.close()
    everything = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert "battery" not in everything
    return caught.value


def url_of(
    port: int, *, user: str = "guarded", password: str = PASSWORD, host: str = "127.0.0.1"
) -> str:
    return f"postgresql://{user}:{password}@{host}:{port}/postgres"


@pytest.mark.req("DB1")
async def test_the_right_password_opens(guarded: PrivatePostgres) -> None:
    error = await refusal(url_of(guarded.port))
    assert isinstance(error, SchemaError)  # it got in, and found no tables
    assert "perdure migrate --db postgresql://guarded:***@127.0.0.1" in str(error)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"password": "wrong-battery"}, "Check user and password"),
        ({"user": "nobody_here"}, "Check user and password"),
        ({"host": "no-such-host.invalid"}, "host name"),
        ({"host": "localhost"}, "Check user and password"),
    ],
)
async def test_what_to_check_is_said(
    guarded: PrivatePostgres, changes: dict[str, str], says: str
) -> None:
    error = await refusal(url_of(guarded.port, **({"password": "wrong-battery"} | changes)))
    assert isinstance(error, ConfigurationError)
    assert says in str(error)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ("sslmode=banana", "`sslmode` parameter must be one of"),
        ("sslmode=require", "a PostgreSQL without it, where sslmode asks for it"),
        ("sslmode=verify-full&sslrootcert=/no/such.crt", "does not exist"),
        ("ssl_min_protocol_version=9", "No such TLS version"),
        ("target_session_attrs=standby", "target_session_attrs"),
    ],
)
async def test_parameters_of_the_url_that_do_not_work(
    guarded: PrivatePostgres, parameters: str, says: str
) -> None:
    error = await refusal(f"{url_of(guarded.port)}?{parameters}")
    assert isinstance(error, ConfigurationError)
    assert says in str(error)


async def test_a_socket_that_does_not_exist() -> None:
    error = await refusal(f"postgresql://guarded:{PASSWORD}@/postgres?host=/no/such/folder")
    assert isinstance(error, ConfigurationError)
    assert "/no/such/folder" in str(error)
    assert "does not exist" in str(error)


async def test_a_database_that_does_not_exist(guarded: PrivatePostgres) -> None:
    error = await refusal(url_of(guarded.port).replace("/postgres", "/missing"))
    assert 'database "missing" does not exist' in str(error)
    assert "createdb" in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nothing_listens(host: str) -> None:
    error = await refusal(url_of(free_port(), host=host))
    assert isinstance(error, ConfigurationError)
    assert "Check host and port" in str(error)


@contextlib.asynccontextmanager
async def listener(answer: bytes | None) -> AsyncIterator[int]:
    """A TCP server: it answers the first bytes with these, None: never, and keeps the connection."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
            if answer is None:
                await done.wait()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        done.set()
        server.close()


@pytest.mark.req("CL7")
async def test_a_silent_server_is_given_up_within_ten_seconds() -> None:
    """Both ways in: the kernel takes the connection and nobody answers, with and without an accept."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf:
        async with listener(None) as silent:
            ports = [deaf.getsockname()[1], silent]
            begun = time.monotonic()
            errors = await asyncio.gather(
                *(refusal(url_of(port)) for port in ports),
                *(asyncio.to_thread(_migration_refusal, url_of(port)) for port in ports),
            )
            assert time.monotonic() - begun < 12.0
    for error in errors:
        assert isinstance(error, ConfigurationError)
        assert "no answer from 127.0.0.1" in str(error)
        assert "within 10 s" in str(error)


def _migration_refusal(url: str) -> BaseException:
    with pytest.raises(ConfigurationError) as caught:
        migrate(DatabaseSettings(url))
    assert "battery" not in "".join(traceback.format_exception(caught.value))
    return caught.value


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"SSH-2.0-OpenSSH_9.2\r\n"]
)
async def test_what_is_not_postgresql(answer: bytes) -> None:
    async with listener(answer) as port:
        error = await refusal(url_of(port))
    assert isinstance(error, ConfigurationError)
    assert "PostgreSQL" in str(error)
    assert "Check host" in str(error)


async def test_an_unknown_url_parameter_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'pool_size'") as caught:
        connect(
            DatabaseSettings(url_of(5432) + "?pool_size=3&sslpassword=battery"), clock=SystemClock()
        ).runs()
    assert "battery" not in str(caught.value)


async def test_a_migration_with_a_wrong_password(guarded: PrivatePostgres) -> None:
    error = await asyncio.to_thread(
        _migration_refusal, url_of(guarded.port, password="wrong-battery")
    )
    assert "Check user and password" in str(error)


# ---- the schema's version ---------------------------------------------------------------------


@pytest.mark.req("OP3")
async def test_a_schema_that_does_not_fit_refuses_and_says_what_to_run(postgres_url: str) -> None:
    assert isinstance(await refusal(postgres_url), SchemaError)
    migrate(DatabaseSettings(postgres_url))
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute("update perdure_meta set value = '0' where key = 'schema_version'")
        assert "is version 0, this release needs 2" in str(await refusal(postgres_url))
        await connection.execute(
            "update perdure_meta set value = case key when 'schema_version' then '9' else '8' end"
            " where key in ('schema_version', 'min_code_version')"
        )
        error = await refusal(postgres_url)
        assert isinstance(error, SchemaError)
        assert "install a newer perdure" in str(error)
        # The next version serves this release too, as long as it says so.
        await connection.execute(
            "update perdure_meta set value = case key when 'schema_version' then '3' else '1' end"
            " where key in ('schema_version', 'min_code_version')"
        )
        store = connect(DatabaseSettings(postgres_url), clock=SystemClock()).runs()
        assert (await store.open()).schema_version == 3
        await store.close()
    finally:
        await connection.close()


@pytest.mark.req("CL3")
async def test_another_topology_or_lock_mode_refuses(postgres_url: str) -> None:
    migrate(DatabaseSettings(postgres_url))
    first, second = (
        connect(DatabaseSettings(postgres_url), clock=SystemClock()).cluster() for _ in range(2)
    )
    await first.open()
    await second.open()
    try:
        agreed = await asyncio.gather(
            first.agree(shard_count=7, lock_mode="row"),
            second.agree(shard_count=7, lock_mode="row"),
        )
        assert agreed[0] == agreed[1]
        shards = (await first.read_topology()).shards
        assert [shard.slot_lo for shard in shards][1:] == [s.slot_hi + 1 for s in shards][:-1]
        assert (shards[0].slot_lo, shards[-1].slot_hi, len(shards)) == (0, 65_535, 7)
        with pytest.raises(ConfigurationError, match="PERDURE_SHARDS=7"):
            await second.agree(shard_count=8, lock_mode="row")
        with pytest.raises(ConfigurationError, match="PERDURE_SHARD_LOCK=row"):
            await second.agree(shard_count=7, lock_mode="advisory")
    finally:
        await first.close()
        await second.close()


@pytest.mark.parametrize(("chosen", "used"), [(None, "lz4"), ("pglz", "pglz")])
async def test_large_values_are_packed_the_quick_way_unless_another_was_chosen(
    postgres: PrivatePostgres, chosen: str | None, used: str
) -> None:
    offered = (
        "select 'lz4' = any(enumvals) from pg_settings where name = 'default_toast_compression'"
    )
    if not postgres.run_sql(offered)[0][0]:
        pytest.skip("this PostgreSQL was built without lz4")
    database = await asyncio.to_thread(postgres.create_database)
    if chosen is not None:
        postgres.run_sql(f"alter database {database} set default_toast_compression = {chosen}")
    url = postgres.url(database)
    session = await open_session(DatabaseSettings(url), address_of(url), hot=True)
    try:
        shown = await session.fetch("show default_toast_compression", writes=False, deadline=5)
        assert shown[0][0] == used
    finally:
        await session.close()
