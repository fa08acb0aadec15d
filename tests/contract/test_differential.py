"""Any sequence of storage calls has the same answers on SQLite and on PostgreSQL.

Hypothesis makes sequences of operations in symbols (run 2, runner 0, "the claim before the last one"); each side
plays them with its own claim ids and instants, and what it answers is compared with those taken out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import (
    ClaimedRun,
    Claims,
    Finish,
    Park,
    Reason,
    RunEvent,
    RunFilter,
    RunStatus,
    RunWrite,
    ShardHold,
)
from tests.contract.world import SHARDS, Runner, World, entry

RUNS = ["a", "A", "a ", "ä", "b'\"", "child"]
FAR = 4_000_000_000.0
RUNNERS = 3

Operation = tuple[Any, ...]


@dataclass
class Held:
    """A claim as its runner remembers it."""

    run_id: str
    claim_id: int
    revision: int
    next_seq: int


@dataclass
class Side:
    """One engine, and what a runner there would remember."""

    world: World
    runners: list[Runner] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    held: dict[str, list[Held]] = field(default_factory=dict)
    last: tuple[int, int, list[RunWrite]] | None = None

    async def play(self, operation: Operation) -> object:
        name, *arguments = operation
        try:
            return await getattr(self, name)(*arguments)
        except RunnerDeclaredDead:
            return "declared dead"

    # -- clients

    async def start(self, run_ids: list[str], workflow: str) -> object:
        outcomes = await self.world.start(*run_ids, workflow=workflow)
        return [
            (outcome.run_id, outcome.created, outcome.workflow, outcome.status)
            for outcome in outcomes
        ]

    async def send(self, run_id: str, message_id: str, limit: int) -> object:
        return await self.world.send(run_id, message_id, limit=limit)

    async def cancel(self, run_id: str) -> object:
        return await self.world.runs.cancel_unentered(
            run_id, batch_id=self.world.fresh_id(), reason="why"
        )

    async def release(self, run_id: str) -> object:
        return await self.world.runs.release_hold(run_id, batch_id=self.world.fresh_id())

    async def forget(self) -> object:
        return await self.world.runs.delete_finished(FAR, 100)

    # -- runners

    async def join(self, place: int, shard_ids: list[int]) -> object:
        """A new boot in a place; its predecessor there simply vanishes."""
        runner = await self.world.runner([], lease=-5.0)
        while len(self.runners) <= place:
            self.runners.append(runner)
        self.runners[place] = runner
        taken = await runner.take(shard_ids, self.dead)
        return [(hold.shard_id, hold.epoch) for hold in taken]

    async def take(self, place: int, shard_ids: list[int]) -> object:
        if place >= len(self.runners):
            return None
        return [(h.shard_id, h.epoch) for h in await self.runners[place].take(shard_ids, self.dead)]

    async def give_up(self, place: int, stale: bool) -> object:
        if place < len(self.runners):
            runner = self.runners[place]
            holds = [ShardHold(hold.shard_id, hold.epoch - stale) for hold in runner.holds]
            await self.world.cluster.release_shards(runner.runner_id, holds)
        return None

    async def kill(self, place: int, renewals: int) -> object:
        if place >= len(self.runners):
            return None
        runner = self.runners[place]
        died = await self.world.cluster.declare_dead(runner.runner_id, renewals)
        if died:
            self.dead.append(runner.runner_id)
        return died

    async def renew(self, place: int) -> object:
        if place >= len(self.runners):
            return None
        return (await self.world.cluster.renew(self.runners[place].runner_id, -5.0)).alive

    async def leave(self, place: int) -> object:
        if place < len(self.runners):
            await self.world.cluster.leave(self.runners[place].runner_id)
            self.dead.append(self.runners[place].runner_id)
        return None

    # -- runs

    async def claim(self, place: int, orphans: bool, forgetful: bool, ahead: float) -> object:
        if place >= len(self.runners):
            return None
        known = [held.claim_id for lives in self.held.values() for held in lives]
        workflows = ["tests.flow", "tests.other"] if ahead else ["tests.flow"]
        claims = await self.runners[place].claims(
            orphans=orphans, in_memory=[] if forgetful else known, workflows=workflows, ahead=ahead
        )
        return (*self._got(claims), claims.complete)

    async def lend(self, place: int, lost: bool, suspects: int | None) -> object:
        """Strays of both workflows, and what the runner has lost."""
        if place >= len(self.runners):
            return None
        known = [held.claim_id for lives in self.held.values() for held in lives]
        claims = await self.runners[place].lend_claims(
            workflows=["tests.flow", "tests.other"], lost=lost, in_memory=known, suspects=suspects
        )
        return self._got(claims)

    def _got(self, claims: Claims) -> tuple[object, ...]:
        for run in claims.runs:
            self.held.setdefault(run.run_id, []).append(
                Held(run.run_id, run.claim_id, run.revision, run.next_seq)
            )
        facts = sorted(map(claim_facts, claims.runs))
        return facts, claims.more, claims.suspects_left, list(claims.strays)

    async def commit(self, place: int, members: list[tuple[str, int, int, int, str]]) -> object:
        if place >= len(self.runners):
            return None
        writes = [write for member in members if (write := self._write(*member)) is not None]
        batch_id = self.world.fresh_id()
        self.last = (place, batch_id, writes)
        return await self._send(place, batch_id, writes)

    async def commit_again(self) -> object:
        return None if self.last is None else await self._send(*self.last)

    async def settle(self) -> object:
        if self.last is None:
            return None
        place, batch_id, writes = self.last
        return await self.runners[place].settle(*writes, batch_id=batch_id)

    async def _send(self, place: int, batch_id: int, writes: list[RunWrite]) -> object:
        verdicts = await self.runners[place].commit(*writes, batch_id=batch_id)
        for write in writes:
            for held in self.held.get(write.run_id, []):
                fresh = held.claim_id == write.claim_id and held.revision == write.revision
                if fresh and verdicts[write.run_id] in ("committed", "park-refused"):
                    held.revision += 1
                    held.next_seq += len(write.entries)
        return dict(verdicts)

    def _write(
        self, run_id: str, life: int, entries: int, off: int, outcome: str
    ) -> RunWrite | None:
        """A write by the run's latest claim, or by the one before it."""
        lives = self.held.get(run_id, [])
        if len(lives) <= life:
            return None
        held = lives[-1 - life]
        return RunWrite(
            run_id,
            held.claim_id,
            held.revision + off,
            entries=[entry(held.next_seq + number) for number in range(entries)],
            consumed=[("m1", held.next_seq)] if entries > 1 else [],
            events=[RunEvent("timer-set", 1.0)] if entries == 1 else [],
            outcome=OUTCOMES[outcome],
        )

    async def poke(self, seen: dict[str, int]) -> object:
        return sorted(await self.world.runs.due_in_memory(seen))

    # -- everything that can be seen

    async def look(self) -> object:
        runs = self.world.runs
        records = sorted(await runs.list_runs(RunFilter()), key=lambda record: record.run_id)
        mailboxes = await runs.read_mailboxes(RUNS)
        journals = await runs.read_journals(RUNS)
        topology = await self.world.cluster.read_topology()
        places = {runner.runner_id: place for place, runner in enumerate(self.runners)}
        return {
            "runs": [
                (
                    *(record.run_id, record.workflow, record.status, record.result, record.error),
                    *(
                        record.reason,
                        record.hold,
                        record.next_seq,
                        record.reclaim_count,
                        record.unread,
                        record.stray,
                    ),
                    *(
                        record.epoch,
                        record.claim_id is None,
                        record.started_at is None,
                        record.parent_id,
                    ),
                    *(
                        record.finished_at is None,
                        due(record.wake_at),
                        places.get(record.runner_id or 0),
                    ),
                )
                for record in records
            ],
            "mail": {
                run_id: (
                    box.wake_seq,
                    [(m.message_id, m.wake_seq, m.kind, m.name, m.body) for m in box.messages],
                )
                for run_id, box in sorted(mailboxes.items())
            },
            "journals": {run_id: list(journals[run_id]) for run_id in RUNS},
            "events": [
                sorted(event.type for event in await runs.read_events(run_id)) for run_id in RUNS
            ],
            "ended": sorted(await runs.read_results(RUNS)),
            "counts": dict(await runs.count_runs()),
            "runners": sorted(
                (places[r.runner_id], r.dead, r.renew_count)
                for r in topology.runners
                if r.runner_id in places
            ),
            "shards": [
                (shard.shard_id, places.get(shard.runner_id or 0), shard.epoch)
                for shard in topology.shards
            ],
        }


