"""A simulated pod: the real runner, with its keeper and its steps' threads as lanes of the one virtual loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from perdure.runtime.runner import Factories
from perdure.sharding.keeper import Keeper

from .loop import LANE, Lane


class LaneKeeper(Keeper):
    """The keeper in a lane of its own instead of a thread of its own."""

    def __init__(self, lane: Lane, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{**named, "main_loop": None})
        self._lane, self._runner_id = lane, args[1].runner_id
        self._main_context = contextvars.copy_context()
        self._own_context = contextvars.copy_context()
        self._own_context.run(LANE.set, lane)
        self._task: asyncio.Task[None] | None = None
        tell = self._on_state
        self._on_state = lambda state: self._main_context.run(tell, state)

    async def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        booted = self._loop.create_future()
        self._task = self._loop.create_task(
            self._live(booted), name="keeper", context=self._own_context
        )
        await booted
        self._lane.owner.world.registered.add(self._runner_id)

    async def _live(self, booted: asyncio.Future[None]) -> None:
        try:
            await self._main(booted)  # type: ignore[arg-type]
        except GeneratorExit:  # the whole world is over
            raise
        except BaseException as error:
            if booted.done():
                self._ended_unexpectedly(error)
            else:
                booted.set_exception(error)

    async def finish(self, *, leave: bool) -> None:
        if self._task is None or self._task.done():
            return
        self._leave = leave
        self._in_loop(self._request_stop)
        await asyncio.wait([self._task], timeout=4 * self._config.renewal)

    def _in_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon(call, context=self._own_context)


class LaneThreads:
    """Blocking steps run at once and take as long as they say."""

    def submit(
        self,
        context: contextvars.Context,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        value, error = None, None
        try:
            value = context.run(function)
        except BaseException as raised:
            error = raised
        loop = asyncio.get_running_loop()
        loop.call_later(context.get(BLOCKED_FOR) or 0.01, done, value, error)


BLOCKED_FOR: contextvars.ContextVar[float] = contextvars.ContextVar("simulated_blocking")
"""Seconds the blocking step at work takes; it sets this itself."""


def factories(keeper_lane: Lane) -> Factories:
    """What the composition root is given in a simulation."""

    def keeper(*args: Any, **named: Any) -> Keeper:
        return LaneKeeper(keeper_lane, *args, **named)

    return replace(Factories(), keeper=keeper, threads=LaneThreads)
