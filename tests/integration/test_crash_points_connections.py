"""The process lives, its connection is lost at a chosen statement: the run ends right, under the same runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere, PostgresProxy
from tests.integration.apps import crossing as application
from tests.integration.crash_world import MOMENTS, World, lose

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("CL4", "CL11")]

LEASE = 2.0
NO_SCAN = 600.0
"""Seconds between safety scans: what a lost connection left behind must not have to wait for one."""


class Ground(World):
    """A runner in this process and a client, each behind a proxy of its own."""

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        runner_proxy: PostgresProxy,
        client_proxy: PostgresProxy,
        park_after: float,
    ) -> None:
        database = url.rpartition("/")[2]
        super().__init__(url, folder, client_url=client_proxy.url(database))
        self.runner_proxy, self.client_proxy = runner_proxy, client_proxy
        self.runner = Runner(
            application.app,
            Settings(
                db=runner_proxy.url(database),
                lease=LEASE,
                park_after=park_after,
                scan=NO_SCAN,
                shards=16,
                runner_port=0,
            ),
            port=False,
        )

    @property
    def runner_id(self) -> int:
        return self.runner.session.runner_id


@asynccontextmanager
async def ground_on(
    server: PrivatePostgres, folder: Path, *, park_after: float = 0.05
) -> AsyncIterator[Ground]:
    with audited_database(server) as url:
        application.log_to(folder / "side.log")
        async with (
            PostgresProxy(server.port) as runner_proxy,
            PostgresProxy(server.port) as client_proxy,
            Ground(
                url,
                folder,
                runner_proxy=runner_proxy,
                client_proxy=client_proxy,
                park_after=park_after,
            ) as ground,
        ):
            await ground.runner.start()
            try:
                yield ground
            finally:
                await ground.runner.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(
    postgres: PrivatePostgres, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    async with ground_on(postgres, tmp_path_factory.mktemp("connections")) as made:
        yield made


# ---- the runner's connections -----------------------------------------------------------------


async def runner_loses(
    ground: Ground, event: str, where: HangWhere, deadline: float = 20.0
) -> None:
    """One run, whose runner loses its connection at a statement of it."""
    moment, run_id, runner_id = MOMENTS[event], ground.fresh_id(), ground.runner_id
    injury = ground.injure(
        run_id,
        moment,
        where,
        lose(ground.runner_proxy),
        of=ground.runner_proxy,
        client=ground.client_proxy,
    )
    outcome = await ground.cross(run_id, moment.call, deadline=deadline)
    assert injury.found == [moment.state(where)]
    await ground.check(run_id, outcome, moment.call)
    assert ground.runner_id == runner_id


@pytest.mark.parametrize("where", ["before", "answer"])
@pytest.mark.parametrize("event", MOMENTS)
async def test_the_runner_loses_its_connection(
    ground: Ground, event: str, where: HangWhere
) -> None:
    await runner_loses(ground, event, where)


# ---- mail that comes while an answer is on its way --------------------------------------------


NEVER = 600.0


@pytest.mark.req("SL2")
async def test_mail_between_a_park_and_its_answer_wakes_at_once(ground: Ground) -> None:
    run_id = ground.fresh_id()

    async def send(_backend: int) -> None:
        await ground.runner.client.signal(run_id, "go", "on", id="go")
        await asyncio.sleep(0)  # the hint is handed out in the next turn of the loop

    ground.runner_proxy.call(send, name="commit", where="answer", nth=2)
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.check(run_id, await ground.outcome(run_id, deadline=5.0), "signal")


@pytest.mark.req("SL2")
async def test_mail_between_a_claim_and_its_answer_is_not_overlooked(
    postgres: PrivatePostgres, tmp_path: Path
) -> None:
    """The run does not park, so neither that nor a scan can find the signal."""
    async with ground_on(postgres, tmp_path, park_after=NEVER) as ground:
        run_id = ground.fresh_id()

        async def send(_backend: int) -> None:
            await ground.runner.client.signal(run_id, "go", "on", id="go")
            await asyncio.sleep(0)

        ground.runner_proxy.call(send, name="claim", where="answer")
        await ground.client.start(application.crossing, run_id=run_id)
        await ground.check(run_id, await ground.outcome(run_id, deadline=5.0), "signal")


@pytest.mark.req("SL2")
async def test_mail_read_while_the_journal_is_on_its_way_is_not_overlooked(
    postgres: PrivatePostgres, tmp_path: Path
) -> None:
    """A run with mail at its claim is entered with a mailbox; a newer one may be read before it is."""
    async with ground_on(postgres, tmp_path, park_after=NEVER) as ground:
        run_id = ground.fresh_id()
        newer = ground.runner_proxy.call(lambda _: None, name="mailbox", where="answer", nth=2)

        async def send(name: str) -> None:
            await ground.runner.client.signal(run_id, name, "on", id=name)

        async def overtake(_backend: int) -> None:
            await send("go")
            await newer.happened.wait()
            for _ in range(20):  # turns of the loop in which that answer reaches the runner
                await asyncio.sleep(0)

        ground.client_proxy.call(lambda _: send("early"), name="start", where="answer")
        ground.runner_proxy.call(overtake, name="mailbox", where="answer")
        await ground.client.start(application.crossing, run_id=run_id)
        await ground.check(run_id, await ground.outcome(run_id, deadline=5.0), "signal")
