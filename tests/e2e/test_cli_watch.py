"""``perdure cluster status --watch``: line by line, over a database that goes away, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Commands, environment, pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy


class Watcher:
    """A watching command, read as it writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def until(self, wanted: Callable[[Any], object], *, what: str) -> Any:
        """The next look of which this is true."""
        assert self.process.stdout is not None
        last = ""
        try:
            async with asyncio.timeout(30):
                while line := await self.process.stdout.readline():
                    last = line.decode()
                    if wanted(look := json.loads(last)):
                        return look
        except TimeoutError:
            pytest.fail(f"{what}: not within 30 s; last was {last}")
        pytest.fail(f"the watch ended while waiting for {what}; last was {last}")

    async def interrupt(self) -> tuple[int, str]:
        """Ctrl-C: its exit code and what it had to complain about."""
        self.process.send_signal(signal.SIGINT)
        ending = asyncio.ensure_future(self.process.communicate())
        done, _ = await asyncio.wait([ending], timeout=30)
        if not done:  # where it stands, from the interpreter's own mouth
            self.process.send_signal(signal.SIGABRT)
        _, complaints = await ending
        return self.process.returncode or 0, complaints.decode()


@asynccontextmanager
async def watching(url: str, folder: Path, *options: str) -> AsyncIterator[Watcher]:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "perdure",
            "cluster",
            "status",
            "--watch",
            "--db",
            url,
            *options,
        ),
        env=environment(),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # What is started in the background of a script ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield Watcher(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.req("CL8", "DB7")
async def test_a_watch_goes_on_while_the_database_is_away(
    migrated_postgres_url: str, postgres: PrivatePostgres, tmp_path: Path
) -> None:
    cli = Commands(migrated_postgres_url, tmp_path)
    database = migrated_postgres_url.rpartition("/")[2]
    options = ("--every", "0.2", "--format", "json")
    async with PostgresProxy(postgres.port) as proxy:
        url = proxy.url(database)
        with pods(cli, tmp_path) as running:
            pod = await running.ready()
            async with watching(url, tmp_path, *options) as watch:
                look = await watch.until(
                    lambda look: look["runners"][0]["shards"] == 256, what="the pod's shards"
                )
                assert look["error"] is None
                for number in range(3):
                    cli.start({"id": f"W-{number}", "customer": "Ada", "cents": 5})
                busy = await watch.until(
                    lambda look: (
                        look["runners"][0]["rates"]
                        and look["runners"][0]["rates"]["steps_per_second"] > 0
                    ),
                    what="a rate",
                )
                assert busy["runners"][0]["live"]["slots"] == 200
                async with proxy.refusing():
                    away = await watch.until(lambda look: look["error"], what="the outage")
                    # The last picture stays; the pod, whose database is not away, still answers.
                    assert away["read_at"] < away["at"] + 60
                    assert away["runners"][0]["state"] == "live"
                back = await watch.until(lambda look: not look["error"], what="the database back")
                assert back["read_at"] > away["read_at"]
                pod.kill()
                await watch.until(
                    lambda look: look["runners"][0]["state"] != "live", what="the death of the pod"
                )
                assert await watch.interrupt() == (0, "")
        # One that begins while the database is away waits for it, and tables are for people.
        async with proxy.refusing(), watching(url, tmp_path, "--every", "0.2") as waiting:
            assert waiting.process.stdout is not None
            async with asyncio.timeout(30):
                first = await waiting.process.stdout.readline()
                assert first.startswith(b"the database does not answer")
                await proxy.accept()
                while b"active replicas 0" not in (await waiting.process.stdout.readline()):
                    pass
            assert await waiting.interrupt() == (0, "")
    cli("cluster", "status", "--watch", "--every", "0").refused()
    assert "add --watch" in cli("cluster", "status", "--every", "1").refused()
