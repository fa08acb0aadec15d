"""What nobody needs any more is deleted: ended runs past their time to live, rows of runners long dead (R12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from perdure import Client, Context, step, workflow
from perdure.runtime import retention
from perdure.runtime.errors import RunNotFound
from perdure.runtime.retention import Retention
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock, SystemRandomness
from perdure.storage.connect import Database, DatabaseSettings, connect
from perdure.storage.errors import ConflictError, DatabaseUnavailable, StorageError
from perdure.storage.interface import RunStore
from perdure.storage.model import RunStatus
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.in_process import client_on, port_and_name, runner_on, until_status

TTL = 0.5


@step
async def double(number: int) -> int:
    return 2 * number


@workflow(name="doubled")
async def doubled(ctx: Context, number: int) -> int:
    return await ctx.step(double, number)


@workflow(name="listens")
async def listens(ctx: Context, number: int) -> int:
    await ctx.step(double, number)
    return int(await ctx.wait_signal("go", int))


class Counted(Retention):
    """Counts the sweeps that were begun."""

    sweeps = 0

    @property
    def store(self) -> RunStore:
        return self._store

    async def sweep(self) -> None:
        self.sweeps += 1
        await super().sweep()

    def swept(self, times: int, running: asyncio.Task[None]) -> bool:
        return self.sweeps >= times or running.done()


@asynccontextmanager
async def retention_on(url: str, *, ttl: float | None = TTL) -> AsyncIterator[Counted]:
    """The service as a runner has it, without the runner."""
    database: Database = connect(DatabaseSettings(url), clock=SystemClock())
    store = database.runs()
    await store.open()
    try:
        yield Counted(store, database, Settings(db=url, finished_ttl=ttl), SystemRandomness())
    finally:
        await store.close()


async def past_its_time(client: Client, run_id: str) -> None:
    """Wait until the run has been over for longer than its time to live, by the database's clock."""

    async def look() -> bool:
        info = await client.get(run_id)
        assert info is not None
        assert info.finished_at is not None
        return (await client.cluster()).db_now - info.finished_at > TTL

    await until(look, what=f"{run_id} being past its time", interval=0.05)


@pytest.mark.req("DB1")
async def test_ended_runs_past_their_time_go_with_their_journal_and_nothing_else_does(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retention, "BATCH", 3)
    async with runner_on(migrated_url, [doubled, listens], park_after=0.02) as runner:
        client = runner.client
        live = await client.start(listens, 1, run_id="live")
        await until_status(client, "live", RunStatus.SUSPENDED)
        old = [await client.start(doubled, n) for n in range(8)]
        await asyncio.gather(*(h.wait(20) for h in old))
        await past_its_time(client, old[-1].run_id)
        assert await client.run(doubled, 21, run_id="young") == 42
        async with retention_on(migrated_url, ttl=None) as service:
            await service.sweep()
        assert len(await client.list()) == 10
        async with retention_on(migrated_url) as service:
            await service.sweep()
        assert {info.run_id for info in await client.list()} == {"live", "young"}
        for handle in old:
            with pytest.raises(RunNotFound):
                await client.journal(handle.run_id)
        assert [entry.name for entry in await client.journal("young")] == ["double#0"]
        await live.signal("go", 5)
        assert await live.wait(20) == 5


@pytest.mark.req("DB1")
@pytest.mark.parametrize("error", [ConflictError("too long"), DatabaseUnavailable("too long")])
async def test_what_is_too_much_for_one_statement_goes_in_parts(
    migrated_url: str, error: StorageError
):
    """Each engine has its own word for a statement that was stopped at its deadline."""
    asked: list[int] = []
    async with runner_on(migrated_url, [doubled]) as runner:
        old = [await runner.client.start(doubled, n) for n in range(20)]
        await asyncio.gather(*(h.wait(20) for h in old))
        await past_its_time(runner.client, old[-1].run_id)
        async with retention_on(migrated_url) as service:
            delete = service.store.delete_finished

            async def at_most_three(before: float, limit: int) -> int:
                asked.append(limit)
                if limit > 3:
                    raise error
                return await delete(before, limit)

            service.store.delete_finished = at_most_three  # type: ignore[method-assign]
            await service.sweep()
            assert await runner.client.list() == []
            assert len(asked) < 40
            service.store.delete_finished = never = Never(error)  # type: ignore[method-assign]
            with pytest.raises(StorageError):
                await service.sweep()
            assert never.asked[-1] == 1
            assert len(never.asked) < 12


class Never:
    def __init__(self, error: StorageError) -> None:
        self.error = error
        self.asked: list[int] = []

    async def __call__(self, before: float, limit: int) -> int:
        self.asked.append(limit)
        raise self.error


@pytest.mark.req("CL8", "DB1")
async def test_the_row_of_a_dead_runner_goes_when_its_time_is_over(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    url = migrated_postgres_url
    async with runner_on(url, [doubled], lease=1.0, replica_id="gone"):
        pass
    async with (
        runner_on(url, [doubled], lease=1.0, replica_id="here") as runner,
        retention_on(url) as service,
    ):
        await service.sweep()
        assert [row.replica_id for row in (await runner.client.cluster()).runners] == [
            "here",
            "gone",
        ]
        monkeypatch.setattr(retention, "RUNNER_ROWS_KEPT", 0.0)

        async def swept() -> list[str]:
            await service.sweep()
            return [row.replica_id for row in (await runner.client.cluster()).runners]

        async def only_the_living() -> bool:
            return await swept() == ["here"]

        await until(only_the_living, what="the dead runner's row gone", interval=0.1)
        assert await runner.client.run(doubled, 1, timeout=20) == 2


@pytest.mark.req("CL11")
async def test_a_database_that_is_away_does_not_end_the_service(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retention, "PERIOD", 0.05)
    url = migrated_postgres_url
    port, name = port_and_name(url)
    async with PostgresProxy(port) as proxy, client_on(url, [doubled]) as client:
        async with runner_on(url, [doubled]):
            assert await client.run(doubled, 1, run_id="old", timeout=20) == 2
        async with retention_on(proxy.url(name)) as service:
            running = asyncio.create_task(service.run())
            for cut in (False, True):  # new connections are refused, then the open ones go, too
                async with proxy.refusing(cut=cut):
                    enough = service.sweeps + 3
                    await until(partial(service.swept, enough, running), what="three sweeps")

            async def gone() -> bool:
                return await client.get("old") is None

            await until(gone, what="the old run deleted after the outage")
            assert not running.done()
            running.cancel()
