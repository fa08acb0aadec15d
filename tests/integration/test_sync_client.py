"""The blocking client: from scripts, from threads, and where it must not be used."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type

import pytest

from perdure import (
    ClientClosed,
    ConfigurationError,
    Context,
    RunNotFound,
    RunStatus,
    SyncClient,
    SyncHandle,
    WorkflowCancelled,
    step,
    workflow,
)
from tests.harness.waiting import until_blocking
from tests.integration.in_process import Definitions, runner_on

pytestmark = pytest.mark.req("WF8", "SL5")


@step
async def double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


@workflow(name="doubles")
async def doubles(ctx: Context, number: int) -> int:
    return await ctx.step(double, number)


@workflow(name="waits")
async def waits(ctx: Context) -> str:
    return await ctx.wait_signal("word", str)


WORKFLOWS: Definitions = [doubles, waits]


@pytest.fixture
def served(migrated_url: str) -> Iterator[str]:
    """A database with a runner, on a loop of its own thread: the test's thread has none."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with runner_on(migrated_url, WORKFLOWS, park_after=0.05):
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield migrated_url
    over.set()
    thread.join(30)


def test_everything_a_client_does(served: str) -> None:
    with SyncClient(served, workflows=WORKFLOWS) as client:
        handle = client.start(doubles, 21, run_id="d1")
        assert_type(handle, SyncHandle[int])
        assert handle.wait(20) == 42
        assert_type(client.run(doubles, 4), int)
        assert client.run(doubles, 4, timeout=20) == 8
        assert client.start("doubles", 5).wait(20) == 10
        with pytest.raises(ValueError, match="-1 is negative"):
            client.run(doubles, -1)

        waiting = client.start(waits, run_id="w1")
        with pytest.raises(TimeoutError):
            waiting.wait(0.05)
        until_blocking(
            lambda: (info := waiting.poll()) is not None and info.status is RunStatus.SUSPENDED,
            what="the run waits",
            deadline=20,
        )
        client.suspend("w1", "look first")
        assert client.why("w1").facts["said"] == "look first"
        client.resume("w1")
        waiting.signal("word", "go", id="once")
        assert client.wait("w1", 20) == "go"
        assert {event.type for event in client.events("w1")} >= {"run-suspended", "run-resumed"}
        assert [entry.kind for entry in client.journal("w1")] == ["signal"]

        stopped = client.start(waits)
        stopped.cancel("not needed")
        with pytest.raises(WorkflowCancelled):
            stopped.wait(20)
        again = client.retry(stopped.run_id)
        again.signal("word", "now")
        assert again.wait(20) == "now"
        assert [info.run_id for info in client.list(id_prefix="d1")] == ["d1"]
        assert client.get("nobody") is None
        with pytest.raises(RunNotFound):
            client.handle("nobody").wait()
        assert len(client.cluster().runners) == 1


def test_many_threads_share_it(served: str) -> None:
    with (
        SyncClient(served, workflows=WORKFLOWS) as client,
        ThreadPoolExecutor(16) as threads,
    ):
        results = list(threads.map(lambda n: client.run(doubles, n, timeout=30), range(100)))
    assert results == [2 * n for n in range(100)]


def test_many_starts_in_one_call(served: str) -> None:
    seen: list[tuple[int, int]] = []
    with SyncClient(served, workflows=WORKFLOWS) as client:
        payloads: list[Any] = [1, 2, "three"]
        started = client.start_many(doubles, payloads, progress=lambda *done: seen.append(done))
        assert [each.created for each in started] == [True, True, False]
        assert started[2].error is not None
        assert [each.handle.wait(20) for each in started if each.handle is not None] == [2, 4]
    assert seen[-1] == (3, 3)


def test_closing_ends_waits_of_other_threads(served: str) -> None:
    client = SyncClient(served, workflows=WORKFLOWS).open()
    handle = client.start(waits)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            handle.wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until_blocking(
        lambda: client._client is not None and client._client._watcher._waiting,
        what="the other thread waits",
    )
    client.close()
    client.close()
    thread.join(10)
    assert [type(error) for error in raised] == [ClientClosed]
    with pytest.raises(ClientClosed, match="not open"):
        client.get("x")


async def test_below_a_running_loop_it_names_the_other_client(migrated_sqlite_url: str) -> None:
    client = SyncClient(migrated_sqlite_url)
    for use in (client.open, lambda: client.get("x"), client.__enter__):
        with pytest.raises(ClientClosed, match=r"async with Client\("):
            use()
    await asyncio.to_thread(client.open)
    with pytest.raises(ClientClosed, match=r"async with Client\("):
        client.get("x")
    assert await asyncio.to_thread(client.get, "x") is None
    await asyncio.to_thread(client.close)


def test_what_cannot_be_reached_is_told_and_nothing_is_left(tmp_path) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError):
        SyncClient("mongodb://x")
    with pytest.raises(ConfigurationError):
        SyncClient(f"sqlite:///{tmp_path}/missing.db").open()
    until_blocking(lambda: threading.active_count() == before, what="no thread is left")


def test_a_call_that_meets_the_close_is_told(served: str, monkeypatch) -> None:
    """It has the loop in its hands already, and would give its work to one that has turned for the last time."""
    client = SyncClient(served, workflows=WORKFLOWS).open()
    told: list[object] = []
    began, turned, given = threading.Event(), threading.Event(), threading.Event()
    give = asyncio.run_coroutine_threadsafe

    def late(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        if threading.current_thread() is not caller:
            return give(work, loop)
        began.set()
        turned.wait(0.5)
        future = give(work, loop)
        given.set()
        return future

    assert client._loop is not None
    end_loop = client._loop.close

    def last() -> None:
        turned.set()
        given.wait(5)
        end_loop()

    def call() -> None:
        try:
            told.append(client.get("x"))
        except BaseException as error:
            told.append(error)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    client._loop.close = last  # type: ignore[method-assign]
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert began.wait(10)
    client.close()
    caller.join(5)
    assert len(told) == 1, "it waits for ever"
    assert told[0] is None or isinstance(told[0], ClientClosed)


FORKS = """
    import os, sys
    from perdure import ClientClosed, ConfigurationError, Settings, SyncClient
    client = SyncClient(sys.argv[1]).open()
    assert client.get("x") is None
    with client._lock, client._gate:  # as if other threads were at it
        child = os.fork()
    if child == 0:
        try:
            client.get("x")
        except ClientClosed as error:
            assert "forked" in str(error), error
            client.close()
            with SyncClient(sys.argv[1]) as own:
                assert own.get("x") is None
            # The same one may be opened here, also by a second try, and whatever the parent was doing with it.
            refused = client._settings
            client._settings = Settings(db="postgresql://postgres@127.0.0.1:1/none")
            try:
                client.open()
            except ConfigurationError:
                client._settings = refused
                client.open()
                os._exit(7 if client.get("x") is None else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.get("x") is None
    client.close()
"""


def test_in_a_forked_process_it_says_so(migrated_postgres_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKS), migrated_postgres_url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
