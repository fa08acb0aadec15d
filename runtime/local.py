"""What a client gains from a runner in its own process: starts born claimed, and ends told at once.

Both spare a statement each and change nothing else: a start that is not born claimed is claimed, an end that is not
told is read.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.runtime.engine.engine import Engine
from perdure.runtime.results import RunEnd
from perdure.storage.model import Birth, NewRun, StartOutcome


class LocalRunner:
    """The runner's engine as clients see it. ``engine``: of the runner's current life under one runner id."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._listener: Callable[[RunEnd], None] | None = None

    # -- for starts
    def reserve(self, run: NewRun) -> Birth | None:
        """The birth to ask for, with a slot reserved; None: let it be claimed. Each must be settled."""
        return None if self.engine is None else self.engine.births.reserve(run)

    def settle(self, birth: Birth, outcome: StartOutcome | None, *, lost: bool = False) -> None:
        """What came of the start; see `Births.settle`."""
        if self.engine is not None:
            self.engine.births.settle(birth, outcome, lost=lost)

    # -- for ends
    def has(self, run_id: str) -> bool:
        """Whether the run is in memory here: its end will be told."""
        return self.engine is not None and self.engine.find(run_id) is not None

    def listen(self, listener: Callable[[RunEnd], None] | None) -> None:
        """``listener`` gets each end that this process commits, after the commit (R4)."""
        self._listener = listener

    def tell(self, end: RunEnd) -> None:
        """The engine has committed an end."""
        if self._listener is not None:
            self._listener(end)
