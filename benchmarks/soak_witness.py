"""Checking while it goes on: the history of runs that have ended is checked once, and then deleted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import asyncpg

from tests.harness.audit import COLUMNS, AuditRow
from tests.harness.checkers import FINAL, accounted_executions, check_history
from tests.harness.sidelog import Execution, Fault, check_executions

SETTLED = 20.0
"""Seconds after which every transaction that took part in the end of a run has ended."""
AGAIN_IN_MEMORY = 3
"""Executions that a kill may cost of a step that is tried again: short back-offs are waited out in memory."""
WINDOW = 5.0
"""Seconds before a kill within which a step's end may have been lost with it."""


class Witness:
    """violations: what was found so far, as sentences. runs, rows, executions: how much has been checked."""

    def __init__(
        self,
        url: str,
        side_log: Path,
        faults: Callable[[], Sequence[Fault]],
        tried_again: Callable[[Execution], bool],
    ) -> None:
        """tried_again: whether the execution is of a step with a retry policy."""
        self._url = url
        self._side_log = side_log
        self._faults = faults
        self._tried_again = tried_again
        self._read_to = 0
        self._lines: dict[tuple[int, int], Execution] = {}
        self.violations: list[str] = []
        self.runs = self.rows = self.executions = 0

    async def open(self) -> Witness:
        self._connection = await asyncpg.connect(self._url, command_timeout=120)
        await self._connection.execute("create index on audit_history (run_id)")
        return self

    async def close(self) -> None:
        self._connection.terminate()

    async def sweep(self, *, last: bool = False) -> None:
        """Check the runs that have ended a while ago; ``last``: all of them, and that nothing is left."""
        ended = await self._ended(0.0 if last else SETTLED)
        self._read_side_log()
        rows = await self._rows("run_id = any($1)", ended)
        cluster = await self._rows("$1 and run_id is null", True)
        self.violations += check_history(sorted([*rows, *cluster], key=lambda row: row.id))
        mine = self._executions_of(set(ended))
        accounted, faults = accounted_executions(rows), self._faults()
        interrupted = interrupted_by_cancels(rows, mine, accounted)
        for again, kills in ((False, faults), (True, [*faults] * AGAIN_IN_MEMORY)):
            some = [
                each
                for each in mine
                if self._tried_again(each) is again and each not in interrupted
            ]
            self.violations += check_executions(some, accounted, kills, window=WINDOW)
        self.runs, self.rows = self.runs + len(ended), self.rows + len(rows)
        self.executions += len(mine)
        await self._connection.execute("delete from audit_history where run_id = any($1)", ended)
        # Of runners only those lines count later that declare one dead.
        await self._connection.execute(
            "delete from audit_history where \"table\" = 'runners' and op = 'U' and dead is not distinct from old_dead"
        )
        await self._connection.execute(
            "delete from audit_history h where op = 'D' and run_id is not null"
            " and not exists (select 1 from perdure_runs r where r.run_id = h.run_id)"
        )

    async def _ended(self, ago: float) -> list[str]:
        """Runs whose end was written so long ago."""
        found = await self._connection.fetch(
            "select distinct run_id from audit_history where \"table\" = 'runs' and op = 'U'"
            " and status = any($1) and at < extract(epoch from clock_timestamp()) - $2::float8",
            sorted(FINAL),
            ago,
        )
        return [record["run_id"] for record in found]

    async def _rows(self, condition: str, argument: object) -> list[AuditRow]:
        listed = ", ".join(f'"{column}"' for column in COLUMNS)
        sql = f"select {listed} from audit_history where {condition} order by id"
        return [AuditRow(*record) for record in await self._connection.fetch(sql, argument)]

    def _read_side_log(self) -> None:
        if not self._side_log.exists():
            return
        with self._side_log.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in map(json.loads, whole.splitlines()):
            at = (line.pop("pid"), line.pop("number"))
            phase, moment = line.pop("phase"), line.pop("t")
            if phase == "start":
                self._lines[at] = Execution(pid=at[0], started=moment, **line)
            elif at in self._lines:
                self._lines[at] = replace(self._lines[at], ended=moment, how=line["how"])

    def _executions_of(self, run_ids: set[str]) -> list[Execution]:
        """Taken out of memory."""
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at, execution in self._lines.items():
            if execution.run in run_ids:
                places[execution.run].append(at)
        return [self._lines.pop(at) for mine in places.values() for at in mine]


def interrupted_by_cancels(
    rows: Sequence[AuditRow],
    executions: Sequence[Execution],
    accounted: Mapping[tuple[str, str], int],
) -> set[Execution]:
    """What the journal need not account for: the last execution of a step that its run's cancel cut short."""
    cancelled = {
        row.run_id
        for row in rows
        if (row.table, row.op, row.kind) == ("steps", "I", "cancel") and row.run_id
    }
    last: dict[tuple[str, str], Execution] = {}
    for execution in sorted(executions, key=lambda each: each.started):
        last[execution.run, execution.key] = execution
    return {
        execution
        for place, execution in last.items()
        if execution.run in cancelled
        and execution.how == "cancelled"
        and not accounted.get(place, 0)
    }
