"""Clients that are closed, fail or cannot be opened: nobody waits for an answer that nobody gives, nothing is left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perdure import (
    Client,
    ConfigurationError,
    Context,
    InputError,
    RunNotFound,
    workflow,
)
from perdure.runtime.errors import ClientClosed
from perdure.storage.model import Hint, RunRecord
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until
from tests.integration.in_process import client_on, execute, port_and_name, runner_on

pytestmark = pytest.mark.req("WF8", "CL11")


@workflow(name="doubles")
async def doubles(ctx: Context, number: int) -> int:
    return 2 * number


@workflow(name="waits")
async def waits(ctx: Context) -> str:
    return await ctx.wait_signal("word", str)


def slowly(client: Client, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """(asked, go): the store's method of that name has its answer, and gives it when told to."""
    store = client._parts.store
    call: Callable[..., Any] = getattr(store, name)
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        answer = await call(*args)
        asked.set()
        await go.wait()
        return answer

    setattr(store, name, slow)
    return asked, go


async def test_a_wait_that_begins_as_the_client_closes_is_told(migrated_url: str) -> None:
    """The look whether the run exists is answered after those who waited were told of the end."""
    async with Client(migrated_url, workflows=[waits]) as client:
        handle = await client.start(waits)
        asked, go = slowly(client, "read_run")
        waiting = asyncio.create_task(client.wait(handle.run_id))
        await asked.wait()
    go.set()
    with pytest.raises(ClientClosed):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(ClientClosed):
        await asyncio.wait_for(handle.wait(), 10)


async def test_starts_that_are_not_sent_yet_when_the_client_closes_say_so(
    migrated_url: str,
) -> None:
    async with Client(migrated_url, workflows=[doubles]) as client:
        asked, go = slowly(client, "start_runs")
        starting = asyncio.create_task(client.start_many(doubles, range(2_500)))
        await asked.wait()
    go.set()
    async with asyncio.timeout(5):  # a store that is closed is not asked again and again
        started = await starting
    made = [each for each in started if each.error is None]
    assert 500 <= len(made) < 2_500
    assert {type(each.error) for each in started if each.error is not None} == {ClientClosed}
    async with client_on(migrated_url) as later:
        assert len(await later.list(limit=3_000)) == len(made)


async def test_a_client_may_be_opened_again_but_not_twice_at_once(migrated_url: str) -> None:
    async with runner_on(migrated_url, [doubles]) as runner:
        client = Client(migrated_url, workflows=[doubles])
        for number in (1, 2):
            async with client:
                with pytest.raises(ClientClosed, match="open already"):
                    async with client:
                        pass
                assert await client.run(doubles, number, timeout=20) == 2 * number
        with pytest.raises(ClientClosed, match="open already"):  # it is the runner's own
            async with runner.client:
                pass
        assert await runner.client.run(doubles, 3, timeout=20) == 6


