"""The process lives, its connection is lost at a chosen statement: the run ends right, under the same runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from perdure.sharding.slots import slot_of
from perdure.storage.errors import UnknownOutcome
from perdure.storage.model import NewRun, RunStatus
from perdure.storage.postgres import columns, queries
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere
from tests.integration.apps import crossing as application
from tests.integration.crash_ground import Ground, ground_on, lost_start, runner_loses
from tests.integration.crash_world import MOMENTS, Call, lose
from tests.integration.postgres_world import foreign, waiting_for_lock

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("CL4", "CL11")]

ENDS = ["rollback", "commit"]
"""What the session does that kept a row locked."""

CANCEL = ["lock_unentered", "cancel_unentered", "commit"]
"""The statements that end a run nobody has entered; one transaction."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(
    postgres: PrivatePostgres, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    async with ground_on(postgres, tmp_path_factory.mktemp("connections")) as made:
        yield made


# ---- the runner's connections -----------------------------------------------------------------


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


# ---- the client's connections -----------------------------------------------------------------


@pytest.mark.req("WF2")
async def test_the_answer_to_a_start_is_lost(ground: Ground) -> None:
    await lost_start(ground)


@pytest.mark.req("WF2")
@pytest.mark.parametrize("where", ["before", "answer"])
@pytest.mark.parametrize("statement", ["start", "find_runs"])
async def test_a_start_loses_its_connection(
    ground: Ground, statement: str, where: HangWhere
) -> None:
    """`find_runs` tells a start that came second which run it has joined."""
    run_id = ground.fresh_id()
    if statement == "find_runs":
        await ground.watcher.start(application.crossing, run_id=run_id)
    lost = ground.client_proxy.call(lose(ground.client_proxy), name=statement, where=where)
    outcome = await ground.cross(run_id, "signal")
    assert lost.happened.is_set()
    await ground.check(run_id, outcome, "signal")


@pytest.mark.req("SL2", "SL5")
@pytest.mark.parametrize("where", ["before", "answer"])
@pytest.mark.parametrize("statement", ["signal", *CANCEL, "find_run"])
async def test_a_call_loses_its_connection(
    ground: Ground, statement: str, where: HangWhere
) -> None:
    """A signal, and what a cancel sends for a run that has been entered."""
    run_id = ground.fresh_id()
    call: Call = "signal" if statement == "signal" else "cancel"
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    lost = ground.client_proxy.call(lose(ground.client_proxy), name=statement, where=where)
    await ground.call(run_id, call)
    outcome = await ground.outcome(run_id)
    assert lost.happened.is_set()
    await ground.check(run_id, outcome, call)


@pytest.mark.req("SL2", "SL5")
@pytest.mark.parametrize("call", ["signal", "cancel"])
async def test_the_answer_to_a_call_is_lost_and_the_run_ends(ground: Ground, call: Call) -> None:
    """The repeat finds neither run nor mailbox: a signal must not be told that it was not delivered."""
    run_id = ground.fresh_id()
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    lose_client = lose(ground.client_proxy)

    async def live_through(backend: int) -> None:
        if call == "signal":  # the same one again, for its hint
            await ground.runner.client.signal(run_id, "go", "on", id="go")
        else:
            await ground.runner.client.cancel(run_id)
        await ground.outcome(run_id)
        lose_client(backend)

    ground.client_proxy.call(live_through, name="signal", where="answer")
    if call == "signal":
        with pytest.raises(
            UnknownOutcome, match="its journal says whether it took the signal 'go'"
        ):
            await ground.call(run_id, call)
    else:
        await ground.call(run_id, call)
    await ground.check(run_id, await ground.outcome(run_id), call)


@pytest.mark.req("SL5")
@pytest.mark.parametrize("where", ["before", "answer"])
@pytest.mark.parametrize("statement", CANCEL)
async def test_a_cancel_before_anybody_entered_loses_its_connection(
    ground: Ground, statement: str, where: HangWhere
) -> None:
    run_id = ground.fresh_id()
    await ground.client.start(application.unknown, run_id=run_id)
    lost = ground.client_proxy.call(lose(ground.client_proxy), name=statement, where=where)
    await ground.client.cancel(run_id, "enough")
    assert lost.happened.is_set()
    assert await ground.state(run_id) == (RunStatus.CANCELLED, 0)
    assert not ground.executed(run_id)


# ---- during a lock wait -----------------------------------------------------------------------


