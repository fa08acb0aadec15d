"""When parked runs of held shards fall due: a heap, so that a timer fires on time instead of at the next scan."""

from __future__ import annotations

import heapq


class DueTimes:
    """(instant, slot) by run; a later note for a run replaces the earlier one. Hints only: a claim decides (R5)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int]] = []
        self._known: dict[str, float] = {}

    def note(self, run_id: str, slot: int, at: float) -> None:
        if self._known.get(run_id) == at:
            return
        self._known[run_id] = at
        heapq.heappush(self._heap, (at, run_id, slot))

    def forget(self, run_id: str) -> None:
        self._known.pop(run_id, None)

    def first(self) -> float | None:
        """The soonest instant noted, None when there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, until: float) -> set[int]:
        """The slots of every run due at ``until`` or before, no longer noted."""
        slots: set[int] = set()
        while True:
            self._drop_stale()
            if not self._heap or self._heap[0][0] > until:
                return slots
            _, run_id, slot = heapq.heappop(self._heap)
            del self._known[run_id]
            slots.add(slot)

    def _drop_stale(self) -> None:
        while self._heap and self._known.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._known)
