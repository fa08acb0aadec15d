"""Runs started in the process that executes them: held from their start on, also when its answer is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from perdure import Context, step, workflow
from perdure.runtime.runner import Runner
from perdure.storage.errors import UnknownOutcome
from perdure.storage.model import RunStatus
from tests.harness.audit import read_history
from tests.harness.checkers import claim_chains
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere, PostgresProxy
from tests.harness.waiting import until
from tests.integration.apps import crossing as application
from tests.integration.apps.crash_actor import Order
from tests.integration.crash_actors import Actors
from tests.integration.crash_ground import ground_on
from tests.integration.crash_world import ABSENT, State
from tests.integration.in_process import Watched, client_on, port_and_name, runner_on

_done: Counter[int] = Counter()
_gates: list[asyncio.Event] = []


@step
async def count(number: int) -> int:
    _done[number] += 1
    return number


@workflow(name="counts")
async def counts(ctx: Context, number: int) -> int:
    return await ctx.step(count, number)


@step
async def hold_on(number: int) -> int:
    _done[number] += 1
    await _gates[-1].wait()
    return number


@workflow(name="holds on")
async def holds_on(ctx: Context, number: int) -> int:
    return await ctx.step(hold_on, number)


async def open_for_births(runner: Runner) -> None:
    """The look for what the shards' last holder left is over."""
    engine = runner.session.engine
    await until(lambda: engine.births.open and not engine.looking, what="births", deadline=10)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    _done.clear()
    _gates[:] = [asyncio.Event()]


@pytest.mark.req("CL4", "WF1")
async def test_a_start_in_the_pod_needs_no_claim_and_its_end_no_read(migrated_url: str) -> None:
    database = Watched(migrated_url)
    async with runner_on(migrated_url, [counts], database=database, scan=600.0) as runner:
        await open_for_births(runner)
        results = await asyncio.gather(
            *(runner.client.run(counts, n, timeout=20) for n in range(40))
        )
        assert results == list(range(40))
        assert [run for claims in database.claims for run in claims] == []
        assert runner.session.engine.at_work == 0, "every reserved slot was given back"
        async with client_on(migrated_url, [counts]) as other:  # elsewhere nothing is different
            handle = await other.start(counts, 40)
            assert await handle.wait(20) == 40
            assert [r.run_id for claims in database.claims for r in claims] == [handle.run_id]
    assert _done == Counter(range(41))


@pytest.mark.req("CL4")
async def test_more_starts_than_slots_wait_for_a_claim(migrated_url: str) -> None:
    database = Watched(migrated_url)
    async with runner_on(migrated_url, [holds_on], database=database, slots=3) as runner:
        await open_for_births(runner)
        handles = await asyncio.gather(*(runner.client.start(holds_on, n) for n in range(8)))
        await until(lambda: len(_done) == 3, what="three runs at work", deadline=10)
        assert runner.session.engine.at_work == 3
        waiting = [h for h in handles if (info := await h.poll()) and info.status == "pending"]
        assert len(waiting) == 5
        _gates[-1].set()
        assert await asyncio.gather(*(h.wait(20) for h in handles)) == list(range(8))
    assert _done == Counter(range(8))
    assert len([run for claims in database.claims for run in claims]) == 5


@pytest.mark.req("CL4", "CL11")
async def test_a_birth_whose_answer_is_lost_is_adopted(migrated_postgres_url: str) -> None:
    port, name = port_and_name(migrated_postgres_url)
    async with PostgresProxy(port) as proxy:
        url = proxy.url(name)
        database = Watched(url)
        async with runner_on(url, [counts], database=database, scan=600.0) as runner:
            await open_for_births(runner)
            lost = proxy.cut(name="start", where="after_commit")
            assert await runner.client.run(counts, 1, timeout=20) == 1
            assert lost.happened.is_set()
            assert [run for claims in database.claims for run in claims] == []
            assert runner.session.engine.at_work == 0
    assert _done == Counter([1])


@pytest.mark.req("CL4", "CL11")
async def test_a_birth_nobody_could_adopt_is_found_by_its_own_runner(
    migrated_postgres_url: str,
) -> None:
    """The caller is told that nothing is known; the run is executed all the same, once."""
    port, name = port_and_name(migrated_postgres_url)
    async with PostgresProxy(port) as proxy, client_on(migrated_postgres_url, [counts]) as other:
        url = proxy.url(name)
        async with runner_on(url, [counts], storage_deadline=1.0, scan=600.0) as runner:
            await open_for_births(runner)
            for client_statement in ("start", "find_runs"):  # whatever it asks next is lost as well
                for nth in range(1, 60):
                    proxy.cut(name=client_statement, where="after_commit", nth=nth)
            with pytest.raises(UnknownOutcome):
                await runner.client.start(counts, 1, run_id="lost")
            assert await other.handle("lost", counts).wait(20) == 1
            await until(
                lambda: runner.session.engine.at_work == 0, what="no slot taken", deadline=10
            )
    assert _done == Counter([1])


@pytest.mark.req("CL4", "CL5", "CL7")
@pytest.mark.parametrize("where", ["before", "answer"])
async def test_a_pod_dies_at_a_birth(
    postgres: PrivatePostgres, tmp_path: Path, where: HangWhere
) -> None:
    """Killed right before the statement there is no run; right after it the heir has it."""
    async with (
        ground_on(postgres, tmp_path, scan=0.5) as ground,
        PostgresProxy(postgres.port) as proxy,
    ):
        await ground.runner.stop()  # the pod of this test takes its shards
        with Actors(tmp_path) as actors:
            url = proxy.url(ground.url.rpartition("/")[2])
            found: list[State] = []

            async def kill(_backend: int) -> None:
                await pod.kill()
                found.append(await ground.state("born"))

            rule = proxy.call(kill, name="start", where=where)
            pod = await actors.act(
                Order("birth", url, "born", name="mother", side_log=str(tmp_path / "side.log"))
            )
            await pod.killed()
            await rule.happened.wait()
            heir = await actors.act(
                Order("pod", ground.url, name="heir", side_log=str(tmp_path / "side.log"))
            )
            if where == "before":
                assert found == [ABSENT]
                await ground.client.start(application.crossing, run_id="born")
            else:
                assert found == [("running", 0)], "born claimed"
            await ground.reaches("born", RunStatus.SUSPENDED)
            await ground.call("born", "signal")
            await ground.check("born", await ground.outcome("born"), "signal")
            chain = claim_chains(await read_history(ground.url))["born"]
            assert len({runner for _, runner in chain}) == (1 if where == "before" else 2)
            await heir.kill()
