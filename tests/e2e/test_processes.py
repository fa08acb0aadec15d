"""``perdure serve --processes N``: a parent and its pods, as real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from perdure.runtime.cli.processes import child_options
from perdure.runtime.cli.stop_signals import TOGETHER
from perdure.runtime.settings import Settings
from perdure.storage.errors import ConfigurationError
from tests.e2e.commands import Commands, environment
from tests.harness.pods import Pod
from tests.harness.postgres import free_port
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until

APPLICATION = """
    import asyncio
    import os
    from perdure import App, Context, step, workflow

    @step
    async def brief(number: int) -> int:
        await asyncio.sleep(0.2)
        return number

    @workflow(name="counts")
    async def counts(ctx: Context, until: int) -> list[int]:
        return [await ctx.step(brief, number) for number in range(until)]

    @step
    async def until_told() -> int:
        with open("steps", "a") as steps:
            steps.write(f"begun-{os.getpid()}\\n")
        while not os.path.exists("go"):
            await asyncio.sleep(0.05)
        with open("steps", "a") as steps:
            steps.write(f"ended-{os.getpid()}\\n")
        return os.getpid()

    @workflow(name="waits")
    async def waits(ctx: Context) -> int:
        return await ctx.step(until_told)

    app = App("counting", workflows=[counts, waits])
