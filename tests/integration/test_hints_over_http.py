"""Processes that cannot hear the database: hints go from process to process, and nothing waits for a scan."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from perdure import Client
from perdure.runtime.signed_hints import SENT_AT, SIGNATURE, sign
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from tests.harness.pgbouncer import MISSING, PgBouncer
from tests.harness.pods import Pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.ears import Listening, ear
from tests.integration.in_process import client_on

pytestmark = pytest.mark.alone

NEVER = "3600"
"""Seconds between two scans."""


@pytest.mark.req("SL2", "CL1", "CL12")
async def test_starts_and_signals_reach_pods_that_nothing_else_would_tell(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    await tell(migrated_postgres_url, tmp_path, "http")


@pytest.mark.slow
@pytest.mark.req("SL2", "CL2")
@pytest.mark.skipif(not PgBouncer.installed(), reason=MISSING)
async def test_behind_a_pooler_that_rotates_sessions_hints_find_their_way_by_themselves(
    postgres: PrivatePostgres, migrated_postgres_url: str, tmp_path: Path
) -> None:
    with PgBouncer(postgres, mode="transaction", pool=40) as pooler:
        await tell(pooler.url(migrated_postgres_url.rpartition("/")[2]), tmp_path, "auto")


async def tell(url: str, tmp_path: Path, transport: str) -> None:
    """Nobody scans: what the pods do not hear of they never do."""
    side = SideLog(tmp_path / "side.log")
    env = {"PERDURE_HINT_TRANSPORT": transport, "PERDURE_SCAN": NEVER, "PERDURE_PARK_AFTER": "0"}
    with Pods(
        "tests.integration.apps.ears:app", url, tmp_path, env=env, side_log=side.path
    ) as pods:
        first, second = await pods.ready(), await pods.ready()
        assert "http" in (await first.wait_log("runner.ready.*hints=.?http")).group()
        async with client_on(url, [ear], hint_transport=transport, scan=3600) as client:
            await until(lambda: even(client), what="both pods have shards", deadline=20)
            runs = [f"ear-{n}" for n in range(8)]
            for run_id in runs:
                await client.start(ear, Listening(signals=1), run_id=run_id)
            await until(lambda: lines(side, "listens") == set(runs), what="the starts", deadline=10)
            await until(lambda: parked(client, runs), what="all of them parked", deadline=10)
            began = time.monotonic()
            for run_id in runs:
                await client.signal(run_id, "go", "word")
            await until(lambda: lines(side, "word") == set(runs), what="the signals", deadline=10)
            assert time.monotonic() - began < 10
            # Its clients are told by nobody: a process without a port has no ear, and asks.
            assert await client.wait(runs[0], timeout=10) == 1
        for pod in (first, second):
            text = await pod.wait_http("/metrics")
            heard = next(
                line for line in text.splitlines() if line.startswith("perdure_hints_heard_total")
            )
            assert int(heard.split()[1]) >= 16, "each pod hears all starts and signals"
            assert "perdure_hints_refused_total 0\n" in text


def heard(side: SideLog, key: str, run_id: str) -> bool:
    return run_id in lines(side, key)


def lines(side: SideLog, key: str) -> set[str]:
    return {each.run for each in side.executions() if each.key == key}


async def parked(client: Client, runs: list[str]) -> bool:
    infos = [await client.get(run_id) for run_id in runs]
    return all(info is not None and info.status == "suspended" for info in infos)


async def even(client: Client) -> bool:
    return sorted(r.shards for r in (await client.cluster()).runners) == [128, 128]


@pytest.mark.slow
@pytest.mark.req("CL3")
async def test_a_flood_of_posts_costs_a_pod_neither_its_lease_nor_its_runs(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    """From somebody without the key, and from somebody with it who says the same thing over and over."""
    url = migrated_postgres_url
    env = {"PERDURE_HINT_TRANSPORT": "http", "PERDURE_LEASE": "2"}
    side = SideLog(tmp_path / "side.log")
    with Pods(
        "tests.integration.apps.ears:app", url, tmp_path, env=env, side_log=side.path
    ) as pods:
        pod = await pods.ready()
        before = (await pod.status())["runner_id"]
        async with client_on(url, [ear], hint_transport="http") as client:
            cluster = connect(DatabaseSettings(url), clock=SystemClock()).cluster()
            await cluster.open()
            key = await cluster.hint_key("never used")
            await cluster.close()
            body = json.dumps(["x", *(["w", f"run-{n}", n] for n in range(100))]).encode()
            ends = time.monotonic() + 4.0
            answers: Counter[int] = Counter()

            async def flood(said_key: str) -> None:
                async with httpx.AsyncClient(trust_env=False) as http:
                    while time.monotonic() < ends:
                        at = f"{time.time():.3f}"
                        headers = {SENT_AT: at, SIGNATURE: sign(said_key, at, body)}
                        address = f"http://127.0.0.1:{pod.port}/hints"
                        answer = await http.post(address, content=body, headers=headers)
                        answers[answer.status_code] += 1

            floods = [asyncio.create_task(flood(k)) for k in (key, "guessed") * 4]
            for number in range(3):
                run_id = f"ear-{number}"
                await client.start(ear, Listening(signals=1), run_id=run_id)
                await until(partial(heard, side, "listens", run_id), what="a start", deadline=20)
                await client.signal(run_id, "go", "word")
                assert await client.wait(run_id, timeout=20) == 1
            await asyncio.gather(*floods)
        assert set(answers) == {204, 403}
        assert min(answers.values()) > 50
        assert (await pod.status())["runner_id"] == before
        assert "runner.declared-dead" not in pod.log
