"""Hints between processes: sent or noticed, never from oneself (R5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint, HintKind
from tests.contract.world import World
from tests.harness.waiting import until

Worlds = tuple[World, World]


class Ear:
    """A channel and what it heard."""

    def __init__(self, channel: HintChannel) -> None:
        self.channel = channel
        self.heard: list[Hint] = []

    def receive(self, hints: Sequence[Hint]) -> None:
        self.heard += hints

    def knows_of(self, run_id: str) -> bool:
        """A hint about that run, or one that may be about anything."""
        return any(hint.kind is HintKind.ANY or hint.run_id == run_id for hint in self.heard)


@pytest.fixture
async def ears(worlds: Worlds) -> AsyncIterator[tuple[Ear, Ear]]:
    pair = Ear(worlds[0].database.hints()), Ear(worlds[1].database.hints())
    for ear in pair:
        await ear.channel.open(ear.receive)
    yield pair
    for ear in pair:
        await ear.channel.close()


async def test_a_change_of_another_process_is_heard(worlds: Worlds, ears: tuple[Ear, Ear]) -> None:
    mine, theirs = ears
    await worlds[0].start("r1")
    mine.channel.send([Hint(HintKind.WAKE, "r1", 7)])
    await until(lambda: theirs.knows_of("r1"), what="a hint about r1", deadline=5.0)


async def test_ones_own_change_is_not_heard(worlds: Worlds, ears: tuple[Ear, Ear]) -> None:
    mine, theirs = ears
    first, second = worlds
    for number in range(5):
        await first.start(f"r{number}")
        mine.channel.send([Hint(HintKind.START, f"r{number}", 7)])
    await first.runner()
    await until(lambda: bool(theirs.heard), what="a hint in the other process", deadline=5.0)
    # A change of the other side that comes after them is the first thing heard here.
    assert mine.heard == []
    await second.start("late")
    theirs.channel.send([Hint(HintKind.START, "late", 7)])
    await until(lambda: bool(mine.heard), what="a hint back", deadline=5.0)
    assert mine.knows_of("late")
    assert [hint.run_id for hint in mine.heard if hint.kind is not HintKind.ANY] in ([], ["late"])


async def test_every_kind_gets_through_in_any_number(worlds: Worlds, ears: tuple[Ear, Ear]) -> None:
    mine, theirs = ears
    await worlds[0].start("odd ' \" 🏁\n,;")
    sent = [
        Hint(HintKind.START, "", 0),
        Hint(HintKind.WAKE, "odd ' \" 🏁\n,;", 65_535),
        Hint(HintKind.DONE, "x" * 200, 3),
        Hint(HintKind.SHARDS),
        *(Hint(HintKind.DONE, f"run-{number}" + "y" * 150, number) for number in range(300)),
    ]
    mine.channel.send(sent)
    mine.channel.send([])

    def arrived() -> bool:
        if worlds[0].runs.capabilities.pushes_hints:
            return set(sent) <= set(theirs.heard)
        return any(hint.kind is HintKind.ANY for hint in theirs.heard)

    await until(arrived, what="all hints", deadline=5.0)


async def test_silence_when_nothing_changes(worlds: Worlds, ears: tuple[Ear, Ear]) -> None:
    mine, theirs = ears
    await worlds[0].start("r1")
    mine.channel.send([Hint(HintKind.START, "r1", 1)])
    await until(lambda: bool(theirs.heard), what="the first hint", deadline=5.0)
    theirs.heard.clear()
    await worlds[1].runs.read_run("r1")
    await worlds[1].start("r2")
    theirs.channel.send([Hint(HintKind.START, "r2", 1)])
    await until(lambda: bool(mine.heard), what="the answer", deadline=5.0)
    assert theirs.heard == []


async def test_a_closed_channel_swallows_hints(world: World) -> None:
    channel = world.database.hints()
    channel.send([Hint(HintKind.ANY)])
    ear = Ear(channel)
    await channel.open(ear.receive)
    channel.send([Hint(HintKind.SHARDS)])
    await channel.close()
    channel.send([Hint(HintKind.ANY)])
    await channel.close()
    assert ear.heard == []