"""


@pytest.fixture
def parent(migrated_postgres_url, tmp_path):
    """Starts the parent of two pods; in the end no process of it is left."""
    (tmp_path / "counting.py").write_text(textwrap.dedent(APPLICATION))
    started: list[Pod] = []

    def make(*options: str, url: str = migrated_postgres_url) -> Pod:
        command = [sys.executable, "-m", "perdure", "serve", "counting:app", "--processes", "2"]
        env = {"PERDURE_DB": url, "PERDURE_LEASE": "2", "POD_NAME": "pod-1"}
        log = tmp_path / "parent.log"
        started.append(
            Pod(
                "parent",
                [*command, "--runner-port", "0", *options],
                env=environment(**env),
                log_path=log,
                port=0,
                cwd=tmp_path,
            )
        )
        return started[-1]

    yield make
    for pod in started:
        for pid in children_of(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pod.alive:
            pod.kill()


def children_of(parent: Pod) -> list[int]:
    return [int(pid) for pid in re.findall(r"process.started .*pid=(\d+)", parent.log)]


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and _alive(pid)]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def cli(migrated_postgres_url, tmp_path):
    return Commands(migrated_postgres_url, tmp_path)


async def names_of_live(cli: Commands, count: int) -> set[str]:
    async def look() -> set[str] | None:
        found = cli("cluster", "status", "--format", "json").ok().json["runners"]
        names = {each["replica_id"] for each in found if each["state"] == "live"}
        return names if len(names) == count else None

    names = await until(look, what=f"{count} live pods", deadline=40, interval=0.2)
    assert names is not None
    return names


@pytest.mark.req("CL1", "CL5", "CL8")
async def test_a_crashed_child_is_started_again_and_nothing_is_lost(parent, cli, tmp_path):
    pod = parent()
    assert await names_of_live(cli, 2) == {"pod-1.1", "pod-1.2"}
    shown = cli("cluster", "status", "--process", "pod-1", "--format", "json").ok().json
    assert len(shown["runners"]) == 2
    runs = [
        cli.process("workflows", "start", "counts", "--payload", "8", "--app", "counting:app",
                    "--db", cli.url).ok().out.strip()
        for _ in range(3)
    ]  # fmt: skip
    victim = children_of(pod)[0]
    os.kill(victim, signal.SIGKILL)
    await pod.wait_log(r"process.crashed .*code=-9")
    await until(lambda: len(children_of(pod)) == 3, what="its successor", deadline=20)
    for run_id in runs:
        assert cli.wait_status(run_id, "succeeded")["result"] == list(range(8))
    await names_of_live(cli, 2)
    pod.terminate()
    assert await pod.wait_end() == 0
    assert living(children_of(pod)) == []


@pytest.mark.req("CL5")
async def test_children_that_are_told_while_they_import_cut_nothing_short(parent, tmp_path):
    (tmp_path / "counting.py").write_text("import time\nprint('importing')\ntime.sleep(60)")
    pod = parent()
    await until(lambda: pod.log.count("importing") == 2, what="both import", deadline=20)
    pod.terminate()
    assert await pod.wait_end(deadline=10) == 0


@pytest.mark.slow
async def test_killing_the_parent_ends_the_children_cleanly(parent, cli):
    pod = parent()
    await names_of_live(cli, 2)
    children = children_of(pod)
    pod.kill()
    await until(lambda: not living(children), what="the end of the children", deadline=20)
    assert pod.log.count("pod.stopped") == 2
    assert cli("cluster", "status", "--format", "json").ok().json["shards_unowned"] == 256


@pytest.mark.slow
@pytest.mark.req("CL5")
async def test_killing_the_parent_while_its_children_stop_cuts_no_step(parent, cli, tmp_path):
    """That it is gone is no second signal."""
    pod = parent()
    await names_of_live(cli, 2)
    cli.process("workflows", "start", "waits", "--app", "counting:app", "--db", cli.url).ok()
    steps = tmp_path / "steps"
    await until(steps.exists, what="the step", deadline=20)
    pod.terminate()
    await until(lambda: pod.log.count("pod.stopping") == 2, what="the drain of both", deadline=20)
    apart = time.monotonic() + 2 * TOGETHER
    await until(lambda: time.monotonic() > apart, what="a signal of its own", deadline=5)
    pod.kill()
    busy = int(steps.read_text().split("-")[1])
    assert busy in living(children_of(pod))
    apart = time.monotonic() + 2 * TOGETHER
    await until(lambda: time.monotonic() > apart, what="time to let go", deadline=5)
    (tmp_path / "go").touch()
    await until(lambda: not living(children_of(pod)), what="the end of the children", deadline=20)
    assert steps.read_text().split() == [f"begun-{busy}", f"ended-{busy}"]
    assert "pod.letting-go" not in pod.log


@pytest.mark.slow
async def test_what_cannot_boot_ends_all(parent):
    pod = parent("--set", "shards=0")
    assert await pod.wait_end() == 2
    pod = parent("--runner-host", "203.0.113.7")
    assert await pod.wait_end(deadline=30) == 2
    assert "process.misconfigured" in pod.log
    assert living(children_of(pod)) == []


@pytest.mark.req("CL5")
async def test_one_that_cannot_boot_has_the_others_drained(parent, cli, tmp_path):
    """The application cannot be imported any more when a child comes back: the parent tells the other at once, whose
    step may end although the operator, too, sends his first signal; the exit code is that of the misconfigured one."""
    pod = parent()
    await names_of_live(cli, 2)
    victim, other = (pid_of(pod, 2), pid_of(pod, 1))
    steps = tmp_path / "steps"

    async def begun() -> bool:
        cli.process(
            "workflows", "start", "waits", "--app", "counting:app", "--db", cli.url
        ).ok()  # fmt: skip
        return steps.exists() and f"begun-{other}" in steps.read_text()

    await until(begun, what="a step of the first child", deadline=40)
    (tmp_path / "counting.py").write_text("import nothing_of_that_name")
    os.kill(victim, signal.SIGKILL)
    await pod.wait_log("process.misconfigured .*code=2")
    await pod.wait_log("pod.stopping")
    pod.terminate()
    await pod.wait_log("process.told")
    (tmp_path / "go").touch()
    assert await pod.wait_end() == 2
    assert f"ended-{other}" in steps.read_text()
    assert "told twice" not in pod.log
    assert living(children_of(pod)) == []


@pytest.mark.req("CL1", "CL5")
async def test_a_port_that_is_taken_is_waited_for(parent, cli):
    """By a pod of the release before that is ending, or by a connection that was given it by chance."""
    port = free_ports(2)
    pod = parent("--set", f"runner_port={port}")
    await names_of_live(cli, 2)
    victim, other = pid_of(pod, 2), pid_of(pod, 1)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: bound(taken, port + 1), what="its port", deadline=5, interval=0.01)
        taken.listen()
        await pod.wait_log("process.crashed .*code=1 ")
    await names_of_live(cli, 2)
    assert living([other]) == [other]
    pod.terminate()
    assert await pod.wait_end() == 0


@pytest.mark.req("CL1", "DB1")
async def test_a_database_that_is_away_ends_nobody(postgres, migrated_postgres_url, parent, cli):
    """A child dies while new connections are refused: its successor cannot boot, which is no fault of its settings. It
    is tried again until the database is back; the other pod, whose connections are there, knows nothing of it."""
    async with PostgresProxy(postgres.port) as proxy:
        pod = parent(url=through(migrated_postgres_url, proxy))
        await names_of_live(cli, 2)
        victim, other = pid_of(pod, 2), pid_of(pod, 1)
        async with proxy.refusing(cut=False):
            os.kill(victim, signal.SIGKILL)
            await pod.wait_log("process.crashed .*code=1 ")
            assert living([other]) == [other]
        await names_of_live(cli, 2)
        assert living([other]) == [other]
        pod.terminate()
        assert await pod.wait_end() == 0
    assert "process.misconfigured" not in pod.log


def through(url: str, proxy: PostgresProxy) -> str:
    return re.sub(r"@[^/]+/", f"@127.0.0.1:{proxy.port}/", url)


def pid_of(parent: Pod, number: int) -> int:
    found = re.search(rf"process.started .*pid=(\d+) .*process={number}\b", parent.log)
    assert found is not None, parent.log
    return int(found[1])


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as taken:
            if all(bound(taken.enter_context(socket.socket()), first + n) for n in range(1, count)):
                return first


def bound(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_each_child_has_its_port_and_its_name():
    fixed = Settings(db="postgresql://host/name", runner_port=4000, replica_id="p", processes=3)
    words = " ".join(child_options(fixed, 3))
    assert words == "--set processes=1 --set runner_port=4002 --set replica_id=p.3"
    free = Settings(db="postgresql://host/name", runner_port=0, processes=3)
    assert " ".join(child_options(free, 3)) == "--set processes=1 --set runner_port=0"


def test_one_process_alone_has_no_siblings():
    with pytest.raises(ConfigurationError, match="processes"):
        Settings(db="sqlite:////tmp/x.db", processes=2)
    Settings(db="sqlite:////tmp/x.db", processes=2, runner_storage="sql")
