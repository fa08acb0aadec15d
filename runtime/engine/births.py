"""Starts made in this process whose runs it holds from the first moment on: they need no claim.

The start's own statement decides, by the shard's row. What is decided here is whether to ask: the shard is held and
not being given away, the lease is trusted, the workflow is known, and there is a slot, which is reserved until the
start is answered (R1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from perdure.runtime.engine.claiming import Claimer
from perdure.runtime.engine.slots import Slots
from perdure.sharding.slots import shard_of
from perdure.storage.clock import Randomness
from perdure.storage.model import Birth, ClaimedRun, NewRun, ShardHold, StartOutcome


class Births:
    """Born-claimed starts of one runner, each from `reserve` to `settle`.

    workflows: names this runner knows. holds: shards to claim from. trusted: whether the lease is, now.
    taken: gets each run that was born claimed, on the loop. unknown_ends: see `Claimer`.
    """

    def __init__(
        self,
        runner_id: int,
        randomness: Randomness,
        *,
        shard_count: int,
        workflows: Container[str],
        holds: Callable[[], Mapping[int, ShardHold]],
        trusted: Callable[[], bool],
        taken: Callable[[Sequence[ClaimedRun]], None],
        slots: Slots,
        claimer: Claimer,
        unknown_ends: float,
    ) -> None:
        self._runner_id = runner_id
        self._randomness = randomness
        self._shard_count = shard_count
        self._workflows = workflows
        self._holds = holds
        self._trusted = trusted
        self._taken = taken
        self._slots = slots
        self._claimer = claimer
        self._unknown_ends = unknown_ends
        self._under_way: dict[int, int] = {}
        """claim id → shard"""
        self._one_settled = asyncio.Event()
        self._over = False

    @property
    def claims(self) -> Collection[int]:
        """Claims that runs may have been born under without being in memory yet: no orphan is to be seen in them."""
        return self._under_way.keys()

    @property
    def open(self) -> bool:
        """Whether runs may be born claimed just now."""
        return not (
            self._over or self._slots.free == 0 or self._claimer.behind or not self._trusted()
        )

    def reserve(self, run: NewRun) -> Birth | None:
        """A slot and a claim for a run about to be started; None: let a claim find it. Each must be settled."""
        if not self.open:
            return None
        shard = shard_of(run.slot, self._shard_count)
        hold = self._holds().get(shard)
        if hold is None or run.workflow not in self._workflows:
            return None
        birth = Birth(self._runner_id, hold, self._randomness.bits63())
        self._under_way[birth.claim_id] = shard
        self._slots.take()
        return birth

    def settle(self, birth: Birth, outcome: StartOutcome | None, *, lost: bool = False) -> None:
        """The start was answered, or failed. lost: it may have been made all the same, by a statement whose answer
        nobody will see: the runs it left, claimed by me and in nobody's memory, are looked for."""
        if (
            birth.runner_id != self._runner_id
        ):  # an earlier self's, which is dead: its claims are free to take
            self._look_for(birth)
            return
        if self._under_way.pop(birth.claim_id, None) is None:
            return  # abandoned meanwhile
        if outcome is not None and outcome.claimed is not None:
            self._taken([outcome.claimed])
        self._slots.give_back()
        self._one_settled.set()
        if lost:
            self._look_for(birth)
            loop = asyncio.get_running_loop()
            loop.call_later(self._unknown_ends, self._look_for, birth)

    def _look_for(self, birth: Birth) -> None:
        self._claimer.look_for_orphans([birth.hold.shard_id])

    async def settled(self, shard_id: int) -> None:
        """Returns when no start into the shard is under way that asked for a birth."""
        while shard_id in self._under_way.values():
            self._one_settled.clear()
            await self._one_settled.wait()

    def abandon(self) -> None:
        """This runner is over: what is still under way is found by whoever has the shard then."""
        self._over = True
        self._under_way.clear()
        self._one_settled.set()
