"""What simulated runs do: one workflow that plays a plan drawn from the seed, and its steps.

Each step says what it was given, so a result that belongs to another input is noticed where it arrives; each
execution is noted outside of the database.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from perdure import Context, Retry, step, workflow
from perdure.runtime.authoring.current import current_step
from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.errors import SignalTimeoutError

from .database import POISON
from .loop import LANE
from .pods import BLOCKED_FOR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .world import Pod

SIGNAL = "go"
FOR_EVER = 99
"""Of a run that kills its process: each time."""


class Flake(Exception):
    """A failure the workload means."""


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of a step's function. process: number of the process. ended: None if it never came to its end."""

    run: str
    key: str
    attempt: int
    process: int
    started: float
    ended: float | None = None
    how: str = ""


def _pod() -> Pod:
    return LANE.get().owner  # type: ignore[no-any-return]


@asynccontextmanager
async def _executed(known: int) -> AsyncIterator[Any]:
    execution = _begin(known)
    how = "raised"
    try:
        yield execution
        how = "returned"
    except (asyncio.CancelledError, GeneratorExit):
        how = "cancelled"
        raise
    finally:
        _end(execution, how)


def _begin(known: int) -> Execution:
    pod, info = _pod(), current_step()
    world = pod.world
    execution = Execution(info.run_id, info.key, info.attempt, pod.number, world.loop.now)
    world.began(pod, execution, known)
    return execution


def _end(execution: Execution, how: str, later: float = 0.0) -> None:
    if not LANE.get().dead:
        execution.ended, execution.how = _pod().world.loop.now + later, how


def answer_to(run_id: str, token: str) -> str:
    return f"{run_id} did {token}"


@step
async def work(token: str, seconds: float, known: int) -> str:
    async with _executed(known):
        await asyncio.sleep(seconds)
        return answer_to(current_step().run_id, token)


@step(retry=Retry(max_attempts=4, base_delay=0.3))
async def flaky(token: str, failures: int, known: int) -> str:
    async with _executed(known):
        await asyncio.sleep(0.02)
        if current_step().attempt <= failures:
            raise Flake(token)
        return answer_to(current_step().run_id, token)


@step(retry=Retry(max_attempts=4, base_delay=3.0))
async def stubborn(token: str, failures: int, known: int) -> str:
    """Its back-off is longer than a run stays in memory."""
    async with _executed(known):
        if current_step().attempt <= failures:
            raise Flake(token)
        return answer_to(current_step().run_id, token)


@step
def blocking(token: str, seconds: float, known: int) -> str:
    execution = _begin(known)
    BLOCKED_FOR.set(seconds)
    _end(execution, "returned", seconds)
    return answer_to(current_step().run_id, token)


@step(timeout=0.5)
async def timed(token: str, seconds: float, known: int) -> str:
    async with _executed(known):
        await asyncio.sleep(seconds)
        return answer_to(current_step().run_id, token)


@step
async def killing(token: str, times: int, known: int) -> str:
    async with _executed(known):
        pod, run_id = _pod(), current_step().run_id
        if pod.world.kills[run_id] < times:
            pod.world.kills[run_id] += 1
            pod.killed()
            await asyncio.get_running_loop().create_future()
        return answer_to(run_id, token)


@step
async def poisoned(token: str, known: int) -> str:
    async with _executed(known):
        return POISON


STEPS: dict[str, Any] = {
    "work": work,
    "flaky": flaky,
    "stubborn": stubborn,
    "blocking": blocking,
    "timed": timed,
    "killing": killing,
}


async def _play(ctx: Context, plan: dict[str, Any]) -> list[str]:
    done: list[str] = []
    try:
        for place, op in enumerate(plan["ops"]):
            done.append(await _perform(ctx, op, str(place), len(done)))
    except asyncio.CancelledError:
        for number in range(plan["cleanup"]):
            await ctx.step(work, f"cleanup {number}", 0.05, len(done) + 1 + number)
        if plan["swallow"]:
            return [*done, "cleaned up"]
        raise
    return done


