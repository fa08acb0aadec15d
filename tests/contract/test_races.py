"""Two processes on one database at the same moment, as far as storage can tell: two sets of connections."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DisagreementError,
    RunnerDeclaredDead,
)
from perdure.storage.model import Park, Reason, SendStatus, ShardHold, Verdict
from tests.contract.world import SHARDS, Runner, World, both, entry, write

Worlds = tuple[World, World]


async def same_runner_elsewhere(runner: Runner, world: World) -> Runner:
    """The same runner as seen through another process's connections."""
    return Runner(world, runner.runner_id, list(runner.holds))


@pytest.mark.req("CL4", "WF1")
async def test_two_claims_of_the_same_runs_take_each_once(worlds: Worlds) -> None:
    first, second = worlds
    runner = await first.runner()
    other = await same_runner_elsewhere(runner, second)
    run_ids = [f"run-{number}" for number in range(300)]
    await first.start(*run_ids)
    taken: list[str] = []
    while len(taken) < len(run_ids):
        one, two = await both(runner.claim(limit=40), other.claim(limit=40))
        taken += [*one, *two]
        assert one or two, f"{len(run_ids) - len(taken)} runs were never claimed"
    assert Counter(taken) == Counter(run_ids)


@pytest.mark.req("CL4", "CL5")
async def test_two_heirs_share_a_dead_runners_shards_and_runs(worlds: Worlds) -> None:
    first, second = worlds
    dead = await first.runner()
    run_ids = [f"run-{number}" for number in range(200)]
    await first.start(*run_ids)
    await dead.claim()
    await first.kill(dead)
    one, two = await first.runner([]), await second.runner([])
    await both(one.take(range(SHARDS), [dead.runner_id]), two.take(range(SHARDS), [dead.runner_id]))
    shards = [hold.shard_id for hold in (*one.holds, *two.holds)]
    assert sorted(shards) == list(range(SHARDS))
    assert {hold.epoch for hold in (*one.holds, *two.holds)} == {2}
    ours, theirs = await both(one.claim(orphans=True), two.claim(orphans=True))
    assert Counter([*ours, *theirs]) == Counter(run_ids)


@pytest.mark.req("WF2")
async def test_an_id_started_by_two_is_new_for_one(worlds: Worlds) -> None:
    first, second = worlds
    for round_number in range(10):
        run_ids = [f"run-{round_number}-{number}" for number in range(40)]
        ours, theirs = await both(first.start(*run_ids[:30]), second.start(*reversed(run_ids[10:])))
        created = [outcome.run_id for outcome in (*ours, *theirs) if outcome.created]
        assert Counter(created) == Counter(run_ids)


@pytest.mark.req("SL2")
async def test_no_message_is_lost_to_a_park(worlds: Worlds) -> None:
    first, second = worlds
    runner = await first.runner()
    await first.start("r1")
    for number in range(25):
        run = await runner.claim_one("r1")
        seen = await first.wake_seq("r1")
        parked, sent = await both(
            runner.park(run, wake_at=None, seen=seen, reason=Reason.SIGNAL),
            second.send("r1", f"m{number}"),
        )
        assert sent.status is SendStatus.DELIVERED
        if parked is Verdict.PARK_REFUSED:
            again = write(
                run, revision=run.revision + 1, outcome=Park(0.0, seen + 1, Reason.SIGNAL)
            )
            assert await runner.commit(again) == {"r1": Verdict.PARKED}
        else:
            assert parked is Verdict.PARKED
        record = await first.record("r1")
        assert record.wake_at is not None
        assert record.unread == number + 1


async def test_one_message_sent_by_two_is_stored_once(worlds: Worlds) -> None:
    first, second = worlds
    await first.start("r1")
    for number in range(15):
        ours, theirs = await both(first.send("r1", f"m{number}"), second.send("r1", f"m{number}"))
        assert {ours.status, theirs.status} == {SendStatus.DELIVERED, SendStatus.DUPLICATE}
    assert await second.wake_seq("r1") == 15


@pytest.mark.req("CL4")
async def test_a_commit_and_a_take_over_agree_on_the_journal(worlds: Worlds) -> None:
    first, second = worlds
    for number in range(10):
        run_id = f"run-{number}"
        old = await first.runner([])
        await old.take(range(SHARDS), dead=[])
        await first.start(run_id)
        run = await old.claim_one(run_id)

        async def take_over(old: Runner = old, run_id: str = run_id) -> tuple[Runner, int]:
            await second.kill(old)
            heir = await second.runner([])
            await heir.take(range(SHARDS), [old.runner_id])
            claimed = await heir.claim_one(run_id, orphans=True)
            return heir, claimed.next_seq

        committing = asyncio.create_task(old.commit(write(run, entries=[entry(1)])))
        heir, next_seq = await take_over()
        (answer,) = await asyncio.gather(committing, return_exceptions=True)
        journal = await second.journal(run_id)
        assert len(journal) == next_seq - 1
        if isinstance(answer, RunnerDeclaredDead):
            assert next_seq == 1
        else:
            assert answer == {run_id: Verdict.COMMITTED if next_seq == 2 else Verdict.FENCED}
        await second.cluster.leave(heir.runner_id)


@pytest.mark.req("CL1")
async def test_two_first_boots_agree(shared_url: str) -> None:
    first, second = World(shared_url), World(shared_url)
    await first.open(shard_count=None)
    await second.open(shard_count=None)
    try:
        answers = await asyncio.gather(
            first.cluster.agree(shard_count=8, lock_mode="row"),
            second.cluster.agree(shard_count=16, lock_mode="row"),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, DisagreementError)]
        agreed = [answer.shard_count for answer in answers if not isinstance(answer, BaseException)]
        assert len(refused) == len(agreed) == 1
        assert len((await first.cluster.read_topology()).shards) == agreed[0]
    finally:
        await first.close()
        await second.close()


@pytest.mark.req("CL3")
async def test_a_renewal_and_a_declaration_agree(worlds: Worlds) -> None:
    first, second = worlds
    for _ in range(10):
        runner = await first.runner([], lease=0.0)
        renewal, declared = await both(
            first.cluster.renew(runner.runner_id, 30.0),
            second.cluster.declare_dead(runner.runner_id, 0),
        )
        rows = {row.runner_id: row for row in (await first.cluster.read_topology()).runners}
        assert declared is rows[runner.runner_id].dead
        if renewal.alive and declared:
            pytest.fail("a runner was told that it lives after it was declared dead")


async def test_a_steady_writer_does_not_starve_the_other(worlds: Worlds) -> None:
    first, second = worlds
    await first.start("r1", "r2")
    done = False

    async def flood() -> int:
        sent = 0
        while not done:
            sent += 1
            await asyncio.gather(*(first.send("r1", f"m{sent}-{number}") for number in range(10)))
        return sent

    flooding = asyncio.create_task(flood())
    try:
        for number in range(20):
            assert (await second.send("r2", f"m{number}")).status is SendStatus.DELIVERED
    except (ConflictError, DatabaseUnavailable) as error:
        pytest.fail(f"starved: {error}")
    finally:
        done = True
        assert await flooding > 0


async def test_what_one_commits_the_other_reads(worlds: Worlds) -> None:
    first, second = worlds
    runner = await first.runner()
    await second.start("r1")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)]))
    assert list(await second.journal("r1")) == [entry(1)]
    await second.deliver("r1", "m1")
    assert list(await first.runs.due_in_memory({"r1": 0})) == ["r1"]
    assert (await second.record("r1")).runner_id == runner.runner_id
    assert ShardHold(0, 1) in runner.holds