async def test_a_client_that_cannot_be_opened_leaves_no_connection(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    """There is room for one connection of its role, and it needs two: each try used to leave one."""
    name = port_and_name(migrated_postgres_url)[1]
    role = f"narrow_{name}"
    await execute(migrated_postgres_url, f"create role {role} login connection limit 1")
    await execute(
        migrated_postgres_url,
        f"grant select, insert, update on all tables in schema public to {role}",
    )
    url = migrated_postgres_url.replace("postgres@", f"{role}@")
    assert role in url
    try:
        kept = []
        for _ in range(3):
            kept.append(client := Client(url))
            with pytest.raises(ConfigurationError, match="too many connections"):
                await client.__aenter__()
            await until_no_session(postgres, role)

        await execute(migrated_postgres_url, f"alter role {role} connection limit 9")
        async with kept[0] as client:
            assert await client.list() == []

        # Nor does one whose opening is given up half-way.
        kept.append(client := Client(migrated_postgres_url))
        asked, _ = slowly(client, "open")
        opening = asyncio.create_task(client.__aenter__())
        await asked.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        sessions = "select 1 from pg_stat_activity where application_name = 'perdure-client'"
        await until(
            lambda: _none(postgres, f"{sessions} and datname = '{name}'"), what="no session is left"
        )
    finally:
        await execute(migrated_postgres_url, f"drop owned by {role}")
        await execute(migrated_postgres_url, f"drop role {role}")


async def until_no_session(postgres: PrivatePostgres, role: str) -> None:
    look = f"select 1 from pg_stat_activity where usename = '{role}'"
    await until(lambda: _none(postgres, look), what=f"no session of {role} is left")


async def _none(postgres: PrivatePostgres, look: str) -> bool:
    return not await postgres.query(look)


async def test_waiting_outlasts_rights_that_are_gone_for_a_moment(
    migrated_postgres_url: str,
) -> None:
    name = port_and_name(migrated_postgres_url)[1]
    role = f"waiter_{name}"
    await execute(migrated_postgres_url, f"create role {role} login")
    grant = f"select, insert, update on all tables in schema public to {role}"
    await execute(migrated_postgres_url, f"grant {grant}")
    url = migrated_postgres_url.replace("postgres@", f"{role}@")
    try:
        async with (
            runner_on(migrated_postgres_url, [waits]) as runner,
            Client(url, workflows=[waits]) as client,
        ):
            handle = await client.start(waits)
            waiting = asyncio.create_task(handle.wait())
            await execute(migrated_postgres_url, f"revoke select on perdure_runs from {role}")
            store, refused = client._parts.store, asyncio.Event()
            read = store.read_results

            async def read_results(run_ids: Sequence[str]) -> Any:
                try:
                    return await read(run_ids)
                except ConfigurationError:
                    refused.set()
                    raise

            store.read_results = read_results  # type: ignore[method-assign]
            await asyncio.wait_for(refused.wait(), 20)
            await execute(migrated_postgres_url, f"grant {grant}")
            await runner.client.signal(handle.run_id, "word", "go")
            assert await asyncio.wait_for(waiting, 20) == "go"
    finally:
        await execute(migrated_postgres_url, f"drop owned by {role}")
        await execute(migrated_postgres_url, f"drop role {role}")


async def test_a_row_that_cannot_be_read_is_told_to_who_waits_for_it_alone(
    migrated_url: str,
) -> None:
    async with (
        runner_on(migrated_url, [doubles, waits]) as runner,
        client_on(migrated_url, [doubles, waits]) as client,
    ):
        store = client._parts.store
        read = store.read_results
        strange = await client.start(waits)

        async def read_results(run_ids: Sequence[str]) -> dict[str, RunRecord]:
            if strange.run_id in run_ids:
                raise ValueError("'expired' is not a valid RunStatus")
            return dict(await read(run_ids))

        store.read_results = read_results  # type: ignore[method-assign]
        handles = [await client.start(doubles, n) for n in range(20)]
        told = await asyncio.gather(
            strange.wait(20), *(handle.wait(20) for handle in handles), return_exceptions=True
        )
        assert isinstance(told[0], ValueError)
        assert told[1:] == [2 * n for n in range(20)]
        await runner.client.signal(strange.run_id, "word", "go")


async def test_a_client_whose_services_fail_says_so_to_all(migrated_sqlite_url: str) -> None:
    async with Client(migrated_sqlite_url, workflows=[waits]) as client:
        handle = await client.start(waits)
        waiting = asyncio.create_task(handle.wait())
        await asyncio.sleep(0)

        def broken() -> float:
            raise MemoryError("no more")

        client._parts.randomness.fraction = broken  # type: ignore[method-assign]
        with pytest.raises(ClientClosed, match="failed"):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(ClientClosed, match="MemoryError"):
            await client.get(handle.run_id)


@pytest.mark.req("WF2")
async def test_a_run_that_is_gone_is_not_waited_for(migrated_url: str) -> None:
    """Its time was over, or the database lost it: a handle from `start` finds out as well."""
    async with (
        runner_on(migrated_url, [doubles, waits]) as runner,
        client_on(migrated_url, [doubles, waits]) as client,
    ):
        ended = await client.start(doubles, 1)
        assert await ended.wait(20) == 2
        living = await client.start(waits)
        now = await client._parts.store.server_now()
        assert await client._parts.store.delete_finished(now + 60, 500) == 1
        for handle in (ended, runner.client.handle(ended.run_id)):
            with pytest.raises(RunNotFound):
                await handle.wait(30)
        waiting = asyncio.create_task(living.wait(30))
        with pytest.raises(RunNotFound):
            await ended.wait(30)
        await living.signal("word", "go")
        assert await waiting == "go"


BAD_TIMEOUTS: list[Any] = [math.nan, "30 s", True, [1]]


@pytest.mark.parametrize("timeout", BAD_TIMEOUTS, ids=repr)
async def test_a_timeout_that_is_none_is_refused_before_anything_is_started(
    migrated_sqlite_url: str, timeout: Any
) -> None:
    async with client_on(migrated_sqlite_url, [doubles]) as client:
        with pytest.raises(InputError, match="number of seconds"):
            await client.run(doubles, 1, timeout=timeout)
        assert await client.list() == []
        handle = await client.start(doubles, 1)
        with pytest.raises(InputError, match="number of seconds"):
            await handle.wait(timeout)
        for over in (0, -3, 0.01):
            with pytest.raises(TimeoutError, match="has not ended"):
                await handle.wait(over)
        for ever in (math.inf, 10**400):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await handle.wait(ever)


async def test_starts_in_bulk_are_hinted_to_each_shard_of_the_cluster(
    migrated_postgres_url: str,
) -> None:
    """A client need not be told how many shards there are."""
    async with (
        runner_on(migrated_postgres_url, [doubles]),
        client_on(migrated_postgres_url, [doubles], shards=2) as client,
    ):
        hinted: list[str] = []
        publish = client._parts.bus.publish

        def published(hints: Sequence[Hint]) -> None:
            hinted.extend(hint.run_id for hint in hints)
            publish(hints)

        client._parts.bus.publish = published  # type: ignore[method-assign]
        started = await client.start_many(doubles, range(200))
        assert len(hinted) > 50
        results = await asyncio.gather(*(s.handle.wait(20) for s in started if s.handle))
        assert results == [2 * n for n in range(200)]
