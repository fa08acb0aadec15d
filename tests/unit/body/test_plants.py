"""The replay property can fail: known mistakes, planted one at a time, are found by it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

from perdure.runtime.body import JournalMismatch
from perdure.runtime.body.body import Body
from perdure.runtime.body.loop import Handle
from perdure.runtime.body.mail import Wanted
from perdure.runtime.body.steps import Steps, StepWait
from perdure.runtime.body.task import BodyTask, Node
from perdure.storage.model import Entry, EntryKind
from tests.unit.body.bodies import check_seeded
from tests.unit.body.driving import Life, Timing, Work, call_of, replay

pytestmark = pytest.mark.req("WF5", "WF7")

SEEDS = range(80)


def found(message: str) -> None:
    """The property fails on some body, saying something like ``message``."""
    with pytest.raises(AssertionError, match=message):
        check_seeded(SEEDS)


def test_no_plant() -> None:
    check_seeded(SEEDS)


def test_delivery_not_in_recorded_order(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Body._deliver

    def swapped(self: Body) -> bool:
        at = self._position
        pair = list(self._journal[at : at + 2])
        if len(pair) == 2 and all(
            e.key in self._steps.waits and e.kind is EntryKind.STEP for e in pair
        ):
            self._journal = [*self._journal[:at], *reversed(pair), *self._journal[at + 2 :]]
        return deliver(self)

    monkeypatch.setattr(Body, "_deliver", swapped)
    found("after .* entries")


def test_two_entries_per_quiescence(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Body._deliver

    def twice(self: Body) -> bool:
        return deliver(self) and (self._position >= len(self._journal) or deliver(self))

    monkeypatch.setattr(Body, "_deliver", twice)
    found(".")


def test_cancel_not_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Body._take

    def unwritten(self: Body, wanted: Wanted) -> None:
        if wanted.by is not None:
            take(self, wanted)
            return
        self._mail.take(wanted.message)
        self.cancelled = self._cancel_known = True
        assert self._main is not None
        self._main.cancel()

    monkeypatch.setattr(Body, "_take", unwritten)
    found("after .* entries|does not wait for that|ended before entry")


def test_an_abandoned_entry_taken_for_nondeterminism(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = Body._awaited_step

    def strict(self: Body, entry: Entry) -> StepWait | None:
        wait = awaited(self, entry)
        if wait is None:
            raise JournalMismatch(f"entry {entry.seq} is not awaited")
        return wait

    monkeypatch.setattr(Body, "_awaited_step", strict)
    found("is not awaited")


def test_tasks_hashed_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyTask, "__hash__", object.__hash__)
    found("after .* entries|other input|does not wait for that|got")


def test_steps_start_during_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Body._deliver

    def eager(self: Body) -> bool:
        self._steps.settle(self._clock)
        return deliver(self)

    monkeypatch.setattr(Body, "_deliver", eager)
    found("started during replay")


def test_steps_start_before_their_past_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Body._settle

    def impatient(self: Body) -> None:
        for wait in self._steps.called.values():
            wait.barrier = 0
        settle(self)

    monkeypatch.setattr(Body, "_settle", impatient)
    found("before its past was durable")


def test_entries_before_a_due_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Body._deliver_live

    def results_first(self: Body) -> bool:
        if self._arrivals:
            self._land(self._arrivals.popleft())
            return True
        return deliver(self)

    monkeypatch.setattr(Body, "_deliver_live", results_first)
    found("was recorded before timer")


def test_attempts_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again = Steps.try_again

    def forgetful(self: Steps, wait: StepWait, failed: Entry) -> None:
        try_again(self, wait, failed)
        wait.attempt = 1

    monkeypatch.setattr(Steps, "try_again", forgetful)
    found("attempt 1 after")


# -- keys: replay in recorded order is exact even with a counter per run, so the keys themselves are compared


async def branches(life: Life) -> None:
    """Two branches of unequal speed that call the same step, also after one another."""

    async def branch(tag: str) -> None:
        for i in range(3):
            await life.work("charge", f"{tag}{i}")

    await asyncio.gather(branch("left"), branch("right"))


def keys_by_input(seed: int) -> dict[str | None, str]:
    """Which key each input got, with the delays of ``seed``."""
    holder: list[Life] = []
    life = Life(lambda _: branches(holder[0]), timing=Timing(seed=seed))
    holder.append(life)
    life.run().result()
    return {entry.input: entry.key for entry in life.entries}


def test_keys_do_not_depend_on_timing() -> None:
    assert keys_by_input(1) == {
        '"left0"': "0.0/charge#0",
        '"left1"': "0.0/charge#1",
        '"left2"': "0.0/charge#2",
        '"right0"': "0.1/charge#0",
        '"right1"': "0.1/charge#1",
        '"right2"': "0.1/charge#2",
    }
    for seed in range(2, 12):
        assert keys_by_input(seed) == keys_by_input(1)


def finished_sibling_only(seed: int) -> Life:
    """What a repair does: the entries of one branch are gone, its finished sibling's are kept and replayed."""
    holder: list[Life] = []
    first = Life(lambda _: branches(holder[0]), timing=Timing(seed=seed))
    holder.append(first)
    first.run().result()
    kept = [entry for entry in first.entries if entry.input and "right" in entry.input]
    first.entries = [Entry(**_renumbered(entry, seq)) for seq, entry in enumerate(kept, 1)]
    again = replay(lambda _: branches(holder[0]), first)
    holder[0] = again
    return again.run()


def _renumbered(entry: Entry, seq: int) -> dict[str, Any]:
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    return {**fields, "seq": seq}


def test_a_finished_sibling_replays_alone() -> None:
    for seed in range(1, 8):
        life = finished_sibling_only(seed)
        life.result()
        assert [key for key, _ in life.started] == [f"0.0/charge#{i}" for i in range(3)]


def test_occurrence_counted_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    child: Callable[[Node], Node] = Node.child

    def shared(self: Node) -> Node:
        node = child(self)
        node._counts = self._counts
        return node

    monkeypatch.setattr(Node, "child", shared)
    with pytest.raises(AssertionError):
        test_keys_do_not_depend_on_timing()
    with pytest.raises(JournalMismatch):
        test_a_finished_sibling_replays_alone()


# -- an empty Context is falsy


def test_context_changed_by_a_task_stays_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task given an empty Context keeps it from turn to turn."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []

    async def child(body: Body) -> None:
        variable.set("set")
        await body.step(call_of("a", Work("x")))  # woken by an entry, from another context
        seen.append(variable.get())

    async def main(body: Body) -> None:
        await asyncio.create_task(child(body), context=contextvars.Context())
        seen.append(variable.get())

    Life(main).run().result()
    assert seen == ["set", "unset"]

    def falsy(self: Any, callback: Any, *args: Any, context: Any = None) -> Handle:
        handle = Handle(callback, args, context or contextvars.copy_context())
        self.ready.append(handle)
        return handle

    seen.clear()
    monkeypatch.setattr("perdure.runtime.body.loop.RunLoop.call_soon", falsy)
    Life(main).run().result()
    assert seen != ["set", "unset"]
