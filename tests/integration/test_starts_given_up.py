"""Runners whose start or stop is cancelled: nothing in the process goes on keeping a lease that nobody serves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from perdure import App, Context, Settings, workflow
from perdure.runtime.runner import Runner
from perdure.storage.clock import SystemClock
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.interface import ClusterStore, HintChannel, RunnerIdentity, RunStore
from tests.harness.waiting import until
from tests.integration.in_process import client_on, holds_all

pytestmark = pytest.mark.req("CL1", "CL5")

LEASE = 5.0


@workflow(name="doubles")
async def doubles(ctx: Context, number: int) -> int:
    return 2 * number


APP = App("given-up", workflows=[doubles])


def settings(url: str) -> Settings:
    return Settings(db=url, runner_storage="sql", replica_id="given-up", lease=LEASE)


class TellsOfRegistering:
    """A database that calls ``tell`` in the keeper's thread when the runner's row is there."""

    def __init__(self, url: str) -> None:
        self._database: Database = connect(DatabaseSettings(url), clock=SystemClock())
        self.loop = asyncio.get_running_loop()
        self.registered = asyncio.Event()

    def runs(self) -> RunStore:
        return self._database.runs()

    def cluster(self) -> ClusterStore:
        return self._database.cluster()

    def hints(self) -> HintChannel:
        return self._database.hints()

    def keeper(self) -> ClusterStore:
        store = self._database.keeper()
        register = store.register

        async def told(me: RunnerIdentity, lease: float) -> None:
            await register(me, lease)
            self.loop.call_soon_threadsafe(self.registered.set)
            await asyncio.sleep(0.1)

        store.register = told  # type: ignore[method-assign]
        return store


async def until_nobody_lives(url: str) -> None:
    async with client_on(url) as client:

        async def none() -> bool:
            return not any(runner.alive for runner in (await client.cluster()).runners)

        await until(none, what="no runner is alive", deadline=2 * LEASE, interval=0.1)
    keepers = [t for t in threading.enumerate() if t.name == "perdure-keeper"]
    await until(lambda: not any(t.is_alive() for t in keepers), what="no keeper is left")


async def test_a_start_that_is_cancelled_leaves_no_lease(migrated_url: str) -> None:
    database = TellsOfRegistering(migrated_url)
    runner = Runner(APP, settings(migrated_url), port=False, database=database)
    starting = asyncio.create_task(runner.start())
    await database.registered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until_nobody_lives(migrated_url)
    another = Runner(APP, settings(migrated_url), port=False)
    await another.start()
    try:
        await holds_all(another)
        assert await another.client.run(doubles, 4, timeout=20) == 8
    finally:
        await another.stop()


async def test_a_start_may_be_cancelled_wherever_it_is(migrated_sqlite_url: str) -> None:
    """At the beginning, and at each eighth of the time that one takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    whole = Runner(APP, settings(migrated_sqlite_url), port=False)
    await whole.start()
    taken = loop.time() - began
    await whole.stop()
    cut = 0
    for eighths in range(8):
        runner = Runner(APP, settings(migrated_sqlite_url), port=False)
        starting = asyncio.create_task(runner.start())
        await asyncio.wait([starting], timeout=taken * eighths / 8)
        if starting.done():
            await runner.stop()
            continue
        cut += 1
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert cut > 1
    await until_nobody_lives(migrated_sqlite_url)


async def test_a_stop_that_is_cancelled_goes_on(migrated_url: str) -> None:
    for turns in range(0, 12, 3):
        runner = Runner(APP, settings(migrated_url), port=False)
        await runner.start()
        stopping = asyncio.create_task(runner.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await runner.stop()
    await until_nobody_lives(migrated_url)
