"""Paths inside a process that leave no trace in the database: counted where the product takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.runtime.engine import committer
from perdure.runtime.engine.activation import Activation
from perdure.runtime.engine.warm import WarmRuns
from perdure.storage.model import ClaimedRun


@contextmanager
def watching(seen: Counter[str]) -> Iterator[None]:
    """Counts into ``seen``."""
    take, after_turns = WarmRuns.take, committer._after_turns

    def taken(self: WarmRuns, claimed: ClaimedRun) -> Activation | None:
        before = len(self)
        activation = take(self, claimed)
        if activation is not None:
            seen["warm wake"] += 1
        elif len(self) < before:
            seen["warm and replayed all the same"] += 1
        return activation

    def later(turns: int, callback: Callable[..., None], *args: object) -> None:
        if turns == committer.TURNS:
            seen["answered in halves"] += 1
        after_turns(turns, callback, *args)

    WarmRuns.take = taken  # type: ignore[method-assign]
    committer._after_turns = later
    try:
        yield
    finally:
        WarmRuns.take = take  # type: ignore[method-assign]
        committer._after_turns = after_turns
