"""Pods that are told to stop while something in them does not end, and the probes of one that is busy."""

from __future__ import annotations

import asyncio
import textwrap
import time
from pathlib import Path

import pytest

from perdure.runtime.cli.stop_signals import TOGETHER
from tests.e2e.commands import Commands
from tests.harness.pods import Pod, Pods
from tests.harness.waiting import until
from tests.integration.in_process import execute

APPLICATION = """
    import asyncio
    import os
    import time
    from pathlib import Path

    from perdure import App, Context, step, workflow

    def note(word: str) -> None:
        with Path(os.environ["NOTES"]).open("a") as notes:
            notes.write(word + "\\n")

    @step
    def in_a_thread(seconds: float) -> str:
        note("begun")
        time.sleep(seconds)
        note("ended")
        return "slept"

    @step
    async def on_the_loop(seconds: float) -> str:
        note("begun")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
        note("ended")
        return "computed"

    @workflow(name="thread")
    async def thread(ctx: Context, seconds: float) -> str:
        return await ctx.step(in_a_thread, seconds)

    @workflow(name="loop")
    async def loop(ctx: Context, seconds: float) -> str:
        return await ctx.step(on_the_loop, seconds)

    @step
    async def awaiting(seconds: float) -> str:
        note("begun")
        await asyncio.sleep(seconds)
        return "awaited"

    @workflow(name="awaits")
    async def awaits(ctx: Context, seconds: float) -> str:
        return await ctx.step(awaiting, seconds)

    @workflow(name="idle")
    async def idle(ctx: Context) -> None:
        await ctx.wait_signal("go", timeout=4)

    app = App("stopping", workflows=[thread, loop, awaits, idle])
"""


@pytest.fixture
def pods(migrated_postgres_url, tmp_path, request):
    (tmp_path / "stopping_app.py").write_text(textwrap.dedent(APPLICATION))
    env = {
        "NOTES": str(tmp_path / "notes"),
        "PERDURE_LEASE": "2",
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}",
    }
    with Pods("stopping_app:app", migrated_postgres_url, tmp_path, env=env) as started:
        yield started


@pytest.fixture
def cli(migrated_postgres_url, tmp_path):
    return Commands(migrated_postgres_url, tmp_path)


def notes(tmp_path: Path) -> list[str]:
    path = tmp_path / "notes"
    return path.read_text().split() if path.exists() else []


async def begin(cli: Commands, tmp_path: Path, name: str, seconds: float) -> str:
    """Start a run and wait until its step works; its id."""
    before = len(notes(tmp_path))
    run_id = cli.process(
        "workflows", "start", name, "--payload", str(seconds), "--app", "stopping_app:app",
        "--db", cli.url,
    ).ok().out.strip()  # fmt: skip
    await until(lambda: len(notes(tmp_path)) > before, what="the step works", deadline=20)
    return run_id


def owned(cli: Commands) -> int:
    found = cli("cluster", "status", "--format", "json").ok().json
    return int(found["shard_count"]) - int(found["shards_unowned"])


@pytest.mark.alone
@pytest.mark.req("CL5")
@pytest.mark.parametrize("name", [pytest.param("thread", marks=pytest.mark.slow), "loop"])
async def test_the_grace_is_kept_whatever_the_step_does(pods, cli, tmp_path, name):
    """A thread that does not end, and a main loop that does not answer: neither holds the exit, and the shards are free
    when the process is gone."""
    pod = await pods.ready(env={"PERDURE_GRACE": "1"})
    run_id = await begin(cli, tmp_path, name, 120)
    told = time.monotonic()
    pod.terminate()
    assert "draining" in await pod.wait_http("/readyz", status=503, deadline=3)
    assert await pod.wait_end(deadline=20) == 4
    assert time.monotonic() - told < 1 + 2 + 1, "the grace, two seconds, and one for the last words"
    assert owned(cli) == 0
    assert notes(tmp_path) == ["begun"]
    assert cli.show(run_id)["status"] == "running"
    said = {"thread": "pod.grace-over", "loop": "pod.cut"}
    assert said[name] in pod.log


