"""Back-off between tries of the same storage call: 5 ms doubling to 1 s, half of it jitter."""

from __future__ import annotations

import asyncio

from perdure.storage.clock import Randomness

FIRST = 0.005
LONGEST = 1.0


class Backoff:
    """Paces one operation's tries. Correctness never depends on it, only politeness."""

    def __init__(self, randomness: Randomness) -> None:
        self._randomness = randomness
        self._tries = 0

    @staticmethod
    def delay(tries: int, fraction: float) -> float:
        """Seconds before try number ``tries`` + 1; ``fraction`` in [0, 1) is the jitter."""
        longest = min(LONGEST, FIRST * 2.0 ** min(tries, 16))
        return longest * (0.5 + fraction / 2)

    async def wait(self) -> None:
        await asyncio.sleep(self.delay(self._tries, self._randomness.fraction()))
        self._tries += 1
