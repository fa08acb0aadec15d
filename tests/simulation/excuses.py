"""What may cost an execution of a step its result, and for how long: never more than the figures of the world say.

A pause, a cut, an outage or a blocked main loop cost nothing by themselves. Only what they lead to does: a runner that
was declared dead, and whether it had to be, is another checker's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from perdure.runtime.engine import group, pacing
from tests.harness.audit import AuditRow
from tests.harness.sidelog import most_explained

from .workload import Execution

if TYPE_CHECKING:
    from .world import Fault, World

COSTLY = frozenset({"crash", "gave up", "grace over", "void"})
STANDSTILLS = frozenset({"pause", "block", "cut", "outage"})
"""What was on its way stays on its way meanwhile."""


def runners_of(rows: Iterable[AuditRow]) -> dict[int | None, tuple[int | None, float]]:
    """runner id → (its process, when it was registered)."""
    return {
        row.runner_id: (row.backend, row.at)
        for row in rows
        if row.table == "runners" and row.op == "I"
    }


class Excuses:
    """Of one world that has come to its end."""

    def __init__(self, world: World, rows: Sequence[AuditRow]) -> None:
        from .world import Fault

        self._world = world
        self._reach = _reach(world)
        self._standstills = sorted(
            (fault for fault in world.faults if fault.kind in STANDSTILLS),
            key=lambda fault: fault.at,
        )
        forgotten = [row for each in world.server.lost for row in each.rows]
        processes = runners_of([*forgotten, *rows])
        deaths = [
            Fault("declared dead", row.at, row.at, process)
            for row in (*forgotten, *rows)
            if row.table == "runners"
            and row.op == "U"
            and row.dead
            and not row.old_dead
            and (process := processes.get(row.runner_id, (None, 0.0))[0]) != row.backend
        ]
        self._lost = [
            Fault("commits lost", each.copied_at, each.restored_at) for each in world.server.lost
        ]
        # A runner that the old copy has never heard of ends with its first renewal there.
        lease = world.figures.lease
        strangers = [
            Fault("registration lost", each.restored_at, each.restored_at + lease, row.backend)
            for each in world.server.lost
            for row in each.rows
            if row.table == "runners" and row.op == "I"
        ]
        costly = [fault for fault in world.faults if fault.kind in COSTLY]
        self._faults = [*costly, *deaths, *strangers, *self._lost]

    def lost(self, at: float) -> bool:
        """Whether what was told then may have been forgotten by a fail-over."""
        return any(
            each.at <= at <= self._over_with(each.until, None, anybody=True) for each in self._lost
        )

    def most_explained(self, lives: Sequence[Sequence[Execution]]) -> int:
        """How many lives can be explained when no fault is used twice for one step."""
        return most_explained(lives, self._faults, self._explains)

    def _explains(self, fault: Fault, life: Sequence[Execution]) -> bool:
        """Whether it befell the life's last execution, or its result on the way to the database."""
        last = life[-1]
        if fault.process not in (None, last.process):
            return False
        first = life[0] if fault.process is None else last
        if first.started > self._over_with(fault.until, last.process):
            return False
        if last.ended is None:
            return True
        # A failure whose next attempt is due before the run would be parked is in memory until then.
        ended = last.ended + (self._world.park_after if last.how == "raised" else 0.0)
        return fault.at <= self._over_with(ended, last.process)

    def _over_with(self, at: float, process: int | None, *, anybody: bool = False) -> float:
        """When whatever a process had under way at that moment is certainly over."""
        over = at + self._reach
        for each in self._standstills:
            if (anybody or each.process in (None, process)) and each.at <= over:
                over = max(over, each.until + self._reach + self._world.figures.lease / 4)
        return over


def _reach(world: World) -> float:
    """Seconds from the end of a step until its entry is durable, nothing being wrong but single calls: it waits for the
    batch under way and for all that came before it, each of which may be halved on its way, and may be sent again."""
    figures = world.figures
    small = group.BATCH_BYTES < 10_000
    batches = figures.runs if small else -(-figures.runs // group.BATCH_ITEMS)
    reach = (4 + 2 * batches) * 2 * figures.latency
    if figures.noise > 0:
        reach += 4 * world.deadline / 3 + pacing.LONGEST
    return reach