@pytest.mark.req("CL5")
async def test_without_a_grace_idle_work_still_ends_in_order(pods, cli, tmp_path):
    """The grace is for running steps: shards and waiting runs are handed over in any case: nothing is cut short."""
    pod = await pods.ready(env={"PERDURE_GRACE": "0"})
    await until(lambda: owned(cli) == 256, what="all shards", deadline=20)
    begun = cli.process("workflows", "start", "idle", "--app", "stopping_app:app", "--db", cli.url)
    run_id = begun.ok().out.strip()

    async def waits() -> bool:
        return bool((await pod.status())["runs_in_memory"] == 1)

    await until(waits, what="a run that waits in memory", deadline=20)
    pod.terminate()
    assert await pod.wait_end(deadline=20) == 0
    assert "pod.grace-over" not in pod.log
    assert cli.show(run_id)["status"] == "suspended"
    assert owned(cli) == 0


@pytest.mark.req("CL5")
async def test_without_a_grace_a_running_step_is_let_go_of_at_once(pods, cli, tmp_path):
    pod = await pods.ready(env={"PERDURE_GRACE": "0"})
    await begin(cli, tmp_path, "awaits", 60)
    pod.terminate()
    assert await pod.wait_end(deadline=20) == 4
    assert "pod.grace-over" in pod.log
    assert owned(cli) == 0


@pytest.mark.slow
@pytest.mark.req("CL5")
async def test_a_pod_that_is_declared_dead_while_it_stops_has_cut_its_steps_short(
    pods, cli, tmp_path
):
    pod = await pods.ready()
    await begin(cli, tmp_path, "thread", 60)
    pod.terminate()
    await pod.wait_log("pod.stopping")
    await execute(cli.url, "update perdure_runners set dead = true")
    assert await pod.wait_end(deadline=20) == 4
    assert "pod.steps-lost" in pod.log
    assert notes(tmp_path) == ["begun"]


@pytest.mark.slow
@pytest.mark.req("CL5")
async def test_a_second_signal_ends_a_pod_whose_main_loop_does_not_answer(pods, cli, tmp_path):
    pod = await pods.ready()
    await begin(cli, tmp_path, "loop", 120)
    pod.terminate()
    await pod.wait_log("pod.stopping")
    apart = time.monotonic() + 2 * TOGETHER
    await until(lambda: time.monotonic() > apart, what="a second signal of its own", deadline=5)
    pod.terminate()
    assert await pod.wait_end(deadline=10) == 4
    assert owned(cli) == 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(180)
@pytest.mark.req("CL4", "CL11")
async def test_a_main_loop_blocked_for_three_leases_fails_no_liveness_probe(pods, cli, tmp_path):
    """With the periods of a Kubernetes probe: each 10 s, an answer within 1 s; and a closer look beside."""
    usual = {"PERDURE_LEASE": "10"}
    blocked = await pods.ready(env=usual)
    await until(lambda: owned(cli) == 256, what="all shards held", deadline=30)
    run_id = await begin(cli, tmp_path, "loop", 45)
    assert await _in_memory(blocked)
    await pods.ready(env=usual)  # somebody who could declare it dead
    probes: dict[float, list[tuple[int, str] | None]] = {10.0: [], 1.0: []}

    async def probe(period: float) -> None:
        while "ended" not in notes(tmp_path):
            probes[period].append(await blocked.http("/livez", timeout=1.0))
            await asyncio.sleep(period)

    await asyncio.gather(probe(10.0), probe(1.0))
    assert len(probes[10.0]) >= 3
    assert {answer and answer[0] for each in probes.values() for answer in each} == {200}
    assert cli.wait_status(run_id, "succeeded")["result"] == "computed"
    assert notes(tmp_path) == ["begun", "ended"], "it was executed once, and by nobody else"
    assert "runner.declared-dead" not in blocked.log


async def _in_memory(pod: Pod) -> bool:
    answer = await pod.http("/status")
    return answer is not None and '"runs_in_memory": 1' in answer[1]
