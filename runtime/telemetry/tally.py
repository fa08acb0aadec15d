"""Plain numbers of one process. Written by its main loop, read by whoever wants to see them, from any thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perdure.storage.model import RunStatus

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500)


class Distribution:
    """How often a value fell into which bucket. bounds: upper ends, the last bucket has none.

    mirror: gets each value too, where somebody has set it."""

    __slots__ = ("bounds", "counts", "mirror", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.mirror: Callable[[float], None] | None = None

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if self.mirror is not None:
            self.mirror(value)

    @property
    def count(self) -> int:
        return sum(self.counts)


def _seconds() -> Distribution:
    return Distribution(SECONDS)


def _sizes() -> Distribution:
    return Distribution(SIZES)


@dataclass(slots=True)
class Tally:
    """Since this process began. Keys: workflow, or (workflow, final status)."""

    started: Counter[str] = field(default_factory=Counter)
    """Runs that starts of this process have made; joined ones are not counted."""
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_success: dict[str, float] = field(default_factory=dict)
    """Unix seconds of the database's clock."""
    attempts: int = 0
    """Of steps, also those whose result nobody wanted any more."""
    attempts_failed: int = 0
    claims: int = 0
    """Statements that asked for runs."""
    claimed: int = 0
    """Runs they brought."""
    entered: int = 0
    replayed: int = 0
    """Journal entries that entered bodies were given."""
    parked: int = 0
    parks_refused: int = 0
    fenced: int = 0
    """Writes refused because somebody else has the run."""
    reloaded: int = 0
    set_aside: int = 0
    """Writes sent again because somebody had locked a row of theirs."""
    unknown: int = 0
    """Statements whose answer was lost."""
    hints_sent: int = 0
    """Over HTTP, to one pod each; likewise the next three."""
    hints_dropped: int = 0
    hints_heard: int = 0
    hints_refused: int = 0
    """Posts whose signature was wrong, or that were none."""
    commit_seconds: Distribution = field(default_factory=_seconds)
    commit_runs: Distribution = field(default_factory=_sizes)
    claim_seconds: Distribution = field(default_factory=_seconds)

    def end(self, workflow: str, status: RunStatus, at: float) -> None:
        """A run has ended; at: by the database's clock."""
        self.ended[workflow, status.value] += 1
        if status is RunStatus.SUCCEEDED:
            self.last_success[workflow] = at

    @property
    def finished(self) -> int:
        return sum(self.ended.values())
