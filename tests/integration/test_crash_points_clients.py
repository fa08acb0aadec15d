"""PostgreSQL: a client is killed right before or right after each statement it sends; nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from perdure.storage.model import RunStatus
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere, PostgresProxy
from tests.integration.apps import crossing as application
from tests.integration.apps.crash_actor import SCAN, Act, Order
from tests.integration.crash_actors import Actors
from tests.integration.crash_ground import Ground, ground_on
from tests.integration.crash_world import ABSENT, Call, State

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("CL5")]

WHERE = ["before", "answer"]
CANCEL = ["lock_unentered", "cancel_unentered", "commit"]
"""The statements that end a run nobody has entered; one transaction."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(
    postgres: PrivatePostgres, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    """Its runner scans: nobody else finds what a client did not live to hint at."""
    async with ground_on(postgres, tmp_path_factory.mktemp("clients"), scan=SCAN) as made:
        yield made


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    with Actors(tmp_path_factory.mktemp("actors")) as made:
        yield made


async def client_dies(
    ground: Ground, actors: Actors, statement: str, where: HangWhere, act: Act, run_id: str
) -> State:
    """How the run stood when the client was dead."""
    async with PostgresProxy(ground.server_port) as proxy:
        found: list[State] = []

        async def kill(_backend: int) -> None:
            await client.kill()
            found.append(await ground.state(run_id))

        rule = proxy.call(kill, name=statement, where=where)
        url = proxy.url(ground.url.rpartition("/")[2])
        client = await actors.act(Order(act, url, run_id))
        await client.killed()
        await rule.happened.wait()
    return found[0]


@pytest.mark.req("WF2")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("statement", ["start", "notify"])
async def test_a_client_dies_starting(
    ground: Ground, actors: Actors, statement: str, where: HangWhere
) -> None:
    run_id = ground.fresh_id()
    found = await client_dies(ground, actors, statement, where, "start", run_id)
    if (statement, where) == ("start", "before"):
        assert found == ABSENT
        await ground.client.start(application.crossing, run_id=run_id)
    else:
        assert found != ABSENT
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    again = await ground.client.start(application.crossing, run_id=run_id)
    assert (again.run_id, again.status) == (run_id, "running")
    await ground.call(run_id, "signal")
    await ground.check(run_id, await ground.outcome(run_id), "signal")


@pytest.mark.req("WF2")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("statement", ["start", "find_runs"])
async def test_a_client_dies_joining(
    ground: Ground, actors: Actors, statement: str, where: HangWhere
) -> None:
    run_id = ground.fresh_id()
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    found = await client_dies(ground, actors, statement, where, "start", run_id)
    assert found == (RunStatus.SUSPENDED, 1)
    await ground.call(run_id, "signal")
    await ground.check(run_id, await ground.outcome(run_id), "signal")


SENDING: list[tuple[Call, str]] = [
    ("signal", "signal"),
    ("signal", "notify"),
    *(("cancel", statement) for statement in (*CANCEL, "find_run", "signal", "notify")),
]


@pytest.mark.req("SL2", "SL5")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("call", "statement"), SENDING)
async def test_a_client_dies_sending(
    ground: Ground, actors: Actors, call: Call, statement: str, where: HangWhere
) -> None:
    """What it sent is never sent again; what it did not send is sent by somebody else."""
    run_id = ground.fresh_id()
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    found = await client_dies(ground, actors, statement, where, call, run_id)
    if statement != "notify" and (statement, where) != ("signal", "answer"):
        assert found == (RunStatus.SUSPENDED, 1)
        await ground.call(run_id, call)
    await ground.check(run_id, await ground.outcome(run_id), call)


@pytest.mark.req("SL5")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("statement", [*CANCEL, "notify"])
async def test_a_client_dies_cancelling_what_nobody_entered(
    ground: Ground, actors: Actors, statement: str, where: HangWhere
) -> None:
    run_id = ground.fresh_id()
    await ground.client.start(application.unknown, run_id=run_id)
    found = await client_dies(ground, actors, statement, where, "cancel", run_id)
    done = statement == "notify" or (statement, where) == ("commit", "answer")
    assert found == ((RunStatus.CANCELLED, 0) if done else (RunStatus.PENDING, 0))
    await ground.client.cancel(run_id)
    assert await ground.state(run_id) == (RunStatus.CANCELLED, 0)
    assert not ground.executed(run_id)
