"""The committer against every answer a store can give.

The store here is a script of answers: what the real engines answer is proved by the contract suite; this proves what
the committer makes of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest

from perdure.runtime.engine.committer import Answer, Committer
from perdure.storage.clock import SeededRandomness
from perdure.storage.errors import (
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    RunnerDeclaredDead,
    UnknownOutcome,
)
from perdure.storage.interface import RunStore
from perdure.storage.model import Entry, EntryKind, RunWrite, Verdict
from tests.harness.waiting import until

Script = list[Any]


class ScriptedStore:
    """Answers commits and settlements from a script; when it is used up everything commits."""

    def __init__(self, script: Script, seconds: float = 0.0) -> None:
        self.script = script
        self.seconds = seconds
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.batches: set[int] = set()

    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        answer: Mapping[str, Verdict] = self._answer("commit", batch_id, writes)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return answer

    async def settle_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        assert batch_id in self.batches, "settles the batch that was sent"
        answer: Mapping[str, Verdict] = self._answer("settle", batch_id, writes)
        return answer

    def _answer(self, what: str, batch_id: int, writes: Sequence[RunWrite]) -> Any:
        ids = tuple(w.run_id for w in writes)
        self.calls.append((what, ids))
        self.batches.add(batch_id)
        answer = self.script.pop(0) if self.script else {}
        if callable(answer):
            answer = answer(ids)
        if isinstance(answer, Exception):
            raise answer
        return {run_id: answer.get(run_id, Verdict.COMMITTED) for run_id in ids}


@asynccontextmanager
async def committing(script: Script, seconds: float = 0.0):
    """seconds: that a commit takes."""
    store = ScriptedStore(script, seconds)
    died = asyncio.Event()

    async def may_write() -> None: ...

    committer = Committer(
        cast(RunStore, store),
        7,
        SeededRandomness(1),
        may_write=may_write,
        declared_dead=died.set,
    )
    task = asyncio.create_task(committer.run())
    answers: dict[str, Answer] = {}
    try:
        yield committer, store, answers, died
    finally:
        task.cancel()


def write(run_id: str) -> RunWrite:
    return RunWrite(run_id, 1, 1, entries=[Entry(1, EntryKind.STEP, "0/a#0", 1.0)])


async def settle_all(
    committer: Committer, store: ScriptedStore, answers: dict[str, Answer], ids: str
) -> None:
    all_in = asyncio.Event()

    def done(run_id: str, answer: Answer, batch_id: int) -> None:
        assert run_id not in answers, "one verdict per write"
        assert batch_id in store.batches, "told of the batch that carried it"
        answers[run_id] = answer
        if len(answers) == len(ids):
            all_in.set()

    for run_id in ids:
        committer.submit(write(run_id), partial(done, run_id))
    await asyncio.wait_for(all_in.wait(), 5)


async def test_every_member_gets_its_own_verdict() -> None:
    script: Script = [{"b": Verdict.FENCED, "c": Verdict.PARK_REFUSED}]
    async with committing(script) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "abc")
        assert answers == {
            "a": Verdict.COMMITTED,
            "b": Verdict.FENCED,
            "c": Verdict.PARK_REFUSED,
        }
        assert len(store.calls) == 1


async def test_a_locked_member_is_sent_again_alone() -> None:
    async with committing([{"b": Verdict.AGAIN}]) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "abc")
        assert [ids for _, ids in store.calls] == [("a", "b", "c"), ("b",)]
        assert set(answers.values()) == {Verdict.COMMITTED}


@pytest.mark.req("CL11")
async def test_an_unknown_outcome_is_settled_until_the_database_answers() -> None:
    script: Script = [
        UnknownOutcome("cut"),
        DatabaseUnavailable("away"),
        {"a": Verdict.COMMITTED, "b": Verdict.AGAIN},
    ]
    async with committing(script) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "ab")
        assert [what for what, _ in store.calls] == ["commit", "settle", "settle", "commit"]
        assert store.calls[-1][1] == ("b",)


@pytest.mark.req("CL11")
async def test_a_database_that_is_away_gets_the_same_batch_again() -> None:
    script: Script = [DatabaseUnavailable("away"), DatabaseUnavailable("away")]
    async with committing(script) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "ab")
        assert store.calls == [("commit", ("a", "b"))] * 3


async def test_refused_data_is_halved_until_the_culprit_is_alone() -> None:
    def refuse(ids: tuple[str, ...]) -> Any:
        return DataRefused("NUL in text") if "e" in ids else {}

    async with committing([refuse] * 20) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "abcdefgh")
        assert isinstance(answers.pop("e"), DataRefused)
        assert set(answers.values()) == {Verdict.COMMITTED}


async def test_what_is_too_much_for_one_statement_is_sent_in_parts() -> None:
    """A commit that outlasts its deadline would do so at every try."""

    def too_much(ids: tuple[str, ...]) -> Any:
        return ConflictError("statement time-out") if len(ids) > 2 else {}

    async with committing([too_much] * 20) as (committer, store, answers, _):
        await settle_all(committer, store, answers, "abcdefgh")
        assert [len(ids) for _, ids in store.calls] == [8, 4, 2, 2, 4, 2, 2]


async def test_a_write_that_times_out_stops_nobody_else() -> None:
    """Not those beside it, and not those that come later: from then on it is sent alone until it commits."""
    locked = True

    def wait_for_e(ids: tuple[str, ...]) -> Any:
        return ConflictError("lock time-out") if locked and "e" in ids else {}

    async with committing([wait_for_e] * 100) as (committer, store, answers, _):
        tell = lambda run_id: partial(lambda i, answer, _: answers.update({i: answer}), run_id)  # noqa: E731
        for run_id in "abcdefgh":
            committer.submit(write(run_id), tell(run_id))
        await until(lambda: len(answers) == 7, what="the others committed", deadline=5)
        await until(lambda: store.calls.count(("commit", ("e",))) > 2, what="tried again and again")
        beside = len(store.calls)
        for number in range(20):
            committer.submit(write(f"later {number}"), tell(f"later {number}"))
            heard = partial(answers.__contains__, f"later {number}")
            await until(heard, what="a later one committed")
        assert all(ids == ("e",) or "e" not in ids for _, ids in store.calls[beside:])
        locked = False
        await until(lambda: "e" in answers, what="it is committed at last", deadline=5)
        assert set(answers.values()) == {Verdict.COMMITTED}


@pytest.mark.req("CL4")
async def test_a_declared_dead_runner_sends_nothing_more() -> None:
    async with committing([RunnerDeclaredDead("dead")]) as (committer, store, answers, died):
        committer.submit(write("a"), lambda answer, _: answers.setdefault("a", answer))
        await asyncio.wait_for(died.wait(), 5)
        committer.submit(write("b"), lambda answer, _: answers.setdefault("b", answer))
        for _ in range(10):
            await asyncio.sleep(0)
        assert answers == {}
        assert store.calls == [("commit", ("a",))]


async def test_small_writes_do_not_wait_for_a_large_one() -> None:
    """The large one's statement is still under way when later small ones have committed, each batch on its own."""
    released = asyncio.Event()
    told: list[str] = []

    class SlowForLarge(ScriptedStore):
        async def commit_writes(
            self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
        ) -> Mapping[str, Verdict]:
            answer = await super().commit_writes(runner_id, batch_id, writes)
            if any(write.run_id == "large" for write in writes):
                await released.wait()
            return answer

    store = SlowForLarge([])

    async def may_write() -> None: ...

    committer = Committer(
        cast(RunStore, store),
        7,
        SeededRandomness(1),
        may_write=may_write,
        declared_dead=lambda: None,
    )
    task = asyncio.create_task(committer.run())
    big = Entry(1, EntryKind.STEP, "0/a#0", 1.0, output="x" * 70_000)
    committer.submit(RunWrite("large", 1, 1, entries=[big]), lambda *_: told.append("large"))
    for name in "abc":
        committer.submit(write(name), lambda *_, name=name: told.append(name))
        await until(partial(told.__contains__, name), what=f"{name} committed", deadline=5)
    assert told == ["a", "b", "c"]
    released.set()
    await until(lambda: "large" in told, what="the large one committed", deadline=5)
    assert [ids for _, ids in store.calls] == [("large",), ("a",), ("b",), ("c",)]
    task.cancel()


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0, [40, 20, 20]), (0.1, [40, 40])])
async def test_runs_that_are_in_step_are_told_in_two_halves(
    seconds: float, sizes: list[int]
) -> None:
    """So that the writes of one half are under way while the other goes on; not where the server is the slower one."""
    async with committing([], seconds=seconds) as (committer, store, _, _):
        over = asyncio.Event()
        ended: list[str] = []

        def ends(run_id: str, answer: Answer, batch_id: int) -> None:
            ended.append(run_id)
            if len(ended) == 40:
                over.set()

        def goes_on(run_id: str, answer: Answer, batch_id: int) -> None:
            committer.submit(write(run_id), partial(ends, run_id))

        for n in range(40):
            committer.submit(write(f"{n:02}"), partial(goes_on, f"{n:02}"))
        await asyncio.wait_for(over.wait(), 5)
        assert [len(ids) for _, ids in store.calls] == sizes


async def test_what_waits_leaves_before_the_last_batch_goes_on() -> None:
    sent: list[tuple[str, ...]] = []
    told: dict[str, int] = {}

    def tell(run_id: str, answer: Answer, batch_id: int) -> None:
        told[run_id] = len(sent)

    def note(ids: tuple[str, ...]) -> Mapping[str, Verdict]:
        if not sent:  # while the first batch is under way
            committer.submit(write("b"), partial(tell, "b"))
        sent.append(ids)
        return {}

    async with committing([note, note]) as (committer, _, _, _):
        committer.submit(write("a"), partial(tell, "a"))
        await until(lambda: len(told) == 2, what="both are told")
        assert sent == [("a",), ("b",)]
        assert told == {"a": 2, "b": 2}
