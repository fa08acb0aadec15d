"""A runner in this process and a client, each behind a proxy that can lose their connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere, PostgresProxy
from tests.integration.apps import crossing as application
from tests.integration.crash_world import MOMENTS, World, lose

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
        scan: float,
    ) -> None:
        database = url.rpartition("/")[2]
        super().__init__(url, folder, client_url=client_proxy.url(database))
        self.runner_proxy, self.client_proxy = runner_proxy, client_proxy
        self.server_port = int(url.rpartition(":")[2].partition("/")[0])
        self.runner = Runner(
            application.app,
            Settings(
                db=runner_proxy.url(database),
                lease=LEASE,
                park_after=park_after,
                warm_runs=0,  # every wake reads and replays, so that this can be interrupted
                scan=scan,
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
    server: PrivatePostgres, folder: Path, *, park_after: float = 0.05, scan: float = NO_SCAN
) -> AsyncIterator[Ground]:
    with audited_database(server) as url, application.logging_to(folder / "side.log"):
        async with (
            PostgresProxy(server.port) as runner_proxy,
            PostgresProxy(server.port) as client_proxy,
            Ground(
                url,
                folder,
                runner_proxy=runner_proxy,
                client_proxy=client_proxy,
                park_after=park_after,
                scan=scan,
            ) as ground,
        ):
            await ground.runner.start()
            try:
                yield ground
            finally:
                await ground.runner.stop()


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


async def lost_start(ground: Ground) -> None:
    """The answer to a start is lost; before its maker asks again somebody else joins the run and sees it end."""
    run_id = ground.fresh_id()
    other = ground.runner.client
    lose_client = lose(ground.client_proxy)

    async def live_through(backend: int) -> None:
        assert (await other.start(application.crossing, run_id=run_id)).status == "running"
        await ground.reaches(run_id, "suspended")
        await other.signal(run_id, "go", "on")
        await ground.outcome(run_id)
        lose_client(backend)

    lost = ground.client_proxy.call(live_through, name="start", where="answer")
    handle = await ground.client.start(application.crossing, run_id=run_id)
    assert lost.happened.is_set()
    assert handle.status == "running", "this very start made the run, whatever became of it since"
    assert (await other.start(application.crossing, run_id=run_id)).status == "replayed"
    await ground.check(run_id, await ground.outcome(run_id), "signal")
