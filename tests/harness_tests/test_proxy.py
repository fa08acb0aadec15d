"""The proxy loses connections exactly where it says, seen from the server's side too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import CutWhere, HangWhere, PostgresProxy, Rule
from tests.harness.waiting import until
from tests.harness.wire import statement_name

INSERT = "-- name: insert_row\ninsert into rows values ($1)"
LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)


class Setting:
    """A server with one table, the proxy before it, and a connection round the proxy."""

    def __init__(self, direct: asyncpg.Connection, proxy: PostgresProxy, database: str) -> None:
        self.direct, self.proxy, self.database = direct, proxy, database

    async def client(self, application: str = "client") -> asyncpg.Connection:
        settings = {"application_name": application}
        url = self.proxy.url(self.database)
        return await asyncpg.connect(url, timeout=5, server_settings=settings)

    async def rows(self) -> list[int]:
        return [row["n"] for row in await self.direct.fetch("select n from rows order by n")]

    async def session_gone(self, pid: int) -> None:
        async def gone() -> bool:
            sql = "select count(*) from pg_stat_activity where pid = $1"
            return not await self.direct.fetchval(sql, pid)

        await until(gone, what=f"end of backend {pid}")

    async def waits_for_lock(self, pid: int) -> None:
        async def waiting() -> bool:
            return bool(await self.direct.fetchval("select pg_blocking_pids($1)", pid))

        await until(waiting, what=f"lock wait of backend {pid}")


@pytest.fixture
async def setting(postgres: PrivatePostgres, postgres_url: str) -> AsyncIterator[Setting]:
    database = postgres_url.rpartition("/")[2]
    direct = await asyncpg.connect(postgres_url)
    await direct.execute("create table rows (n int primary key)")
    async with PostgresProxy(postgres.port) as proxy:
        yield Setting(direct, proxy, database)
    await direct.close()


async def happened(rule: Rule) -> None:
    await asyncio.wait_for(rule.happened.wait(), 5)


async def test_everything_passes_and_executions_are_counted_by_name(setting: Setting) -> None:
    client = await setting.client("counted")
    for n in range(5):
        await client.execute(INSERT, n)
    prepared = await client.prepare("/* name: look */ select n from rows where n = $1")
    assert [await prepared.fetchval(n) for n in (3, 4)] == [3, 4]
    async with client.transaction():
        await client.execute("-- name: sweep\ndelete from rows where n < 2")
    assert await client.fetchval("select repeat('x', 1000000)") == "x" * 1_000_000
    counted = setting.proxy.statements
    assert (counted["insert_row"], counted["look"], counted["sweep"]) == (5, 2, 1)
    assert (counted["begin"], counted["commit"], counted["select"]) == (1, 1, 1)
    assert setting.proxy.messages["E"] >= 7
    connection = setting.proxy.connections[0]
    assert connection.parameters["application_name"] == "counted"
    assert connection.backend_pid == client.get_server_pid()
    await client.close()
    await until(lambda: not setting.proxy.connections, what="end of the proxied connection")


@pytest.mark.parametrize("parameters", [(), (2,)], ids=["simple", "extended"])
@pytest.mark.parametrize(("where", "written"), [("before", []), ("after_commit", [2])])
async def test_cut_before_writes_nothing_and_after_commit_writes(
    setting: Setting, where: CutWhere, written: list[int], parameters: tuple[int, ...]
) -> None:
    client = await setting.client()
    pid = client.get_server_pid()
    rule = setting.proxy.cut(name="insert_row", where=where)
    sql = INSERT if parameters else INSERT.replace("$1", "2")
    with pytest.raises(LOST):
        await client.execute(sql, *parameters)
    await happened(rule)
    assert rule.backend_pid == pid
    assert rule.error is None
    assert rule.answer == ("INSERT 0 1" if where == "after_commit" else None)
    await setting.session_gone(pid)
    assert await setting.rows() == written
    client.terminate()


async def test_cut_reports_a_statement_that_failed_on_the_server(setting: Setting) -> None:
    await setting.direct.execute("insert into rows values (1)")
    client = await setting.client()
    rule = setting.proxy.cut(name="insert_row", where="after_commit")
    with pytest.raises(LOST):
        await client.execute(INSERT, 1)
    await happened(rule)
    assert rule.answer is None
    assert rule.error is not None
    assert rule.error.startswith("23505 ")


async def test_nth_counts_executions_of_a_prepared_statement(setting: Setting) -> None:
    client = await setting.client()
    prepared = await client.prepare(INSERT)
    third = setting.proxy.cut(name="insert_row", where="before", nth=3)
    fifth = setting.proxy.cut(name="insert_row", where="after_commit", nth=5)
    for n in (1, 2):
        await prepared.fetch(n)
    with pytest.raises(LOST):
        await prepared.fetch(3)
    await happened(third)
    client = await setting.client()
    await client.execute(INSERT, 4)
    with pytest.raises(LOST):
        await client.execute(INSERT, 5)
    await happened(fifth)
    assert await setting.rows() == [1, 2, 4, 5]


async def test_a_cut_commit_leaves_the_transaction_open_or_done(setting: Setting) -> None:
    async def insert(n: int) -> None:
        client = await setting.client()
        async with client.transaction():
            await client.execute(INSERT, n)

    places: list[CutWhere] = ["before", "after_commit"]
    for n, where in enumerate(places, 1):
        rule = setting.proxy.cut(predicate=lambda sql: sql.startswith("COMMIT"), where=where)
        with pytest.raises(LOST):
            await insert(n)
        await happened(rule)
        await setting.session_gone(rule.backend_pid)
    assert await setting.rows() == [2]


async def test_cut_in_a_lock_wait_leaves_the_backend_waiting(setting: Setting) -> None:
    blocker = setting.direct.transaction()
    await blocker.start()
    await setting.direct.execute("insert into rows values (9)")
    client = await setting.client()
    rule = setting.proxy.cut(name="insert_row", where="lock_wait", when=setting.waits_for_lock)
    with pytest.raises(LOST):
        await client.execute(INSERT, 9)
    await happened(rule)
    await setting.waits_for_lock(rule.backend_pid)  # the ghost session waits on
    await blocker.rollback()
    await setting.session_gone(rule.backend_pid)
    assert await setting.rows() == [9]


async def test_rules_can_be_kept_to_one_connection_and_repeated(setting: Setting) -> None:
    rule = setting.proxy.cut(
        name="insert_row",
        times=2,
        on=lambda connection: connection.parameters.get("application_name") == "unlucky",
    )
    lucky = await setting.client()
    for n in range(3):
        unlucky = await setting.client("unlucky")
        await lucky.execute(INSERT, n)
        if n < 2:
            assert not rule.happened.is_set()
            with pytest.raises(LOST):
                await unlucky.execute(INSERT, 10 + n)
        else:
            await unlucky.execute(INSERT, 10 + n)
            await unlucky.close()
    assert rule.happened.is_set()
    assert await setting.rows() == [0, 1, 2, 12]
    await lucky.close()


@pytest.mark.parametrize(("where", "written"), [("before", []), ("answer", [1])])
async def test_a_hung_statement_neither_answers_nor_fails(
    setting: Setting, where: HangWhere, written: list[int]
) -> None:
    client = await setting.client()
    rule = setting.proxy.hang(name="insert_row", where=where)
    call = asyncio.ensure_future(client.execute(INSERT, 1))
    await happened(rule)

    async def reached() -> bool:
        return await setting.rows() == written

    await until(reached, what="the statement's effect")
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    other = await setting.client()  # other connections are not touched
    await other.execute(INSERT, 2)
    setting.proxy.connections[0].reset()
    with pytest.raises(LOST):
        await call
    assert await setting.rows() == [*written, 2]
    await other.close()


@pytest.mark.parametrize(("where", "written"), [("before", []), ("answer", [1])])
async def test_a_call_comes_before_the_statement_or_before_its_answer(
    setting: Setting, where: HangWhere, written: list[int]
) -> None:
    seen: list[list[int]] = []

    async def look(pid: int) -> None:
        assert pid == client.get_server_pid()
        seen.append(await setting.rows())

    client = await setting.client()
    rule = setting.proxy.call(look, name="insert_row", where=where, times=2)
    for n in (1, 2, 3):
        assert await client.execute(INSERT, n) == "INSERT 0 1"
    assert rule.happened.is_set()
    assert seen == [written, [*written, 1 + len(written)]]
    assert await setting.rows() == [1, 2, 3]
    await client.close()


CLIENT = """
import asyncio, sys, asyncpg
async def main():
    connection = await asyncpg.connect(sys.argv[1])
    await connection.execute(sys.argv[2], 1)
    await connection.execute(sys.argv[2], 2)