def claim_facts(run: ClaimedRun) -> tuple[object, ...]:
    return (
        *(run.run_id, run.epoch, run.revision, run.next_seq, run.reclaim_count, run.wake_seq),
        *(run.taken_over, run.workflow, run.payload, run.slot, run.parent_id or ""),
    )


def due(wake_at: float | None) -> str:
    if wake_at is None:
        return "never"
    return "later" if wake_at == FAR else "due"


OUTCOMES: dict[str, Park | Finish | None] = {
    "none": None,
    "timer": Park(0.0, 0, Reason.TIMER),
    "later": Park(FAR, 0, Reason.TIMER),
    "mail": Park(None, 1, Reason.SIGNAL),
    "hold": Park(0.0, 0, Reason.CRASH_LOOP),
    "done": Finish(RunStatus.SUCCEEDED, result='"ok"'),
    "failed": Finish(RunStatus.FAILED, error='{"type": "E", "message": "m"}', parent_id="a"),
    "cancelled": Finish(RunStatus.CANCELLED, reason="asked", result="1", parent_id="b'\""),
}

run_ids = st.sampled_from(RUNS)
places = st.integers(0, RUNNERS - 1)
shards = st.lists(st.integers(0, SHARDS - 1), unique=True, min_size=1).map(sorted)
members = st.tuples(
    run_ids,
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
    st.sampled_from(["none", "none", *OUTCOMES]),
)
operations = st.one_of(
    st.tuples(
        st.just("start"),
        st.lists(run_ids, min_size=1, max_size=4),
        st.sampled_from(["tests.flow", "tests.other"]),
    ),
    st.tuples(
        st.just("send"), run_ids, st.sampled_from(["m1", "m2", "M1"]), st.sampled_from([1, 100])
    ),
    st.tuples(st.just("claim"), places, st.booleans(), st.booleans(), st.sampled_from([0.0, FAR])),
    st.tuples(st.just("claim"), places, st.booleans(), st.just(False), st.just(0.0)),
    st.tuples(st.just("lend"), places, st.booleans(), st.sampled_from([None, 0, 1, 5])),
    st.tuples(
        st.just("commit"), places, st.lists(members, max_size=6, unique_by=lambda member: member[0])
    ),
    st.tuples(
        st.just("commit"),
        places,
        st.lists(members, min_size=1, max_size=6, unique_by=lambda member: member[0]),
    ),
    st.sampled_from([("commit_again",), ("settle",), ("forget",)]),
    st.tuples(st.just("join"), places, shards),
    st.tuples(st.just("take"), places, shards),
    st.tuples(st.just("give_up"), places, st.booleans()),
    st.tuples(st.just("kill"), places, st.integers(0, 1)),
    st.tuples(st.sampled_from(["renew", "leave"]), places),
    st.tuples(st.sampled_from(["cancel", "release"]), run_ids),
    st.tuples(st.just("poke"), st.dictionaries(run_ids, st.integers(0, 2))),
)
beginnings = st.just(
    [
        ("join", 0, list(range(SHARDS))),
        ("start", RUNS[:4], "tests.flow"),
        ("claim", 0, False, False, 0.0),
    ]
)
sequences = st.tuples(beginnings, st.lists(operations, max_size=25)).map(
    lambda parts: [*parts[0], *parts[1]]
)


