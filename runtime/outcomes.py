"""A client's write, sent again until its outcome is known (R9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.runtime.engine.pacing import Backoff
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import ConflictError, DatabaseUnavailable, UnknownOutcome

T = TypeVar("T")


class Repeated:
    """One write that does no harm when it arrives twice: it carries a token, a message id or a batch id.

    patience: seconds for which it is sent again while the database is away or a row is locked.
    lost: the last answer that was lost. Once there is one, no later failure can say that nothing was written.
    """

    def __init__(self, clock: Clock, randomness: Randomness, *, patience: float) -> None:
        self._clock = clock
        self._backoff = Backoff(randomness)
        self._deadline = clock.monotonic() + patience
        self.lost: UnknownOutcome | None = None

    async def answer(self, send: Callable[[], Awaitable[T]]) -> T:
        """What the database answers. Raises `UnknownOutcome` if an answer was lost and no later one came in time,
        else what the last try raised; other errors at once."""
        while True:
            try:
                return await send()
            except (DatabaseUnavailable, ConflictError, UnknownOutcome) as error:
                if isinstance(error, UnknownOutcome):
                    self.lost = error
                if self._clock.monotonic() >= self._deadline:
                    if self.lost is None or self.lost is error:
                        raise
                    raise self.lost from error
            await self._backoff.wait()