async def _perform(ctx: Context, op: list[Any], place: str, known: int) -> str:
    kind, *rest = op
    if kind == "sleep":
        await ctx.sleep(rest[0])
        return "slept"
    if kind == "nap":
        await asyncio.sleep(rest[0])
        return "slept"
    if kind == "wait":
        try:
            return f"heard {await ctx.wait_signal(SIGNAL, str, timeout=rest[0])}"
        except SignalTimeoutError:
            return "heard nothing"
    if kind == "together":
        branches = [_perform(ctx, each, f"{place}.{n}", known) for n, each in enumerate(rest[0])]
        return ", ".join(await asyncio.gather(*branches))
    if kind == "fail":
        raise Flake(place)
    if kind == "poison":
        return await ctx.step(poisoned, place, known)
    try:
        value = await ctx.step(STEPS[kind], place, rest[0], known)
    except Exception as error:
        return f"failed: {type(error).__name__}"
    if value != answer_to(ctx.run_id, place):
        _pod().world.wrong(f"run {ctx.run_id}: step {place} got the result {value!r}")
    return value  # type: ignore[no-any-return]


@workflow(name="play")
async def play(ctx: Context, plan: dict[str, Any]) -> list[str]:
    return await _play(ctx, plan)


@workflow(name="rare")
async def rare(ctx: Context, plan: dict[str, Any]) -> list[str]:
    """The same, known to some pods only."""
    return await _play(ctx, plan)


WORKFLOWS: dict[str, WorkflowDefinition[Any, Any]] = {"play": play, "rare": rare}


# ---- drawn from the seed ------------------------------------------------------------------------


def draw_plan(chance: Random) -> dict[str, Any]:
    """A plan of a few operations. It always ends by itself, unless a signal it waits for never comes."""
    ops = [_draw_op(chance, 0) for _ in range(chance.choice((1, 1, 2, 3, 4, 6)))]
    if chance.random() < 0.05:
        ops = [["work", 0.0]]  # many of them at once share a batch, and one of those is refused
        ops += [["poison"]] if chance.random() < 0.7 else []
    lot = chance.random()
    if ops[-1] == ["poison"]:
        pass
    elif lot < 0.05:
        ops.append(["fail"])
    elif lot < 0.09:
        ops.append(["killing", chance.choice((1, 1, 2, FOR_EVER))])
    elif lot < 0.12:
        ops.append(["poison"])
    return {"ops": ops, "cleanup": chance.choice((0, 1, 2)), "swallow": chance.random() < 0.3}


def _draw_op(chance: Random, depth: int) -> list[Any]:
    lot = chance.random()
    if lot < 0.36:
        return ["work", round(chance.choice((0.0, 0.01, 0.1, 0.5, 2.0)), 3)]
    if lot < 0.44:
        return ["flaky", chance.choice((1, 2, 4))]
    if lot < 0.50:
        return ["stubborn", chance.choice((1, 1, 2))]
    if lot < 0.55:
        return ["blocking", round(chance.uniform(0.01, 0.8), 3)]
    if lot < 0.58:
        return ["timed", chance.choice((0.1, 2.0))]
    if lot < 0.70:
        return ["sleep", round(chance.choice((0.2, 1.0, 2.5, 5.0)), 3)]
    if lot < 0.75:
        return ["nap", round(chance.uniform(0.1, 3.0), 3)]
    if lot < 0.90:
        return ["wait", chance.choice((None, None, 0.5, 3.0, 6.0))]
    if depth:
        return ["work", 0.05]
    return ["together", [_draw_op(chance, depth + 1) for _ in range(chance.choice((2, 3)))]]


def waits_of(plan: dict[str, Any]) -> int:
    """How many signals it may take."""
    return sum(_waits_in(op) for op in plan["ops"])


def _waits_in(op: list[Any]) -> int:
    if op[0] == "together":
        return sum(_waits_in(each) for each in op[1])
    return int(op[0] == "wait")


def is_killer(plan: dict[str, Any]) -> bool:
    return any(op[0] == "killing" and op[1] == FOR_EVER for op in plan["ops"])
