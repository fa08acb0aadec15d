"""SQLite: a process kills itself before, inside or after each transaction of a run's life; the next one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest
import pytest_asyncio

from perdure.runtime.runner import Runner
from perdure.storage.connect import DatabaseSettings, migrate
from perdure.storage.model import RunStatus
from tests.harness.audit import install_audit_now
from tests.integration.apps import crossing as application
from tests.integration.apps.crash_actor import Act, Order, Where, settings_of
from tests.integration.crash_actors import Actors
from tests.integration.crash_world import ABSENT, MOMENTS, Call, State, World

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("CL5", "CL6")]

READS = ("journal", "mailbox")
"""They have no inside: nothing of them is ever rolled back."""
WHERE: tuple[Where, ...] = get_args(Where)
DEATHS = [
    (event, where)
    for event in MOMENTS
    for where in WHERE
    if event not in READS or where != "inside"
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("sqlite")
    url = f"sqlite:///{folder / 'perdure.db'}"
    migrate(DatabaseSettings(url))
    install_audit_now(url)
    with application.logging_to(folder / "side.log"):
        async with World(url, folder) as made:
            yield made


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    with Actors(tmp_path_factory.mktemp("actors")) as made:
        yield made


@asynccontextmanager
async def pod(world: World) -> AsyncIterator[Runner]:
    """The next process on the file: this one."""
    runner = Runner(application.app, settings_of(world.url), port=False)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.stop()


@pytest.mark.parametrize(("event", "where"), DEATHS)
async def test_a_pod_dies(world: World, actors: Actors, event: str, where: Where) -> None:
    moment, run_id = MOMENTS[event], world.fresh_id()
    side_log = str(world.side_log.path)
    victim = await actors.act(
        Order("pod", world.url, run_id, side_log=side_log, die=(event, where))
    )
    crossing = asyncio.ensure_future(world.cross(run_id, moment.call))
    death = await victim.killed()
    assert await world.state(run_id) == (moment.behind if where == "after" else moment.before)
    async with pod(world):
        outcome = await crossing
    again = moment.lost if where != "after" else None
    await world.check(run_id, outcome, moment.call, faults=[death], again=again)


@pytest.mark.req("WF2")
@pytest.mark.parametrize("where", WHERE)
async def test_a_client_dies_starting(world: World, actors: Actors, where: Where) -> None:
    run_id = world.fresh_id()
    await client_dies(world, actors, Order("start", world.url, run_id, die=("start", where)))
    assert await world.state(run_id) == ((RunStatus.PENDING, 0) if where == "after" else ABSENT)
    async with pod(world):
        if where != "after":
            await world.client.start(application.crossing, run_id=run_id)
        await world.reaches(run_id, RunStatus.SUSPENDED)
        again = await world.client.start(application.crossing, run_id=run_id)
        assert (again.run_id, again.status) == (run_id, "running")
        await world.call(run_id, "signal")
        await world.check(run_id, await world.outcome(run_id), "signal")


@pytest.mark.req("SL2", "SL5")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("act", ["signal", "cancel"])
async def test_a_client_dies_sending(world: World, actors: Actors, act: Act, where: Where) -> None:
    run_id = world.fresh_id()
    call: Call = "signal" if act == "signal" else "cancel"
    async with pod(world):
        await world.client.start(application.crossing, run_id=run_id)
        await world.reaches(run_id, RunStatus.SUSPENDED)
        await client_dies(world, actors, Order(act, world.url, run_id, die=(f"send {act}", where)))
        if where != "after":
            assert await world.state(run_id) == (RunStatus.SUSPENDED, 1)
            await world.call(run_id, call)
        await world.check(run_id, await world.outcome(run_id), call)


@pytest.mark.req("SL5")
@pytest.mark.parametrize("where", WHERE)
async def test_a_client_dies_cancelling_what_nobody_entered(
    world: World, actors: Actors, where: Where
) -> None:
    run_id = world.fresh_id()
    await world.client.start(application.crossing, run_id=run_id)
    order = Order("cancel", world.url, run_id, die=("cancel unentered", where))
    await client_dies(world, actors, order)
    done: State = (RunStatus.CANCELLED, 0)
    assert await world.state(run_id) == (done if where == "after" else (RunStatus.PENDING, 0))
    await world.client.cancel(run_id)
    assert await world.state(run_id) == done
    assert not world.executed(run_id)


async def client_dies(world: World, actors: Actors, order: Order) -> None:
    client = await actors.act(order)
    await client.killed()
