"""What an entry, or a timer, does to the future of whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from perdure.runtime.body.port import Decode


def resolve(future: asyncio.Future[Any], decode: Decode, text: str | None) -> None:
    """The decoded value, or what decoding raises, to whoever waits: both are the same on replay."""
    try:
        value = decode(text)
    except BaseException as error:
        future.set_exception(_carriable(error))
    else:
        future.set_result(value)


def raise_in(
    future: asyncio.Future[Any], recorded_error: Callable[[str], BaseException], text: str
) -> None:
    """The recorded error, or what making it raises, to whoever waits."""
    try:
        error = recorded_error(text)
    except BaseException as other:
        error = other
    future.set_exception(_carriable(error))


def _carriable(error: BaseException) -> BaseException:
    """A future refuses StopIteration, which would end the coroutine that awaits it."""
    if not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(f"StopIteration was raised: {error}")
    carried.__cause__ = error
    return carried


def wake(future: asyncio.Future[None]) -> None:
    """The end of a sleep."""
    if not future.done():
        future.set_result(None)


def time_out(future: asyncio.Future[Any]) -> None:
    """The end of a wait for a message."""
    if not future.done():
        future.set_exception(TimeoutError())