async def cut_in_lock_wait(
    ground: Ground,
    statement: str,
    act: Callable[[], Awaitable[object]],
    holder: asyncpg.Connection,
    end: str,
) -> None:
    """Cut the client while ``statement`` waits for a row that ``holder`` has; then the holder ends."""
    cut = ground.client_proxy.cut(
        name=statement, where="lock_wait", when=lambda _: waiting_for_lock(ground.url, statement)
    )
    acting = asyncio.ensure_future(act())
    await asyncio.wait_for(cut.happened.wait(), 10.0)
    await holder.execute(end)
    await asyncio.wait_for(acting, 15.0)


@pytest.mark.req("WF2")
@pytest.mark.parametrize("end", ENDS)
async def test_a_start_is_cut_while_it_waits_for_another_of_its_id(
    ground: Ground, end: str
) -> None:
    run_id = ground.fresh_id()
    rival = NewRun(run_id, slot_of(run_id), "crossing", start_token=1, payload="null", seed=1)
    async with foreign(ground.url) as holder:
        await holder.fetch(queries.START, *columns.start_columns([rival]))
        await cut_in_lock_wait(
            ground,
            "start",
            lambda: ground.client.start(application.crossing, run_id=run_id),
            holder,
            end,
        )
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    await ground.call(run_id, "signal")
    outcome = await ground.outcome(run_id)
    starts = [row for row in await ground.history(run_id) if row.table == "runs" and row.op == "I"]
    assert len(starts) == 1
    await ground.check(run_id, outcome, "signal")


@pytest.mark.req("SL2")
@pytest.mark.parametrize("end", ENDS)
async def test_a_signal_is_cut_while_it_waits_for_another_sender(ground: Ground, end: str) -> None:
    run_id = ground.fresh_id()
    await ground.client.start(application.crossing, run_id=run_id)
    await ground.reaches(run_id, RunStatus.SUSPENDED)
    async with foreign(ground.url) as holder:
        await holder.fetch(queries.SIGNAL, run_id, "signal:x", "signal", "x", '"x"', 1, 100, 100)
        await cut_in_lock_wait(ground, "signal", lambda: ground.call(run_id, "signal"), holder, end)
    await ground.check(run_id, await ground.outcome(run_id), "signal")


@pytest.mark.req("SL5")
@pytest.mark.parametrize("end", ENDS)
async def test_a_cancel_is_cut_while_it_waits_for_another_cancel(ground: Ground, end: str) -> None:
    run_id = ground.fresh_id()
    await ground.client.start(application.unknown, run_id=run_id)
    async with foreign(ground.url) as holder:
        await holder.fetch(queries.CANCEL_UNENTERED, run_id, 1, "theirs")
        await cut_in_lock_wait(
            ground,
            "lock_unentered",
            lambda: ground.client.cancel(run_id, "mine"),
            holder,
            end,
        )
    run = await ground.client.get(run_id)
    assert run is not None
    assert run.status is RunStatus.CANCELLED
    assert run.reason == ("mine" if end == "rollback" else "theirs")
    assert not ground.executed(run_id)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("event", "where"),
    [
        ("step", "before"),
        ("step", "answer"),
        ("park", "before"),
        ("park", "answer"),
        ("finish", "before"),
    ],
)
async def test_a_settlement_is_cut_beside_a_lock(
    ground: Ground, event: str, where: HangWhere, end: str
) -> None:
    """The outcome of a commit is unknown, its fence is somebody else's for now, and the settlement is cut as well, at
    the look for which it needs no lock.

    A finish that has arrived is not among them: it left no fence to lock."""
    run_id, runner_id = ground.fresh_id(), ground.runner_id
    lose_runner = lose(ground.runner_proxy)
    async with foreign(ground.url) as holder:

        async def lock_and_lose(backend: int) -> None:
            await holder.execute(f"select from perdure_fences where run_id = '{run_id}' for update")
            lose_runner(backend)

        injury = ground.injure(
            run_id,
            MOMENTS[event],
            where,
            lock_and_lose,
            of=ground.runner_proxy,
            client=ground.client_proxy,
        )
        cut = ground.runner_proxy.cut(
            name="settle_rest", where="before" if where == "before" else "after_commit"
        )
        crossing = asyncio.ensure_future(ground.cross(run_id, "signal"))
        await asyncio.wait_for(cut.happened.wait(), 10.0)
        await holder.execute(end)
        outcome = await crossing
    assert injury.found == [MOMENTS[event].state(where)]
    await ground.check(run_id, outcome, "signal")
    assert ground.runner_id == runner_id
