"""What a claim costs does not depend on what has been finished, nor on what nobody here knows (R12, R15).

Costs are counted in pages touched, which no other work of the machine changes; times are printed, and demanded only
where the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from perdure import Client
from perdure.storage.connect import DatabaseSettings
from perdure.storage.model import ClaimRequest, Finish, RunStatus, ShardHold
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.session import Session, open_session
from tests.contract.world import World, write
from tests.harness.pods import Pod, Pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until
from tests.integration.apps.ears import sleeper
from tests.integration.apps.histories import WORKFLOWS, ticks
from tests.integration.in_process import client_on, milliseconds, percentile
from tests.integration.postgres_world import migrated_database, world_of
from tests.integration.test_postgres_plans import blocks, plan_of

MINUTES = float(os.environ.get("SNAPSHOT_MINUTES", "2"))
"""How long the snapshot of the last test is open; `make soak` asks for ten."""
PACE = 0.02
"""Seconds between the starts of runs meanwhile."""
ME = 7
SHARDS = 256
ALL = [ShardHold(shard, 1) for shard in range(SHARDS)]
GROUND = """
insert into perdure_runners (runner_id, replica_id, address, expires_at) values (7, 'me', 'a', now() + interval '9 h');
insert into perdure_shards select n, n * 256, n * 256 + 255, 7, 1 from generate_series(0, 255) as n
"""
WAITING = """
insert into perdure_runs (run_id, slot, workflow, seed, start_token, payload)
  select '{name}' || n, n * 7919 % 65536, '{workflow}', 1, 1, '{{}}' from generate_series(1, {count}) as n;
insert into perdure_fences (run_id, slot, workflow)
  select '{name}' || n, n * 7919 % 65536, '{workflow}' from generate_series(1, {count}) as n;
insert into perdure_wakes (run_id, slot, wake_at)
  select '{name}' || n, n * 7919 % 65536, now() - interval '60 s' from generate_series(1, {count}) as n
"""
AN_HOUR_LATER = """
update perdure_wakes set stray_since = now() - interval '1 h', wake_at = now() + random() * interval '1 h'
 where stray is not null
"""
FINISHED = "delete from perdure_fences; delete from perdure_wakes"


@contextlib.asynccontextmanager
async def snapshot(url: str) -> AsyncIterator[None]:
    """Somebody's long report: while it lasts, no dead row can be removed."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("select count(*) from perdure_runs")
            yield
    finally:
        await connection.close()