class Pair:
    """The two sides on one event loop, made anew for each sequence; PostgreSQL's connections are kept."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.Runner()
        self.postgres = self.loop.run(World(url).open())
        self.compared = 0

    def close(self) -> None:
        self.loop.run(self.postgres.close())
        self.loop.close()

    def play(self, sequence: list[Operation]) -> None:
        self.loop.run(self._play(sequence))

    async def _play(self, sequence: list[Operation]) -> None:
        memory = World("sqlite:///:memory:")
        await memory.open()
        await self._empty()
        sqlite, postgres = Side(memory), Side(self.postgres)
        for operation in sequence:
            for step in (operation, ("look",)):
                ours, theirs = await sqlite.play(step), await postgres.play(step)
                if ours != theirs:
                    note(f"after {step}:\nSQLite     {ours}\nPostgreSQL {theirs}")
                assert ours == theirs
                self.compared += 1

    async def _empty(self) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            names = ("runs", "fences", "wakes", "steps", "messages", "run_events", "runners")
            for name in names:
                await connection.execute(f"delete from perdure_{name}")
            await connection.execute("update perdure_shards set runner_id = null, epoch = 0")
        finally:
            await connection.close()


@pytest.fixture
def pair(migrated_postgres_url: str) -> Iterator[Pair]:
    made = Pair(migrated_postgres_url)
    yield made
    made.close()


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.req("CL4")
def test_the_engines_give_the_same_answers(pair: Pair) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=QUIET, database=None)
    @given(sequences)
    def compare(sequence: list[Operation]) -> None:
        pair.play(sequence)

    compare()
    assert pair.compared > 500


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_engines_give_the_same_answers_at_length(pair: Pair) -> None:
    @settings(max_examples=800, deadline=None, suppress_health_check=QUIET, database=None)
    @given(sequences)
    def compare(sequence: list[Operation]) -> None:
        pair.play(sequence)

    compare()
