"""An operator's suspend and resume of runs that are being executed, wait in memory, or lost their runner."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from perdure import Client, Context, Retry, RunEnded, Runner, WrongStatus, step, workflow
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.interface import RunnerIdentity
from perdure.storage.model import ClaimRequest, RunStatus
from tests.harness.pods import ROOT, Pods
from tests.harness.releases import FIRST, source_of
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.ears import Listening, ear
from tests.integration.in_process import Definitions, client_on, runner_on, until_status

pytestmark = pytest.mark.req("SL5", "SL7")


@dataclass
class Scene:
    """What the bodies and steps of one test did, and what lets a step go on."""

    done: list[str] = field(default_factory=list)
    begun: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    may_end: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))


_scene = Scene()


@pytest.fixture
def scene() -> Scene:
    global _scene
    _scene = Scene()
    return _scene


@step
async def work(name: str) -> str:
    _scene.begun[name].set()
    await _scene.may_end[name].wait()
    _scene.done.append(name)
    return name


@step(retry=Retry(max_attempts=50, base_delay=0.05, max_delay=0.05, jitter=False))
async def fails_at_first(name: str) -> int:
    _scene.done.append(name)
    if not _scene.may_end[name].is_set():
        raise OSError("not yet")
    return _scene.done.count(name)


@workflow(name="two-steps")
async def two_steps(ctx: Context, name: str) -> list[str]:
    return [await ctx.step(work, f"{name}1"), await ctx.step(work, f"{name}2")]


@workflow(name="listens")
async def listens(ctx: Context, seconds: float) -> list[object]:
    _scene.done.append("entered")
    started = ctx.now()
    word = await ctx.wait_signal("word", str)
    await ctx.sleep(seconds)
    return [word, (ctx.now() - started).total_seconds()]


@workflow(name="sleeps")
async def sleeps(ctx: Context, seconds: float) -> float:
    started = ctx.now()
    await ctx.sleep(seconds)
    return (ctx.now() - started).total_seconds()


@workflow(name="tries")
async def tries(ctx: Context, name: str) -> int:
    return await ctx.step(fails_at_first, name)


WORKFLOWS: Definitions = [two_steps, listens, sleeps, tries]


async def until_held(client: Client, run_id: str) -> None:
    async def held() -> bool:
        info = await client.get(run_id)
        return info is not None and info.record.hold == "operator"

    await until(held, what=f"{run_id} on hold")


def heard(runner: Runner, run_id: str) -> bool:
    activation = runner.session.engine.find(run_id)
    return activation is not None and activation.seen > 0


async def event_types(client: Client, run_id: str) -> list[str]:
    return [event.type for event in await client.events(run_id)]


async def test_a_running_step_ends_and_no_other_begins(migrated_url: str, scene: Scene) -> None:
    async with (
        runner_on(migrated_url, WORKFLOWS) as runner,
        client_on(migrated_url, WORKFLOWS) as client,
    ):
        handle = await client.start(two_steps, "a")
        await scene.begun["a1"].wait()
        await client.suspend(handle.run_id, "prices are wrong")
        assert (await client.why(handle.run_id)).status == "running"
        await until(lambda: heard(runner, handle.run_id), what="the runner has read its mailbox")
        scene.may_end["a1"].set()
        await until_held(client, handle.run_id)
        assert len(await client.journal(handle.run_id)) == 1
        assert not scene.begun["a2"].is_set()
        assert runner.session.engine.in_memory == 0
        why = await client.why(handle.run_id)
        assert why.facts["said"] == "prices are wrong"
        await client.suspend(handle.run_id)
        scene.may_end["a2"].set()
        await client.resume(handle.run_id)
        assert await handle.wait(20) == ["a1", "a2"]
        assert scene.done == ["a1", "a2"]
        types = await event_types(client, handle.run_id)
        assert (types.count("run-suspended"), types.count("run-resumed")) == (1, 1)
        with pytest.raises(RunEnded):
            await client.suspend(handle.run_id)
        with pytest.raises(WrongStatus):
            await client.resume(handle.run_id)


async def test_a_run_idle_in_memory_is_held_at_once_and_collects_its_mail(
    migrated_url: str, scene: Scene
) -> None:
    async with (
        runner_on(migrated_url, WORKFLOWS, park_after=600) as runner,
        client_on(migrated_url, WORKFLOWS) as client,
    ):
        handle = await client.start(listens, 0.0)
        await until(lambda: scene.done, what="the body waits")
        await client.suspend(handle.run_id)
        await until_held(client, handle.run_id)
        await client.signal(handle.run_id, "word", "first")
        await client.signal(handle.run_id, "word", "second")
        assert runner.session.engine.in_memory == 0
        info = await client.get(handle.run_id)
        assert info is not None
        assert (info.wake_at, info.status) == (None, RunStatus.SUSPENDED)
        await client.resume(handle.run_id)
        word, _ = await handle.wait(20)
        assert word == "first"


async def test_a_timer_keeps_its_instant_over_a_hold(migrated_postgres_url: str) -> None:
    url = migrated_postgres_url
    async with (
        runner_on(url, WORKFLOWS, park_after=0.05),
        client_on(url, WORKFLOWS) as client,
    ):
        parked, late = await client.start(sleeps, 2.0), await client.start(sleeps, 0.5)
        for handle in (parked, late):
            await until_status(client, handle.run_id, RunStatus.SUSPENDED)
            await client.suspend(handle.run_id)
            await until_held(client, handle.run_id)
        await asyncio.sleep(0.6)  # the timer of one falls due meanwhile
        for handle in (parked, late):
            assert (await client.why(handle.run_id)).status == "suspended"
            await client.resume(handle.run_id)
        assert 2.0 <= await parked.wait(20) < 2.5
        assert 0.5 <= await late.wait(20) < 30


async def test_a_suspend_that_was_taken_back_changes_nothing(
    migrated_url: str, scene: Scene
) -> None:
    async with (
        runner_on(migrated_url, WORKFLOWS),
        client_on(migrated_url, WORKFLOWS) as client,
    ):
        handle = await client.start(two_steps, "b")
        await scene.begun["b1"].wait()
        await client.suspend(handle.run_id)
        await client.resume(handle.run_id)
        with pytest.raises(WrongStatus):
            await client.resume(handle.run_id)
        scene.may_end["b1"].set()
        scene.may_end["b2"].set()
        assert await handle.wait(20) == ["b1", "b2"]


async def test_a_step_between_two_attempts_is_held_with_its_count(
    migrated_postgres_url: str, scene: Scene
) -> None:
    url = migrated_postgres_url
    async with runner_on(url, WORKFLOWS), client_on(url, WORKFLOWS) as client:
        handle = await client.start(tries, "t")
        await until(lambda: len(scene.done) >= 2, what="two attempts")
        await client.suspend(handle.run_id)
        await until_held(client, handle.run_id)
        made = len(scene.done)
        scene.may_end["t"].set()
        await client.resume(handle.run_id)
        assert await handle.wait(20) == made + 1
        entries = await client.journal(handle.run_id)
        assert [entry.attempt for entry in entries] == [made, made + 1]


async def test_a_run_whose_runner_died_is_held_without_being_entered(
    migrated_postgres_url: str, scene: Scene
) -> None:
    url = migrated_postgres_url
    async with client_on(url, WORKFLOWS) as client:
        await claimed_by_a_runner_that_dies(url, client, "lost")
        await client.suspend("lost", "first look at it")
        async with runner_on(url, WORKFLOWS, lease=1.0):
            await until_held(client, "lost")
            assert scene.done == []
            assert "run-suspended" in await event_types(client, "lost")
            await client.signal("lost", "word", "now")
            await client.resume("lost")
            word, _ = await client.wait("lost", 20)
            assert word == "now"


async def claimed_by_a_runner_that_dies(url: str, client: Client, run_id: str) -> None:
    """A runner with a lease of no length takes everything and is heard of no more."""
    database = connect(DatabaseSettings(url), clock=SystemClock())
    cluster, runs = database.cluster(), database.runs()
    await cluster.open()
    await runs.open()
    try:
        await cluster.agree(shard_count=256, lock_mode="row")
        await cluster.register(RunnerIdentity(77, "dead", "127.0.0.1:1", ["listens"], {}), 0.0)
        holds = await cluster.take_shards(77, range(256), [])
        await client.start(listens, 0.0, run_id=run_id)
        request = ClaimRequest(77, holds, ["listens"], [], limit=5)
        assert [run.run_id for run in (await runs.claim_runs(request)).runs] == [run_id]
    finally:
        await cluster.close()
        await runs.close()


async def test_suspends_and_resumes_under_load_lose_nothing(
    migrated_postgres_url: str, scene: Scene
) -> None:
    """Each run is suspended and resumed several times while it works; its steps are run once each."""
    url = migrated_postgres_url
    async with (
        runner_on(url, [three_steps], park_after=0.02),
        client_on(url, [three_steps]) as client,
    ):
        handles = [await client.start(three_steps, f"r{n}-") for n in range(20)]

        async def trouble(run_id: str) -> None:
            for _ in range(3):
                try:
                    await client.suspend(run_id)
                    await client.resume(run_id)
                except (RunEnded, WrongStatus):
                    return

        began = time.monotonic()
        await asyncio.gather(*(trouble(handle.run_id) for handle in handles))
        results = await asyncio.gather(*(handle.wait(30) for handle in handles))
        print(f"{time.monotonic() - began:.1f} s")
    assert results == [[f"r{n}-{i}" for i in range(3)] for n in range(20)]
    assert sorted(scene.done) == sorted(name for result in results for name in result)


@step
async def brief(name: str) -> str:
    await asyncio.sleep(0.02)
    _scene.done.append(name)
    return name


@workflow(name="three-steps")
async def three_steps(ctx: Context, name: str) -> list[str]:
    result = []
    for number in range(3):
        result.append(await ctx.step(brief, f"{name}{number}"))
        await ctx.sleep(0.05)
    return result


@pytest.mark.slow
@pytest.mark.req("OP3")
async def test_a_pod_of_the_first_release_leaves_a_suspend_to_those_that_know_it(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    """It goes on with the run; whoever of this release claims it next puts it on hold."""
    url = migrated_postgres_url
    first_release = source_of(FIRST, tmp_path / "first")
    side_log = tmp_path / "side.log"
    env = {"PERDURE_LEASE": "2", "PERDURE_PARK_AFTER": "60"}
    app = "tests.integration.apps.ears:app"
    with Pods(app, url, tmp_path, env=env, side_log=side_log) as pods:
        async with Client(url, workflows=[ear]) as client:
            old = pods.start("old", env={"PYTHONPATH": f"{first_release}:{ROOT}"})
            await old.wait_http("/readyz", deadline=30)
            handle = await client.start(ear, Listening(signals=3))

            async def heard(word: str) -> None:
                def look() -> bool:
                    return word in {e.key for e in SideLog(side_log).executions()}

                await until(look, what=f"{word!r} heard", deadline=20)

            await heard("listens")
            await client.suspend(handle.run_id)
            await client.signal(handle.run_id, "go", "one")
            await heard("one")
            old.terminate()
            assert await old.wait_end() == 0
            assert "Traceback" not in old.log
            new = await pods.ready("new", env={"PERDURE_SHARD_LOCK": "row"})
            await client.signal(handle.run_id, "go", "two")
            await until_held(client, handle.run_id)
            assert "two" not in {e.key for e in SideLog(side_log).executions()}
            await client.resume(handle.run_id)
            await heard("two")
            await client.signal(handle.run_id, "go", "three")
            assert await handle.wait(20) == 3
            assert new.alive
