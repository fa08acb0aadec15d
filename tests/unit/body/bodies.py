"""Random bodies and the property that replay of each is exact (R4, R13, R14).

A body is a tree of asyncio's constructs over steps that all have one of two names. It notes what it sees. Whatever
entry a life is cut at, the next life's notes begin with the first one's, up to what followed from that entry.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from perdure.runtime.body import Body, MessageWait
from perdure.storage.model import EntryKind
from tests.unit.body.driving import Life, Sent, Timing, replay

Program = tuple[Any, ...]
"""Name of an `Interpreter` method, then its arguments; programs among them."""

Delays = tuple[int, float, tuple[float, ...]]
"""Seed of the delays, slice length, choice of commit times."""

LAST_CANCEL = Sent(300.0, "cancel")
WHENS = (asyncio.FIRST_COMPLETED, asyncio.ALL_COMPLETED, asyncio.FIRST_EXCEPTION)
SENT_AT = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0)
SENT_NAMES = ("a", "b", "a", "b", "cancel")
SLICES = (float("inf"), 0.005, -1.0)
"""Seconds; -1: back to the host after each entry and every few callbacks."""
COMMITS = ((0.0,), (0.0, 0.1, 1.0), (0.3, 2.0, 5.0))


class Interpreter:
    """Runs a program as a body and notes everything it can see."""

    def __init__(self) -> None:
        self.life: Life

    def main_of(self, program: Program) -> Callable[[Body], Any]:
        return lambda body: self.run(program, "")

    async def run(self, program: Program, tag: str) -> None:
        kind, *arguments = program
        try:
            await getattr(self, kind)(tag, *arguments)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.life.note(tag, "raises", type(error).__name__)
            raise

    def each(self, programs: Sequence[Program], tag: str) -> list[Any]:
        return [self.run(program, f"{tag}.{i}") for i, program in enumerate(programs)]

    def tasks(self, programs: Sequence[Program], tag: str) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(coroutine) for coroutine in self.each(programs, tag)]

    # -- leaves
    async def step(self, tag: str, name: str, seconds: float, mode: str) -> None:
        result = await self.life.work(name, tag, mode, seconds)
        assert result == f"r({tag})", f"step of {tag} got {result}"
        self.life.note(tag, result)

    async def sleep(self, tag: str, seconds: float) -> None:
        before = self.life.body.now()
        await asyncio.sleep(seconds)
        assert self.life.body.now() >= before + seconds, f"{tag} woke early"
        self.life.note(tag, "slept")

    async def nap(self, tag: str, seconds: float) -> None:
        before = self.life.body.now()
        await self.life.body.sleep(seconds, "nap")
        assert self.life.body.now() >= before + seconds, f"{tag} woke early"
        self.life.note(tag, "napped")

    async def signal(self, tag: str, name: str, timeout: float | None) -> None:
        got = await self.life.body.wait_message(MessageWait(name, str, timeout))
        self.life.note(tag, name, got)

    async def fail(self, tag: str) -> None:
        raise KeyError(tag)

    async def spin(self, tag: str, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)

    # -- constructs
    async def seq(self, tag: str, programs: Sequence[Program]) -> None:
        for i, program in enumerate(programs):
            await self.run(program, f"{tag}.{i}")

    async def loop(self, tag: str, times: int, program: Program) -> None:
        for i in range(times):
            await self.run(program, f"{tag}@{i}")

    async def gather(self, tag: str, programs: Sequence[Program], catch: bool) -> None:
        results = await asyncio.gather(*self.each(programs, tag), return_exceptions=catch)
        self.life.note(tag, "gathered", [type(result).__name__ for result in results])

    async def group(self, tag: str, programs: Sequence[Program]) -> None:
        async with asyncio.TaskGroup() as group:
            for coroutine in self.each(programs, tag):
                group.create_task(coroutine)

    async def race(
        self, tag: str, programs: Sequence[Program], when: str, timeout: float | None, cancel: bool
    ) -> None:
        tasks = set(self.tasks(programs, tag))
        done, pending = await asyncio.wait(tasks, return_when=when, timeout=timeout)
        self.life.note(tag, "raced", [task.get_name() for task in done])
        for task in pending:
            if cancel:
                task.cancel()
        for task in pending:
            try:
                await task
            except Exception as error:
                self.life.note(tag, "loser", type(error).__name__)
        for task in done:
            await self.step(f"{tag}+{task.get_name()}", "a", 1.0, "ok")

    async def first(self, tag: str, programs: Sequence[Program], timeout: float | None) -> None:
        for future in asyncio.as_completed(self.tasks(programs, tag), timeout=timeout):
            await future
            self.life.note(tag, "one more")

    async def timeout(self, tag: str, seconds: float, program: Program) -> None:
        async with asyncio.timeout(seconds):
            await self.run(program, f"{tag}t")

    async def wait_for(self, tag: str, seconds: float, program: Program) -> None:
        await asyncio.wait_for(self.run(program, f"{tag}w"), seconds)

    async def shield(self, tag: str, seconds: float, program: Program) -> None:
        await asyncio.wait_for(asyncio.shield(self.run(program, f"{tag}s")), seconds)

    async def attempt(self, tag: str, program: Program, handler: Program, finish: Program) -> None:
        try:
            await self.run(program, f"{tag}b")
        except (Exception, asyncio.CancelledError) as error:
            self.life.note(tag, "caught", type(error).__name__)
            await self.run(handler, f"{tag}h")
        finally:
            self.life.note(tag, "finally")
            await self.run(finish, f"{tag}f")

    async def semaphore(self, tag: str, places: int, programs: Sequence[Program]) -> None:
        semaphore = asyncio.Semaphore(places)

        async def limited(i: int, program: Program) -> None:
            async with semaphore:
                await self.run(program, f"{tag}.{i}")

        await asyncio.gather(*(limited(i, program) for i, program in enumerate(programs)))

    async def queue(self, tag: str, programs: Sequence[Program]) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def producer(i: int, program: Program) -> None:
            await self.run(program, f"{tag}.{i}")
            await queue.put(i)

        producers = [asyncio.create_task(producer(i, p)) for i, p in enumerate(programs)]
        async with asyncio.timeout(9):
            self.life.note(tag, "queued", [await queue.get() for _ in producers])

    async def generator(
        self, tag: str, programs: Sequence[Program], stop: int, close: bool
    ) -> None:
        async def numbers() -> AsyncGenerator[int, None]:
            try:
                for i, program in enumerate(programs):
                    await self.run(program, f"{tag}.{i}")
                    yield i
            finally:
                self.life.note(tag, "generator out")

        if not close:
            async for i in numbers():
                if i == stop:
                    break
            return
        async with aclosing(numbers()) as iterator:
            async for i in iterator:
                if i == stop:
                    break

    async def forget(self, tag: str, program: Program) -> None:
        asyncio.create_task(self.run(program, f"{tag}z"))  # noqa: RUF006


def guarded(program: Program) -> Program:
    return ("attempt", program, ("step", "h", 1.0, "ok"), ("step", "f", 0.0, "ok"))


class BigProgram:
    """Larger than hypothesis likes to draw; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def make(self, depth: int = 4) -> Program:
        both: Program = ("gather", [guarded(self.grow(depth - 1)), guarded(self.grow(depth))], True)
        return ("seq", [guarded(self.grow(depth)), guarded(both)])

    def seconds(self) -> float:
        return self.rng.choice((0.0, 1.0, 1.0, 2.0, 3.0, 5.0))

    def leaf(self) -> Program:
        rng = self.rng
        draw = rng.random()
        if draw < 0.6:
            mode = rng.choice(["ok"] * 8 + ["fail", "stubborn", "stubborn", "flaky"])
            return ("step", rng.choice("ab"), self.seconds(), mode)
        if draw < 0.65:
            return ("fail",)
        return rng.choice(
            [
                ("sleep", self.seconds()),
                ("nap", self.seconds()),
                ("signal", rng.choice("ab"), rng.choice([None, 0.0, 2.0])),
                ("spin", 2),
            ]
        )

    def some(self, level: int) -> list[Program]:
        return [self.grow(level) for _ in range(self.rng.randint(1, 4))]

    def grow(self, level: int) -> Program:
        rng = self.rng
        level -= 1 + (rng.random() < 0.3)
        if level < 0:
            return self.leaf()
        coin = rng.random() < 0.5
        timeout = rng.choice([None, 1.0, 2.0])
        makers: list[Callable[[], Program]] = [
            lambda: ("seq", self.some(level)),
            lambda: ("loop", rng.randint(1, 3), self.grow(level)),
            lambda: ("gather", self.some(level), coin),
            lambda: ("group", self.some(level)),
            lambda: ("race", self.some(level), rng.choice(WHENS), timeout, coin),
            lambda: ("race", self.some(level), rng.choice(WHENS), timeout, coin),
            lambda: ("first", self.some(level), timeout),
            lambda: ("timeout", self.seconds(), self.grow(level)),
            lambda: ("wait_for", self.seconds(), self.grow(level)),
            lambda: ("shield", self.seconds(), self.grow(level)),
            lambda: ("attempt", self.grow(level), self.grow(level), self.grow(level)),
            lambda: ("semaphore", rng.randint(1, 2), self.some(level)),
            lambda: ("queue", self.some(level)),
            lambda: ("generator", self.some(level), rng.randint(0, 2), coin),
            lambda: ("forget", self.grow(level)),
        ]
        return rng.choice(makers)()