asyncio.run(main())
"""


@pytest.mark.parametrize(("where", "written"), [("before", [1]), ("answer", [1, 2])])
async def test_a_client_process_can_be_killed_at_a_statement(
    setting: Setting, where: HangWhere, written: list[int]
) -> None:
    url = setting.proxy.url(setting.database)
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, url, INSERT)

    async def kill(pid: int) -> None:
        client.kill()
        await client.wait()

    rule = setting.proxy.call(kill, name="insert_row", where=where, nth=2)
    await happened(rule)
    await setting.session_gone(rule.backend_pid)
    assert await setting.rows() == written
    assert client.returncode == -9


async def test_hang_all_holds_old_and_new_connections_until_resume(setting: Setting) -> None:
    client = await setting.client()
    setting.proxy.hang_all()
    with pytest.raises(TimeoutError):
        await asyncpg.connect(setting.proxy.url(setting.database), timeout=0.3)
    call = asyncio.ensure_future(client.execute(INSERT, 1))
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    assert await setting.rows() == []
    setting.proxy.resume()
    await asyncio.wait_for(call, 5)
    assert await setting.rows() == [1]
    await client.close()


async def test_refusing_cuts_and_refuses_and_then_accepts_again(setting: Setting) -> None:
    client = await setting.client()
    async with setting.proxy.refusing():
        with pytest.raises(LOST):
            await client.fetchval("select 1")
        with pytest.raises(ConnectionRefusedError):
            await setting.client()
    again = await setting.client()
    assert await again.fetchval("select 1") == 1
    await again.close()


async def test_a_fatal_answer_of_the_server_still_arrives(setting: Setting) -> None:
    client = await setting.client()
    call = asyncio.ensure_future(client.fetchval("select pg_sleep(30)"))
    pid = client.get_server_pid()
    await until(lambda: setting.proxy.statements["select"], what="the sleeping statement")
    await setting.direct.fetchval("select pg_terminate_backend($1)", pid)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await asyncio.wait_for(call, 5)
    assert caught.value.sqlstate in {"57P01", "08006", "08003"}


async def test_a_cancel_request_passes(setting: Setting) -> None:
    client = await setting.client()
    with pytest.raises(TimeoutError):
        await client.fetchval("select pg_sleep(30)", timeout=0.2)
    assert await client.fetchval("select 5") == 5
    await client.close()


async def test_close_frees_hung_connections_and_ghosts(postgres: PrivatePostgres) -> None:
    async with PostgresProxy(postgres.port) as proxy:
        client = await asyncpg.connect(proxy.url("postgres"))
        rule = proxy.hang(name="select")
        call = asyncio.ensure_future(client.fetchval("select 1"))
        await happened(rule)
    with pytest.raises(LOST):
        await asyncio.wait_for(call, 5)
    with contextlib.suppress(*LOST):
        await client.close(timeout=1)


def test_a_statement_is_named_by_its_comment_or_first_word() -> None:
    assert statement_name("-- name: commit\nwith batch as (…)") == "commit"
    assert statement_name("\n/* name: due_runs */ select 1") == "due_runs"
    assert statement_name("-- :claim  $1 me\nwith …") == "claim"
    assert statement_name("COMMIT;") == "commit"
    assert statement_name("") == ""
