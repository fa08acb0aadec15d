"""Wait for conditions with a deadline. No test waits by sleeping a guessed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")


class DeadlineExceededError(AssertionError):
    """A condition stayed false; the message says which one and what was last seen."""


@overload
async def until(
    condition: Callable[[], Awaitable[T]],
    *,
    what: str,
    deadline: float = ...,
    interval: float = ...,
) -> T: ...


@overload
async def until(
    condition: Callable[[], T],
    *,
    what: str,
    deadline: float = ...,
    interval: float = ...,
) -> T: ...


async def until(
    condition: Callable[[], T | Awaitable[T]],
    *,
    what: str,
    deadline: float = 10.0,
    interval: float = 0.01,
) -> T:
    """Poll ``condition`` until it returns something true, and return that.

    ``condition`` may be a plain or an async callable. ``deadline`` and ``interval`` are seconds.
    Raises :class:`DeadlineExceededError` naming ``what`` and the last value seen. Exceptions raised by
    the condition are not swallowed: a condition that may fail meanwhile has to say so itself.
    """
    limit = time.monotonic() + deadline
    while True:
        outcome = condition()
        value: T = await outcome if inspect.isawaitable(outcome) else outcome
        if value:
            return value
        if time.monotonic() >= limit:
            raise DeadlineExceededError(f"{what}: not within {deadline:g} s; last seen: {value!r}")
        await asyncio.sleep(interval)


def until_blocking(
    condition: Callable[[], T],
    *,
    what: str,
    deadline: float = 10.0,
    interval: float = 0.005,
) -> T:
    """The same as :func:`until` for code without an event loop."""
    limit = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= limit:
            raise DeadlineExceededError(f"{what}: not within {deadline:g} s; last seen: {value!r}")
        time.sleep(interval)
