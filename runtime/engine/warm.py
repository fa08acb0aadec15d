"""Warm runs: parked in the database, their bodies still in memory, frozen.

A run that this runner claims again before anybody wrote to it goes on where it was, without reading or replaying its
journal. That is a matter of speed alone: whatever is not here, or does not fit the claim, is replayed.
"""

from __future__ import annotations

from collections import OrderedDict

from perdure.runtime.engine.activation import Activation
from perdure.storage.model import ClaimedRun


class WarmRuns:
    """At most ``most`` runs and ``most_bytes``, as estimated; 0 of either: none.

    Who parked longest ago leaves first, and is unwound (R7).
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._runs: OrderedDict[str, tuple[int, Activation]] = OrderedDict()
        self._by_shard: dict[int, set[str]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def keep(self, activation: Activation, shard: int) -> None:
        """Take in a run whose park was just committed."""
        if activation.bytes > self._most_bytes or self._most == 0:
            activation.evict()
            return
        run_id = activation.run.run_id
        self._runs[run_id] = (shard, activation)
        self._by_shard.setdefault(shard, set()).add(run_id)
        self.bytes += activation.bytes
        while len(self._runs) > self._most or self.bytes > self._most_bytes:
            self.forget(next(iter(self._runs)))

    def take(self, claimed: ClaimedRun) -> Activation | None:
        """The body that may go on under this claim, if there is one. Here it is no more, whatever the answer."""
        activation = self._remove(claimed.run_id)
        if activation is None:
            return None
        if activation.wakeable and activation.rest is not None and activation.rest.goes_on(claimed):
            return activation
        activation.evict()
        return None

    def forget(self, run_id: str) -> None:
        """It has ended, or others have it."""
        activation = self._remove(run_id)
        if activation is not None:
            activation.evict()

    def forget_shard(self, shard: int) -> None:
        for run_id in list(self._by_shard.get(shard, ())):
            self.forget(run_id)

    def clear(self) -> None:
        for run_id in list(self._runs):
            self.forget(run_id)

    def _remove(self, run_id: str) -> Activation | None:
        shard, activation = self._runs.pop(run_id, (0, None))
        if activation is None:
            return None
        self.bytes -= activation.bytes
        siblings = self._by_shard[shard]
        siblings.discard(run_id)
        if not siblings:
            del self._by_shard[shard]
        return activation
