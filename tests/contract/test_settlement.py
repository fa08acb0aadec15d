"""After an unknown outcome: what is there decides, for every kind of write (R9)."""

from __future__ import annotations

import pytest

from perdure.storage.model import Finish, Park, Reason, RunStatus, RunWrite, Verdict
from tests.contract.world import SHARDS, Runner, World, entry, write

pytestmark = pytest.mark.req("CL11")


async def prepared(world: World, outcome: Park | Finish | None) -> tuple[Runner, RunWrite]:
    """A claimed run and a write of it that was not sent yet."""
    runner = await world.runner()
    await world.start("r1")
    run = await runner.claim_one("r1")
    return runner, write(run, entries=[entry(1)], outcome=outcome)


KINDS = {
    "entries": (None, Verdict.COMMITTED),
    "park": (Park(None, 0, Reason.SIGNAL), Verdict.PARKED),
    "hold": (Park(None, 0, Reason.OPERATOR), Verdict.PARKED),
    "finish": (Finish(RunStatus.SUCCEEDED, result="1"), Verdict.COMMITTED),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_that_was_committed_is_found(world: World, kind: str) -> None:
    outcome, expected = KINDS[kind]
    runner, sent = await prepared(world, outcome)
    assert await runner.commit(sent, batch_id=77) == {"r1": expected}
    assert await runner.settle(sent, batch_id=77) == {"r1": expected}
    # Sent a second time, it is not applied a second time.
    assert await runner.commit(sent, batch_id=77) == {"r1": expected}
    assert len(await world.journal("r1")) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_that_never_arrived_may_be_sent_again(world: World, kind: str) -> None:
    outcome, expected = KINDS[kind]
    runner, sent = await prepared(world, outcome)
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.AGAIN}
    assert await runner.commit(sent, batch_id=77) == {"r1": expected}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_write_whose_run_was_taken_over_is_fenced(world: World, kind: str) -> None:
    runner, sent = await prepared(world, KINDS[kind][0])
    await world.kill(runner)
    heir = await world.runner([])
    await heir.take(range(SHARDS), dead=[runner.runner_id])
    await heir.claim_one("r1", orphans=True)
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.FENCED}


async def test_a_refused_park_is_found_as_refused(world: World) -> None:
    runner, sent = await prepared(world, Park(None, 0, Reason.SIGNAL))
    await world.deliver("r1", "m1")
    await runner.commit(sent, batch_id=77)
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.PARK_REFUSED}


async def test_a_committed_park_that_somebody_claimed_since_is_found(world: World) -> None:
    runner, sent = await prepared(world, Park(0.0, 0, Reason.TIMER))
    await runner.commit(sent, batch_id=77)
    await runner.claim_one("r1")
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.PARKED}


async def test_another_end_than_mine_is_fenced(world: World) -> None:
    runner, sent = await prepared(world, Finish(RunStatus.SUCCEEDED))
    await runner.commit(
        RunWrite("r1", sent.claim_id, sent.revision, outcome=Finish(RunStatus.FAILED))
    )
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.FENCED}
    assert (await world.record("r1")).status is RunStatus.FAILED


async def test_a_revision_that_moved_on_means_reload(world: World) -> None:
    runner, sent = await prepared(world, None)
    await runner.commit(sent, batch_id=77)
    assert await runner.settle(sent, batch_id=78) == {"r1": Verdict.RELOAD}


async def test_every_member_gets_a_verdict(world: World) -> None:
    runner = await world.runner()
    await world.start("a", "b", "c")
    runs = await runner.claim()
    sent = [write(run, entries=[entry(1)]) for run in runs.values()]
    await runner.commit(sent[0], batch_id=77)
    await runner.finish(runs["c"])
    unknown = RunWrite("never was", 1, 1)
    assert await runner.settle(*sent, unknown, batch_id=77) == {
        "a": Verdict.COMMITTED,
        "b": Verdict.AGAIN,
        "c": Verdict.FENCED,
        "never was": Verdict.FENCED,
    }
    assert await runner.settle(batch_id=77) == {}