def live(
    program: Program,
    sent: Sequence[Sent],
    delays: Delays,
    before: Life | None = None,
    upto: int = 0,
) -> Life:
    """Run one life to its end; ``before`` is the life it continues, from its first ``upto`` entries."""
    interpreter = Interpreter()
    main = interpreter.main_of(program)
    more: dict[str, Any] = {"sent": [*sent, LAST_CANCEL], "timing": Timing(*delays)}
    if before is None:
        life = Life(main, **more)
    else:
        gap = random.Random(upto).choice((0.0, 0.5, 4.0))
        life = replay(main, before, upto, gap=gap, **more)
    interpreter.life = life
    try:
        return life.run()
    finally:
        life.body.unwind()


def check(
    program: Program,
    sent: Sequence[Sent],
    first_delays: Delays,
    second_delays: Delays,
    cuts: Sequence[float],
) -> Life:
    """The whole property for one body. Returns the first life, for counting."""
    first = live(program, sent, first_delays)
    _check_ending(first)
    whole = len(first.entries)
    for upto in sorted({int(cut * whole) for cut in cuts} | {whole}):
        second = live(program, sent, second_delays, first, upto)
        _check_continues(second, first, upto)
        if upto == whole:
            _check_same(second, first)
        third = live(program, sent, first_delays, second, len(second.entries))
        _check_continues(third, second, len(second.entries))
        _check_same(third, second)
    return first


