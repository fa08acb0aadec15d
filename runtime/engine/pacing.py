"""How soon a storage call is tried again, 5 ms doubling to 1 s, half of it jitter, and how much it asks for."""

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
    def delay(tries: int, fraction: float, longest: float = LONGEST) -> float:
        """Seconds before try number ``tries`` + 1; ``fraction`` in [0, 1) is the jitter. longest: above the usual."""
        most = min(max(longest, LONGEST), FIRST * 2.0 ** min(tries, 16))
        return most * (0.5 + fraction / 2)

    async def wait(self) -> None:
        await asyncio.sleep(self.delay(self._tries, self._randomness.fraction()))
        self._tries += 1


class Portion:
    """How many things are asked for at once: ``most``, half as many after each failure, and again more after successes.

    What is too much for one statement's deadline at every try is so got in smaller parts, and one thing that cannot be
    got at all comes to stand alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = most

    def failed(self) -> None:
        self.size = max(1, self.size // 2)

    def worked(self) -> None:
        self.size = min(self._most, 2 * self.size)
