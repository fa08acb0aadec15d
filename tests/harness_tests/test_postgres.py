"""The private server: starts, forgets nothing over a crash, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.harness.pods import ROOT
from tests.harness.postgres import PrivatePostgres, find_binaries, free_port, reap_orphans
from tests.harness.waiting import until

LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
pytestmark = pytest.mark.skipif(
    find_binaries() is None, reason="PostgreSQL binaries are not present"
)


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    with PrivatePostgres() as own:
        yield own


async def test_restart_keeps_committed_rows_and_the_address(server: PrivatePostgres) -> None:
    url = server.url()
    connection = await asyncpg.connect(url)
    await connection.execute("create table kept (n int)")
    await connection.execute("insert into kept select generate_series(1, 50)")
    old_pid = server.pid
    server.restart(mode="immediate")
    assert server.pid != old_pid
    with pytest.raises(LOST):
        await connection.fetchval("select 1")
    connection.terminate()
    assert server.url() == url
    assert (await server.query("select count(*) as n from kept"))[0]["n"] == 50


async def test_kill_is_a_crash_from_which_the_server_recovers(server: PrivatePostgres) -> None:
    await server.query("create table crashed as select 7 as n")
    server.kill()
    assert not server.running
    with pytest.raises(ConnectionRefusedError):
        await server.query("select 1")
    server.start()
    assert (await server.query("select n from crashed"))[0]["n"] == 7


async def test_databases_are_fresh_and_copy_their_template(server: PrivatePostgres) -> None:
    made = []

    def prepare(url: str) -> None:
        made.append(url)
        server.run_sql("create table t as select 1 as n", database=url.rpartition("/")[2])

    template = server.template("stencil", prepare)
    assert server.template("stencil", prepare) == template
    assert made == [server.url("stencil")]
    first, second = (server.create_database(template=template) for _ in range(2))
    await server.query("delete from t", database=first)
    assert await server.query("select n from t", database=first) == []
    assert len(await server.query("select n from t", database=second)) == 1
    server.drop_database(first)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await server.query("select 1", database=first)


def test_durable_server_keeps_fsync_on(server: PrivatePostgres) -> None:
    assert server.run_sql("show fsync")[0]["fsync"] == "off"
    assert server.run_sql("show synchronous_commit")[0]["synchronous_commit"] == "on"
    with PrivatePostgres(durable=True, settings={"max_connections": "17"}) as durable:
        assert durable.run_sql("show fsync")[0]["fsync"] == "on"
        assert durable.run_sql("show max_connections")[0]["max_connections"] == "17"


OWNER = """
    import os, sys
    from tests.harness.postgres import PrivatePostgres
    server = PrivatePostgres().start()
    print(server.pid, server.log_path.parent, flush=True)
    {end}
"""


def _owned(end: str) -> tuple[int, Path, int]:
    script = textwrap.dedent(OWNER).format(end=end)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    pid, folder = done.stdout.split()
    return int(pid), Path(folder), done.returncode


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_server_ends_with_its_owner_even_by_an_exception() -> None:
    pid, folder, code = _owned("raise RuntimeError('the tests broke')")
    assert code == 1
    await until(lambda: not _alive(pid), what="end of the server")
    assert not folder.exists()


async def test_a_killed_owner_leaves_an_orphan_that_the_next_start_ends() -> None:
    pid, folder, code = _owned("os.kill(os.getpid(), 9)")
    assert code == -9
    assert _alive(pid)
    assert folder in reap_orphans()
    await until(lambda: not _alive(pid), what="end of the orphan")
    assert not folder.exists()


def test_free_ports_are_outside_the_range_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < first