def _check_continues(second: Life, first: Life, upto: int) -> None:
    _check_ending(second)
    assert second.entries[:upto] == first.entries[:upto]
    seen = first.log[: first.marks[upto]]
    assert second.at_switch == seen, f"after {upto} entries:\n{second.at_switch}\nnot\n{seen}"


def _check_same(second: Life, first: Life) -> None:
    """Where everything was recorded and the first life had ended, nothing new happens."""
    if first.ending is None or second.ending is None:
        return
    assert second.log == first.log
    assert second.entries == first.entries
    assert second.started == []
    assert (second.ending.kind, second.ending.value) == (first.ending.kind, first.ending.value)
    assert type(second.ending.error) is type(first.ending.error)


def _check_ending(life: Life) -> None:
    """An assertion that failed inside the body counts; so does a journal it does not fit."""
    ending = life.ending
    if ending is not None:
        assert ending.kind != "nondeterminism", ending.error
    for note in life.log:
        assert "AssertionError" not in note, note


def check_seeded(seeds: range) -> dict[str, int]:
    """The property on one big body per seed; counts what happened in their first lives."""
    seen = dict.fromkeys(("entries", "late", "attempt", "cancel", "signal", "timer"), 0)
    for seed in seeds:
        rng = random.Random(seed)
        sent = [Sent(rng.choice(SENT_AT), rng.choice(SENT_NAMES)) for _ in range(rng.randint(0, 5))]
        first, second = (
            (rng.randint(0, 9), rng.choice(SLICES), rng.choice(COMMITS)) for _ in range(2)
        )
        program = BigProgram(seed).make()
        life = check(program, sent, first, second, [rng.random(), rng.random()])
        seen["entries"] += len(life.entries)
        for entry in life.entries:
            if entry.kind is not EntryKind.STEP:
                seen[entry.kind.value] += 1
            elif entry.key in life.abandoned:
                seen["late"] += 1
    return seen
