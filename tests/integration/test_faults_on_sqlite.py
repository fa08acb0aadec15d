"""One SQLite file under several processes: a killed pod, and the file's locks, which any careless open() would drop."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from perdure import Client
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, database_file, migrate
from tests.harness.pods import ROOT, Pod
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, handed_over, taken_from

pytestmark = pytest.mark.alone

LEASE = 5.0
WRITE_LOCK = 120
"""The byte of the -shm file that whoever writes locks (SQLite's file format, WAL-index locks)."""
BROKEN = ("disk I/O error", "malformed", "database is locked", "Traceback")


def file_of(url: str) -> Path:
    path = database_file(url)
    assert path is not None
    return path


def log_files(url: str) -> dict[str, int]:
    """The log and its index, by inode: a deleted and remade one is another."""
    database = file_of(url)
    places = [database.with_name(f"{database.name}-{suffix}") for suffix in ("wal", "shm")]
    return {place.name: place.stat().st_ino for place in places if place.exists()}


def posix_locks(pid: int, inode: int) -> list[tuple[str, int]]:
    """(READ or WRITE, first byte) of the locks a process holds on a file, by what the kernel says."""
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        held = "->" not in words and words[1] == "POSIX"
        if held and int(words[4]) == pid and int(words[5].rpartition(":")[2]) == inode:
            found.append((words[3], int(words[6])))
    return found


def locks_of(pid: int, path: Path) -> int:
    return len(posix_locks(pid, path.stat().st_ino))


def quiet(pods: list[Pod]) -> list[str]:
    """Lines of the pods' logs that speak of a broken file."""
    return [
        f"{pod.name}: {line}"
        for pod in pods
        for line in pod.log.splitlines()
        if any(word in line for word in BROKEN)
    ]


def needs_proc_locks() -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("no /proc/locks on this system")


# ---- locks ------------------------------------------------------------------------------------


@pytest.mark.req("CL6")
async def test_stores_that_open_and_close_leave_the_locks_of_this_process_alone(
    migrated_sqlite_url: str,
):
    needs_proc_locks()
    path = file_of(migrated_sqlite_url)
    me = os.getpid()
    clock = SystemClock()
    first = connect(DatabaseSettings(migrated_sqlite_url), clock=clock)
    store = first.runs()
    await store.open()
    files = log_files(migrated_sqlite_url)
    held = locks_of(me, path)
    assert held >= 1
    assert len(files) == 2
    for _ in range(3):
        cluster = connect(DatabaseSettings(migrated_sqlite_url), clock=clock).cluster()
        await cluster.open()
        await cluster.read_topology()
        await cluster.close()
        async with Client(Settings(db=migrated_sqlite_url)) as client:
            await client.cluster()
        migrate(DatabaseSettings(migrated_sqlite_url))
        assert locks_of(me, path) == held
    last_one_out(path)
    assert log_files(migrated_sqlite_url) == files
    await store.server_now()
    await store.read_run("nobody")
    # What all this would look like if somebody did open the file: the kernel drops every lock of this process.
    with path.open("rb"):
        pass
    assert locks_of(me, path) == 0
    await store.close()


def last_one_out(path: Path) -> None:
    """A process that opens the database and closes it: if it believes to be the last one, it deletes the log."""
    script = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        "c.execute('select count(*) from perdure_runs').fetchone(); c.close()"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=30)


@pytest.mark.slow
@pytest.mark.req("CL6", "CL8")
@pytest.mark.timeout(240)
async def test_commands_beside_pods_never_cost_a_pod_its_locks(
    audited_sqlite_url: str, tmp_path: Path
):
    needs_proc_locks()
    path = file_of(audited_sqlite_url)
    async with World(audited_sqlite_url, tmp_path, lease=LEASE) as w:
        pods = await w.start_pods(w.url, w.url)
        run_ids = await w.start_runs(20, Beats(work=0.01, rest=0.5))
        await w.beating(run_ids, steps=2)
        files = log_files(w.url)
        held = {pod.name: locks_of(pod.pid, path) for pod in pods}
        assert all(held.values())
        for arguments in 3 * (("cluster", "status"), ("workflows", "list"), ("migrate",)):
            command = [sys.executable, "-m", "perdure", *arguments, "--db", w.url]
            done = await run(command)
            assert done.returncode == 0, done.stderr
            last_one_out(path)
            assert log_files(w.url) == files
            assert all(locks_of(pod.pid, path) for pod in pods)
            await w.beating(run_ids, since=time.monotonic(), steps=1)
        await w.finish()
        assert await w.check() == 0
        assert quiet(pods) == []


