"""Commits on PostgreSQL whose connection is lost at any moment: settled, never guessed, each entry once (R9, R10)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping

import asyncpg
import pytest

from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    StorageError,
    UnknownOutcome,
)
from perdure.storage.model import Entry, Finish, Park, Reason, RunStatus, RunWrite, Verdict
from tests.contract.world import Runner, World, entry, write
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until
from tests.integration.postgres_world import (
    backends_at,
    foreign,
    migrated_database,
    waiting_for_lock,
    world_of,
)

pytestmark = pytest.mark.req("CL11")


@pytest.fixture
def url(postgres: PrivatePostgres) -> Iterator[str]:
    postgres.start()
    made = migrated_database(postgres)
    yield made
    postgres.start()
    postgres.drop_database(made.rpartition("/")[2])


@pytest.fixture
async def proxy(postgres: PrivatePostgres) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(postgres.port) as running:
        yield running


async def settle(runner: Runner, *writes: RunWrite, batch_id: int) -> Mapping[str, Verdict]:
    """As a committer does it: asked again while the database is away."""

    async def verdicts() -> Mapping[str, Verdict] | None:
        with contextlib.suppress(DatabaseUnavailable):
            return await runner.settle(*writes, batch_id=batch_id)
        return None

    found = await until(verdicts, what="settlement", deadline=15.0)
    assert found is not None
    return found


async def claimed(world: World, *run_ids: str) -> tuple[Runner, dict[str, RunWrite]]:
    """A runner that has claimed these runs, and a first write of each."""
    runner = await world.runner(lease=60.0)
    await world.start(*run_ids)
    runs = await runner.claim()
    return runner, {run_id: write(runs[run_id], entries=[entry(1)]) for run_id in run_ids}


# ---- each entry once --------------------------------------------------------------------------


async def _lose_connections(url: str, proxy: PostgresProxy, stop: asyncio.Event) -> None:
    """At random moments end the backends that have commits, or cut the connections under them."""
    chance = random.Random(5)
    connection = await asyncpg.connect(url)
    try:
        while not stop.is_set():
            await asyncio.sleep(chance.uniform(0.0, 0.06))
            if chance.random() < 0.5:
                proxy.cut_all()
                continue
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and query like '-- name: commit%' and pid <> pg_backend_pid()"
            )
    finally:
        await connection.close()


@pytest.mark.req("CL4")
async def test_connections_lost_at_random_moments_lose_and_double_nothing(
    proxy: PostgresProxy, url: str
) -> None:
    """Two lanes of batches; the outcome of each cut one is read, and it is sent again only if it is not there."""
    seen: Counter[str] = Counter()
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner = await world.runner(lease=120.0)
        lanes = [[f"{lane}-{n}" for n in range(8)] for lane in "ab"]
        await world.start(*lanes[0], *lanes[1])
        runs = await runner.claim()
        written: dict[str, int] = {}

        async def lane(run_ids: list[str]) -> None:
            for seq in range(1, 1_000):
                if seq > 12 and {"settled again", "settled committed"} <= seen.keys():
                    return
                batch_id = world.fresh_id()
                todo = [
                    write(runs[r], revision=runs[r].revision + seq - 1, entries=[entry(seq)])
                    for r in run_ids
                ]
                while todo:
                    try:
                        verdicts = await runner.commit(*todo, batch_id=batch_id)
                    except UnknownOutcome:
                        verdicts = await settle(runner, *todo, batch_id=batch_id)
                        seen.update(
                            f"settled {verdict.value}" for verdict in set(verdicts.values())
                        )
                    except DatabaseUnavailable:
                        seen["known before sending"] += 1
                        continue
                    assert set(verdicts.values()) <= {Verdict.COMMITTED, Verdict.AGAIN}
                    todo = [w for w in todo if verdicts[w.run_id] is Verdict.AGAIN]
                written.update(dict.fromkeys(run_ids, seq))

        stop = asyncio.Event()
        killer = asyncio.create_task(_lose_connections(url, proxy, stop))
        try:
            await asyncio.gather(*(lane(run_ids) for run_ids in lanes))
        finally:
            stop.set()
            await killer
        for run_id in runs:
            seqs = [e.seq for e in await world.journal(run_id)]
            assert seqs == list(range(1, written[run_id] + 1))
            record = await world.record(run_id)
            assert record.next_seq == written[run_id] + 1
            assert record.claim_id == runs[run_id].claim_id
    assert {"settled again", "settled committed"} <= seen.keys(), seen


KINDS = {
    "step": (None, Verdict.COMMITTED),
    "park": (Park(None, 0, Reason.SIGNAL), Verdict.PARKED),
    "finish": (Finish(RunStatus.SUCCEEDED, result="1"), Verdict.COMMITTED),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lost_answer_of_a_commit_is_found(
    proxy: PostgresProxy, url: str, kind: str
) -> None:
    outcome, expected = KINDS[kind]
    async with world_of(url) as near, world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner, writes = await claimed(world, "r1")
        sent = RunWrite(
            "r1", writes["r1"].claim_id, writes["r1"].revision, [entry(1)], outcome=outcome
        )
        rule = proxy.cut(name="commit", where="after_commit")
        with pytest.raises(UnknownOutcome):
            await runner.commit(sent, batch_id=5)
        assert rule.happened.is_set()
        assert await runner.settle(sent, batch_id=5) == {"r1": expected}
        assert len(await near.journal("r1")) == 1


# ---- the ghost --------------------------------------------------------------------------------


BLOCKS = {
    "before its rows": "lock table perdure_steps in exclusive mode",
    "with its rows locked": (
        "insert into perdure_steps (run_id, seq, step_key, kind, status, claim_id, at)"
        " values ('r1', 1, 'k', 'step', 'ok', 1, now())"
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_ghost_that_waits_for_a_lock_is_ended_before_the_verdict(
    proxy: PostgresProxy, url: str, kind: str, block: str
) -> None:
    """Its client is gone, and it would still commit when the lock is free."""
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner, writes = await claimed(world, "r0", "r1", "r2")
        first, *sent = [
            RunWrite(w.run_id, w.claim_id, w.revision, w.entries, outcome=KINDS[kind][0])
            for w in writes.values()
        ]
        await runner.commit(first)  # so that the statement is prepared
        async with foreign(url, BLOCKS[block]):
            proxy.cut(
                name="commit", where="lock_wait", when=lambda _: waiting_for_lock(url, "commit")
            )
            with pytest.raises(UnknownOutcome):
                await runner.commit(*sent, batch_id=5)
            assert await backends_at(url, "commit") != []
            verdicts = await runner.settle(*sent, batch_id=5)
            assert await backends_at(url, "commit") == []
        assert verdicts == {"r1": Verdict.AGAIN, "r2": Verdict.AGAIN}
        verdicts = await runner.commit(*sent, batch_id=5)
        assert set(verdicts.values()) == {KINDS[kind][1]}
        assert len(await world.journal("r1")) == 1


@pytest.mark.req("CL4")
async def test_a_lost_claim_is_over_before_the_next_one(proxy: PostgresProxy, url: str) -> None:
    """It knows only what was in memory when it was sent, and would claim anew what was got since."""
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner = await world.runner(lease=60.0)
        await world.start("r0")
        await runner.claim()  # so that the statement is prepared
        await world.start("r1")
        async with foreign(url, "lock table perdure_wakes in exclusive mode"):
            proxy.cut(
                name="claim", where="lock_wait", when=lambda _: waiting_for_lock(url, "claim")
            )
            with pytest.raises(UnknownOutcome):
                await runner.claim()
            ghosts = set(await backends_at(url, "claim"))
            assert ghosts
            again = asyncio.create_task(runner.claim())

            async def replaced() -> bool:
                waiting = set(await backends_at(url, "claim"))
                return bool(waiting) and not waiting & ghosts

            await until(replaced, what="the lost claim's end")
        assert "r1" in await again


@pytest.mark.parametrize("written", [False, True])
async def test_a_foreign_lock_on_a_fence_leaves_no_settlement_open(
    proxy: PostgresProxy, url: str, written: bool
) -> None:
    """Once the session that had the batch is gone, nobody can write it any more, whoever has its rows locked. Else one
    such row would keep the outcome of the whole batch, and with it all of its runs, waiting."""
    settings = {"lock_timeout": 0.2, "deadline": 2.0}
    near, far = world_of(url, **settings), world_of(proxy.url(url.rpartition("/")[2]), **settings)
    async with near as other, far as world:
        runner, writes = await claimed(world, "r1", "r2")
        proxy.cut(name="commit", where="after_commit" if written else "before")
        with pytest.raises(UnknownOutcome):
            await runner.commit(*writes.values(), batch_id=5)
        lock = "select 1 from perdure_fences where run_id = 'r2' for update"
        async with foreign(url, lock):
            verdicts = await runner.settle(*writes.values(), batch_id=5)
            expected = Verdict.COMMITTED if written else Verdict.AGAIN
            assert verdicts == {"r1": expected, "r2": expected}
            with pytest.raises(DatabaseUnavailable, match="'r2' is locked"):  # who never knew it
                await other.runs.settle_writes(runner.runner_id, 5, list(writes.values()))


async def test_settlement_of_a_server_that_is_away_says_so_until_it_is_back(
    postgres: PrivatePostgres, url: str
) -> None:
    async with world_of(url) as world:
        runner, writes = await claimed(world, "r1")
        async with foreign(url, "lock table perdure_steps in exclusive mode"):
            sending = asyncio.create_task(runner.commit(*writes.values(), batch_id=5))
            await waiting_for_lock(url, "commit")
            postgres.stop("immediate")
            with pytest.raises(UnknownOutcome):
                await sending
            with pytest.raises(DatabaseUnavailable, match="nothing listens"):
                await runner.settle(*writes.values(), batch_id=5)
            with pytest.raises(DatabaseUnavailable):
                await runner.commit(*writes.values(), batch_id=6)
            postgres.start()
        assert await runner.settle(*writes.values(), batch_id=5) == {"r1": Verdict.AGAIN}
        assert await runner.commit(*writes.values(), batch_id=5) == {"r1": Verdict.COMMITTED}


# ---- deadlines and cancellation ---------------------------------------------------------------


async def test_a_cancelled_caller_does_not_touch_the_statement(url: str) -> None:
    """The entry is committed and the connection serves on, the same backend as before."""
    async with world_of(url) as world:
        runner, writes = await claimed(world, "r1")
        async with foreign(url, "lock table perdure_steps in exclusive mode"):
            sending = asyncio.create_task(runner.commit(*writes.values()))
            pid = await waiting_for_lock(url, "commit")
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert await backends_at(url, "commit") == [pid]
        assert (await until_journal(world, "r1"))[0].seq == 1
        second = write_after(writes["r1"])
        async with foreign(url, "lock table perdure_steps in exclusive mode"):
            sending = asyncio.create_task(runner.commit(second))
            assert await waiting_for_lock(url, "commit") == pid
        assert await sending == {"r1": Verdict.COMMITTED}


def write_after(first: RunWrite) -> RunWrite:
    return RunWrite(first.run_id, first.claim_id, first.revision + 1, [entry(2)])


async def until_journal(world: World, run_id: str) -> list[Entry]:
    async def found() -> list[Entry]:
        return list(await world.journal(run_id))

    return await until(found, what=f"a journal of {run_id}")


async def test_closing_waits_for_a_statement_under_way(url: str) -> None:
    async with world_of(url) as world:
        runner, writes = await claimed(world, "r1")
        async with foreign(url, "lock table perdure_steps in exclusive mode"):
            sending = asyncio.create_task(runner.commit(*writes.values()))
            await waiting_for_lock(url, "commit")
            closing = asyncio.create_task(world.runs.close())
            await asyncio.sleep(0)
            assert not closing.done()
        await closing
        assert await sending == {"r1": Verdict.COMMITTED}


async def test_a_statement_the_server_gives_up_has_a_known_outcome(url: str) -> None:
    async with world_of(url, deadline=1.0) as world:
        runner, writes = await claimed(world, "r1")
        async with foreign(url, "lock table perdure_steps in exclusive mode"):
            with pytest.raises(ConflictError, match="try again"):
                await runner.commit(*writes.values(), batch_id=5)
        assert await world.journal("r1") == []
        assert await runner.commit(*writes.values(), batch_id=5) == {"r1": Verdict.COMMITTED}


async def test_a_silent_connection_is_cut_at_the_deadline_and_never_used_again(
    proxy: PostgresProxy, url: str
) -> None:
    async with world_of(proxy.url(url.rpartition("/")[2]), deadline=1.0) as world:
        runner, writes = await claimed(world, "r1")
        proxy.hang(name="commit", where="answer")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(UnknownOutcome):
            await runner.commit(*writes.values(), batch_id=5)
        assert 0.9 < asyncio.get_running_loop().time() - begun < 3.0
        assert await runner.settle(*writes.values(), batch_id=5) == {"r1": Verdict.COMMITTED}
        proxy.hang(name="mailbox", where="answer")
        with pytest.raises(DatabaseUnavailable):  # a read has no outcome to settle
            await world.mailbox("r1")
        assert await world.mailbox("r1") == []


# ---- the other writes -------------------------------------------------------------------------


async def test_starts_and_messages_of_unknown_outcome_are_settled_by_sending_again(
    proxy: PostgresProxy, url: str
) -> None:
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runs = [world.new_run("r1"), world.new_run("r2")]
        proxy.cut(name="start", where="after_commit")
        with pytest.raises(UnknownOutcome):
            await world.runs.start_runs(runs)
        assert [outcome.created for outcome in await world.runs.start_runs(runs)] == [True, True]
        assert [o.created for o in await world.start("r1", "r2")] == [False, False]
        proxy.cut(name="signal", where="after_commit")
        with pytest.raises(UnknownOutcome):
            await world.send("r1", "m1")
        await world.send("r1", "m1")
        assert await world.mailbox("r1") == ["m1"]
        assert await world.wake_seq("r1") == 1
        proxy.cut(name="cancel_unentered", where="after_commit")
        with pytest.raises(UnknownOutcome):
            await world.runs.cancel_unentered("r2", batch_id=9, reason="no")
        assert await world.runs.cancel_unentered("r2", batch_id=9, reason="no")
        assert not await world.runs.cancel_unentered("r2", batch_id=10, reason="no")
        assert (await world.record("r2")).reason == "no"


async def test_a_start_whose_second_half_is_lost_is_unknown_and_not_unwritten(
    proxy: PostgresProxy, url: str
) -> None:
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        await world.start("r1")
        runs = [world.new_run("r1"), world.new_run("r2")]
        proxy.cut(name="find_runs", where="before")
        with pytest.raises(UnknownOutcome):
            await world.runs.start_runs(runs)
        assert [outcome.created for outcome in await world.runs.start_runs(runs)] == [False, True]


async def test_a_commit_whose_second_half_is_lost_is_unknown_and_not_unwritten(
    proxy: PostgresProxy, url: str
) -> None:
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner, writes = await claimed(world, "r1", "r2")
        stale = RunWrite("r2", writes["r2"].claim_id + 1, writes["r2"].revision, [entry(1)])
        proxy.cut(name="settle_rest", where="before")
        with pytest.raises(UnknownOutcome):
            await runner.commit(writes["r1"], stale, batch_id=5)
        verdicts = await runner.settle(writes["r1"], stale, batch_id=5)
        assert verdicts == {"r1": Verdict.COMMITTED, "r2": Verdict.FENCED}


async def test_a_claim_of_unknown_outcome_is_found_as_an_orphan_of_my_own(
    proxy: PostgresProxy, url: str
) -> None:
    async with world_of(proxy.url(url.rpartition("/")[2])) as world:
        runner = await world.runner(lease=60.0)
        await world.start("r1")
        proxy.cut(name="claim", where="after_commit")
        with pytest.raises(UnknownOutcome):
            await runner.claim()
        assert await runner.claim() == {}
        found = await runner.claim_one("r1", orphans=True)
        assert not found.taken_over
        assert found.reclaim_count == 0


async def test_no_error_of_a_cut_connection_names_the_password(
    proxy: PostgresProxy, url: str
) -> None:
    through = proxy.url(url.rpartition("/")[2]).replace("postgres@", "postgres:battery@")
    assert "battery" not in repr(DatabaseSettings(through))
    async with world_of(through) as world:
        runner, writes = await claimed(world, "r1")
        proxy.cut(name="commit", where="before")
        with pytest.raises(StorageError) as caught:
            await runner.commit(*writes.values(), batch_id=5)
        assert "battery" not in str(caught.value)
        assert "postgres:***@127.0.0.1" in str(caught.value)
