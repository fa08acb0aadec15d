"""Steps that fork: what they make is theirs, and neither ends the pod, writes for it, nor keeps what is the pod's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.harness.pods import Pods
from tests.harness.waiting import until
from tests.integration.apps import forking
from tests.integration.in_process import client_on

pytestmark = pytest.mark.req("CL5", "WF12")


@pytest.fixture
def pods(migrated_postgres_url: str, tmp_path: Path) -> Iterator[Pods]:
    with Pods("tests.integration.apps.forking:app", migrated_postgres_url, tmp_path) as started:
        yield started


async def test_a_worker_that_is_told_to_stop_ends_and_its_pod_goes_on(
    pods: Pods, migrated_postgres_url: str
) -> None:
    pod = await pods.ready()
    async with client_on(migrated_postgres_url, [forking.stops_a_worker]) as client:
        for _ in range(2):
            assert await client.run(forking.stops_a_worker, timeout=30) == -signal.SIGTERM
    assert await pod.http("/readyz") == (200, "ok\n")
    assert "pod.stopping" not in pod.log
    pod.terminate()  # its own signals are heard as before
    assert await pod.wait_end() == 0


async def no_sessions(url: str) -> bool:
    connection = await asyncpg.connect(url)
    try:
        return not await connection.fetchval(
            "select count(*) from pg_stat_activity where application_name = 'perdure' and datname = current_database()"
        )
    finally:
        await connection.close()


WAYS = {"exits": 7, "says why": 1, "raises": 1, "returns": 0, "awaits": 0}


async def test_a_copy_of_the_pod_ends_where_its_step_ends(
    pods: Pods, migrated_postgres_url: str
) -> None:
    pod = await pods.ready()
    async with client_on(migrated_postgres_url, [forking.forks]) as client:
        for way, code in WAYS.items():
            handle = await client.start(forking.forks, way)
            assert await handle.wait(30) == [code, code], way
            kinds = [(entry.kind, entry.status) for entry in await client.journal(handle.run_id)]
            assert kinds == [("step", "ok")] * 2
    assert pod.log.count("copy exits") == 2
    assert "ValueError: in the copy" in pod.log
    assert "fenced" not in pod.log
    assert "unavailable" not in pod.log


@pytest.mark.req("CL6")
@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
async def test_what_outlives_a_pod_keeps_neither_its_port_nor_its_file(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url: str = request.getfixturevalue(f"migrated_{engine}_url")
    worker = 0
    lease = {"PERDURE_LEASE": "2"}
    with Pods("tests.integration.apps.forking:app", url, tmp_path, env=lease) as pods:
        try:
            first = await pods.ready()
            async with client_on(url, [forking.left_behind]) as client:
                worker = await client.run(forking.left_behind, timeout=30)
            first.kill()
            os.kill(worker, 0)  # it is there
            if engine == "postgres":
                await until(lambda: no_sessions(url), what="the end of the pod's sessions")
            second = pods.start("again", env={"PERDURE_RUNNER_PORT": str(first.port)})
            second.port = first.port
            await second.wait_http("/readyz", deadline=30)
        finally:
            if worker:
                os.kill(worker, signal.SIGKILL)