async def run(command: list[str]) -> subprocess.CompletedProcess[str]:

    env = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=inherited | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- killed, frozen, stopped ------------------------------------------------------------------


def intact(url: str) -> bool:
    with closing(sqlite3.connect(file_of(url))) as connection:
        return bool(connection.execute("pragma integrity_check").fetchone() == ("ok",))


@pytest.mark.slow
@pytest.mark.req("CL5", "CL6")
@pytest.mark.timeout(240)
async def test_one_of_three_pods_on_a_file_is_killed(audited_sqlite_url: str, tmp_path: Path):
    async with World(audited_sqlite_url, tmp_path, lease=LEASE) as w:
        pods = await w.three()
        run_ids = await w.start_runs(60, Beats(work=0.02, rest=0.6))
        await w.beating(run_ids, steps=2)
        victim = pods[0]
        runner = (await w.runner_of(victim)).runner_id
        victim.kill()
        await w.beating(run_ids, since=victim.faults[0].at, steps=2)
        await w.finish()
        assert len(taken_from(await w.history(), runner)) >= 10
        beyond = await w.check(w.pods.faults)
        print(f"executions beyond commits: {beyond} of {len(w.executions)}")
        assert quiet(pods) == []
        assert intact(w.url)


@pytest.mark.slow
@pytest.mark.req("CL3", "CL6")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("writing", [False, True])
async def test_one_of_three_pods_on_a_file_is_frozen(
    audited_sqlite_url: str, tmp_path: Path, writing: bool
):
    """writing: it holds the file's write lock then, so that nobody can write, neither entries nor leases."""
    needs_proc_locks()
    async with World(audited_sqlite_url, tmp_path, lease=LEASE) as w:
        pods = await w.three()
        run_ids = await w.start_runs(60, Beats(work=0.05, spread=0.5, rest=0.2))
        await w.beating(run_ids, steps=2)
        before = {row.runner_id for row in (await w.topology()).runners}
        frozen = pods[0]
        while True:
            await until(lambda: writes(frozen, w.url) or not writing, what="a write", interval=0.0)
            frozen.freeze()
            await until(lambda: state(frozen) == "T", what="the stop", interval=0.0)
            if writes(frozen, w.url) == writing:
                break
            frozen.thaw()
        ends = time.monotonic() + 2 * LEASE
        await until(lambda: time.monotonic() >= ends, what="two leases", deadline=3 * LEASE)
        if writing:
            assert [(await pod.http("/readyz") or (0,))[0] for pod in pods[1:]] == [503, 503]
        thawed = frozen.thaw().until
        assert thawed is not None
        await w.even(3)
        await w.beating(run_ids, since=thawed, steps=2)
        await w.finish()
        beyond = await w.check(w.pods.faults)
        dead = {row.runner_id for row in (await w.topology()).runners if row.dead}
        print(f"executions beyond commits: {beyond} of {len(w.executions)}; dead: {len(dead)}")
        assert dead <= before
        assert len(dead) == (0 if writing else 1), "who cannot renew is not to blame"
        assert all(pod.alive for pod in pods)
        assert intact(w.url)


def state(pod: Pod) -> str:
    return Path(f"/proc/{pod.pid}/stat").read_text().rpartition(")")[2].split()[0]


def writes(pod: Pod, url: str) -> bool:
    """Whether it holds the write lock, the first byte of the locks in the log's index."""
    path = file_of(url)
    inode = path.with_name(f"{path.name}-shm").stat().st_ino
    return any(
        kind == "WRITE" and start == WRITE_LOCK for kind, start in posix_locks(pod.pid, inode)
    )


@pytest.mark.slow
@pytest.mark.req("CL5", "CL6")
@pytest.mark.timeout(240)
async def test_one_of_three_pods_on_a_file_is_stopped(audited_sqlite_url: str, tmp_path: Path):
    async with World(audited_sqlite_url, tmp_path, lease=LEASE) as w:
        pods = await w.three()
        run_ids = await w.start_runs(40, Beats(work=0.2))
        await w.beating(run_ids, steps=2)
        pods[0].terminate()
        told = time.monotonic()
        assert await pods[0].wait_end() == 0
        await w.beating(run_ids, since=told, steps=2)
        await w.finish()
        assert await w.check() == 0
        gaps = handed_over(w.executions, lambda e: e.pid == pods[0].pid)
        print(f"handed over {len(gaps)}, longest gap {max(gaps):.3f} s")
        assert max(gaps) < LEASE, "nobody waited for a lease to run out"
        assert quiet(pods) == []