async def execute(url: str, script: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def hot_session(url: str) -> AsyncIterator[Session]:
    session = await open_session(DatabaseSettings(url, deadline=60.0), address_of(url), hot=True)
    try:
        yield session
    finally:
        await session.close()


def request(holds: list[ShardHold], *, floor: float | None = None) -> ClaimRequest:
    return ClaimRequest(ME, holds, ["w"], [], limit=50, ahead=0.01, floor=floor)


def hinted() -> ClaimRequest:
    """As a runner asks after a hint."""
    return request(ALL[9:10], floor=time.time() - 10)


async def pages(session: Session, asked: ClaimRequest) -> int:
    args = columns.claim_columns(asked, range(1000, 1050))
    return blocks(await plan_of(session, queries.CLAIM, *args))


async def test_a_claim_does_not_step_over_what_was_finished_under_a_long_snapshot(
    migrated_postgres_url: str,
) -> None:
    url = migrated_postgres_url
    await execute(url, GROUND)
    async with hot_session(url) as session:
        one, every = request(ALL[9:10]), request(ALL)
        before = await pages(session, one), await pages(session, every)
        async with snapshot(url):
            await execute(url, WAITING.format(name="r", workflow="w", count=20_000))
            await execute(url, FINISHED)
            floor = time.time() - 30
            bare = await pages(session, one), await pages(session, every)
            marked = (
                await pages(session, replace(one, floor=floor)),
                await pages(session, replace(every, floor=floor)),
            )
    print(
        f"pages of a claim in one shard and in all: {before}, bare {bare}, from the mark {marked}"
    )
    assert bare[1] > 10_000  # what the mark is for
    assert marked[0] <= before[0] + 20
    assert marked[1] <= before[1] + 1_000


@pytest.mark.req("CL13")
async def test_runs_that_nobody_knows_cost_a_claim_no_pages(migrated_postgres_url: str) -> None:
    url, count = migrated_postgres_url, 5_000
    await execute(url, GROUND)
    async with world_of(url, deadline=30.0) as world, hot_session(url) as session:
        await claim_one(world, 1, floor=True)
        pages_before = await pages(session, hinted())
        await make_strays(url, world, count)
        pages_after = await pages(session, hinted())
        strays = await session.fetch(
            "select count(*) from perdure_run_list where stray is not null",
            writes=False,
            deadline=30,
        )
    print(f"pages of a claim after its hint: {pages_before}, beside {count} strays {pages_after}")
    assert strays[0][0] == count
    assert pages_after <= pages_before + 20  # the indexes are deeper, and a few are due again


async def make_strays(url: str, world: World, count: int) -> None:
    """Runs of a workflow that nobody knows, marked by claims as a runner makes them, and there for an hour by now."""
    await execute(url, WAITING.format(name="x", workflow="unknown", count=count))
    began, calls = time.perf_counter(), 0
    while True:
        claims = await world.runs.claim_runs(request(ALL))
        calls += 1
        if not claims.more:
            break
    print(f"{count} strays marked in {calls} claims, {time.perf_counter() - began:.2f} s")
    assert claims.complete
    await execute(url, AN_HOUR_LATER)


async def claim_one(world: World, number: int, *, floor: bool) -> float:
    """Milliseconds of a claim that finds one due run: after its hint, or at a look into everything."""
    slot = number * 219 % 65_536
    await world.start(f"t{time.monotonic_ns()}", workflow="w", slot=slot)
    asked = request([ALL[slot // 256]], floor=await world.now() - 10) if floor else request(ALL)
    began = time.perf_counter()
    claims = await world.runs.claim_runs(asked)
    took = 1000 * (time.perf_counter() - began)
    (run,) = claims.runs
    end = write(run, outcome=Finish(RunStatus.SUCCEEDED, result="1"))
    await world.runs.commit_writes(ME, world.fresh_id(), [end])
    return took


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(500)
@pytest.mark.req("CL13")
async def test_a_hundred_thousand_runs_that_nobody_knows_leave_the_time_of_a_claim_as_it_was(
    postgres: PrivatePostgres, migrated_postgres_url: str
) -> None:
    """Two databases of one server are asked in turns, and only one of them has the strays. A look into everything, once
    a minute, has to step over what was there before they were marked and marks those that are due again: it may take
    longer, but not out of proportion."""
    strange, plain = migrated_postgres_url, migrated_database(postgres)
    for url in (strange, plain):
        await execute(url, GROUND)
    async with (
        world_of(strange, deadline=30.0) as beside_strays,
        world_of(plain, deadline=30.0) as alone,
    ):
        await make_strays(strange, beside_strays, 100_000)
        for _ in range(3):  # other work of the machine may spoil a round
            took = await in_turns(alone, beside_strays, claims=1_000)
            without, beside = (
                percentile(took[True, False], 0.99),
                percentile(took[True, True], 0.99),
            )
            if beside <= 1.2 * without + 0.3:
                break
        else:
            raise AssertionError(f"p99 {without:.2f} ms, beside the strays {beside:.2f} ms")
    assert percentile(took[False, True], 0.5) <= 2 * percentile(took[False, False], 0.5) + 1.0


async def in_turns(
    alone: World, beside_strays: World, *, claims: int
) -> Mapping[tuple[bool, bool], Sequence[float]]:
    """(after a hint rather than a look into everything, beside strays) → milliseconds of its claims."""
    took: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    for number in range(claims):
        for floor in (True, False) if number % 4 == 0 else (True,):
            for strays in (False, True) if number % 8 < 4 else (True, False):
                world = beside_strays if strays else alone
                took[floor, strays].append(await claim_one(world, number, floor=floor))
    for (floor, strays), each in sorted(took.items()):
        what = ("one shard" if floor else "all shards") + (", beside strays" if strays else "")
        print(f"claims of {what}: {milliseconds([ms / 1000 for ms in each])}")
    return took


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(60 * MINUTES + 240)
async def test_claims_stay_quick_under_a_snapshot_of_some_minutes(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    """Two pods at work, while a report runs in one transaction. Their claims, as they count them in /metrics, in the
    second half of its time."""
    url = migrated_postgres_url
    env = {"PERDURE_PARK_AFTER": "0.3", "SIDE_LOG_FILE": str(tmp_path / "side.log")}
    started = 0
    async with client_on(url, WORKFLOWS) as client:
        with Pods("tests.integration.apps.histories:app", url, tmp_path, env=env) as pods:
            both = [await pods.ready(), await pods.ready()]
            await client.run(sleeper, 1.0, timeout=30)
            async with snapshot(url):
                began = time.monotonic()
                counts = [await claim_counts(both)]
                for half in (1, 2):
                    while time.monotonic() < began + half * 30 * MINUTES:
                        await asyncio.gather(
                            *(client.start(ticks, 1) for _ in range(2)),
                            *(client.start(sleeper, 1.0) for _ in range(2)),
                        )
                        started += 4
                        await asyncio.sleep(max(0.0, began + started * PACE - time.monotonic()))
                    counts.append(await claim_counts(both))
            await until_none_is_left(client)
            assert await client.list(status=RunStatus.FAILED) == []
            assert len(await client.list(status=RunStatus.SUCCEEDED, limit=50)) == 50
    print(f"{MINUTES:g} minutes, {started} runs")
    for half, name in enumerate(("first", "second")):
        counted = counts[half + 1] - counts[half]
        within = counted["0.01"] / counted["+Inf"]
        quick = counted["0.005"] / counted["+Inf"]
        print(
            f"{name} half: of {counted['+Inf']} claims {100 * within:.2f} % took at most 10 ms, {100 * quick:.2f} % "
            "at most 5 ms"
        )
    assert counted["+Inf"] >= 10 * 60 * MINUTES / 2
    assert within >= 0.99


async def claim_counts(pods: Sequence[Pod]) -> Counter[str]:
    """Upper end in seconds → how many claims of these pods have taken at most that."""
    found: Counter[str] = Counter()
    for pod in pods:
        text = await pod.wait_http("/metrics", deadline=5)
        for bound, count in re.findall(
            r'^perdure_claim_duration_seconds_bucket\{le="(.+)"\} (\d+)$', text, re.MULTILINE
        ):
            found[bound] += int(count)
    return found


async def until_none_is_left(client: Client) -> None:
    async def look() -> bool:
        return not sum((await client.cluster()).runs.values())

    await until(look, what="every run ended", deadline=60, interval=0.2)
