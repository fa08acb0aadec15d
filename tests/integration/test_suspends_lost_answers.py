"""An operator's suspend and resume whose connection is lost at a statement: the call settles it by itself (R9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from perdure import Client
from perdure.storage.model import ClaimedRun, MessageKind, Park, Reason, Verdict
from tests.contract.world import Runner, World, write
from tests.harness.proxy import CutWhere, PostgresProxy
from tests.integration.in_process import port_and_name

pytestmark = pytest.mark.req("SL5", "CL11")
WHERE: list[CutWhere] = ["before", "after_commit"]
Call = Callable[[Client], Awaitable[None]]


@pytest.fixture
async def world(migrated_postgres_url: str) -> AsyncIterator[World]:
    opened = await World(migrated_postgres_url).open()
    yield opened
    await opened.close()


@asynccontextmanager
async def cut(url: str, statement: str, where: CutWhere) -> AsyncIterator[Client]:
    """A client whose connection is lost once, at this statement."""
    port, database = port_and_name(url)
    async with PostgresProxy(port) as proxy, Client(proxy.url(database)) as client:
        rule = proxy.cut(name=statement, where=where)
        yield client
        assert rule.happened.is_set(), f"{statement} was never sent"


async def claimed(world: World) -> tuple[Runner, ClaimedRun]:
    runner = await world.runner(lease=60.0)
    await world.start("r1")
    return runner, await runner.claim_one("r1")


async def told(world: World) -> Counter[str]:
    return Counter(event.type for event in await world.runs.read_events("r1"))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("statement", ["hold_run"])
async def test_a_parked_run_is_held_once(world: World, statement: str, where: CutWhere) -> None:
    runner, run = await claimed(world)
    await runner.park(run, wake_at=None)
    async with cut(world.settings.url, statement, where) as client:
        await client.suspend("r1", "why")
    assert (await world.record("r1")).hold == "operator"
    assert (await told(world))["run-suspended"] == 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "statement",
    [
        "signal",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hold_run", "settle_rest")),
    ],
)
async def test_the_holder_is_asked_once(world: World, statement: str, where: CutWhere) -> None:
    runner, run = await claimed(world)
    async with cut(world.settings.url, statement, where) as client:
        await client.suspend("r1")
    assert len(await world.mailbox("r1")) == 1
    hold = await runner.commit(write(run, outcome=Park(None, 1, Reason.OPERATOR)))
    assert hold == {"r1": Verdict.PARKED}


@pytest.mark.parametrize("where", WHERE)
async def test_a_held_run_is_released_once(world: World, where: CutWhere) -> None:
    await world.start("r1")
    await world.runs.hold_run("r1", batch_id=5, reason=None)
    async with cut(world.settings.url, "release_hold", where) as client:
        await client.resume("r1")
    assert (await world.record("r1")).hold is None
    assert (await told(world))["run-resumed"] == 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("statement", ["withdraw_suspend", "settle_rest"])
async def test_a_suspend_is_taken_back_once(world: World, statement: str, where: CutWhere) -> None:
    await claimed(world)
    await world.send("r1", "ask", kind=MessageKind.SUSPEND)
    async with cut(world.settings.url, statement, where) as client:
        await client.resume("r1")
    assert await world.mailbox("r1") == []
    assert (await told(world))["run-resumed"] == 1
