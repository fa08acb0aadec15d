"""A witness inside the database: triggers note every claim of a run and every committed step, append only.

``Verdict`` lays the side log of executions beside this history. A step function may be executed more often than its
result is committed in two ways: an attempt failed and was tried again (the entry counts its attempts), or its process
was killed in between. Anything else is a fault.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from examples.orders.sidelog import Execution

HERE = Path(__file__).parent
READ = "select what, run_id, claim_id, runner_id, step_key, attempt from demo_history order by id"
COUNT = "select count(*) from demo_history where what = 'commit'"


@dataclass(frozen=True)
class Line:
    """One line of the history. what: claim (a runner took a run) or commit (a step's result became durable)."""

    what: str
    run_id: str
    claim_id: int
    runner_id: int | None
    step_key: str | None
    attempt: int | None


class History:
    """The history of one database, by its URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file = url.removeprefix("sqlite:///") if url.startswith("sqlite:") else None

    async def install(self) -> None:
        """Create table and triggers in a migrated database; once."""
        if self._file is not None:
            with closing(sqlite3.connect(self._file, timeout=30)) as file:
                file.executescript((HERE / "history_sqlite.sql").read_text(encoding="utf-8"))
            return
        server = await asyncpg.connect(self._url, timeout=10)
        try:
            await server.execute((HERE / "history_postgres.sql").read_text(encoding="utf-8"))
        finally:
            await server.close()

    async def lines(self) -> list[Line]:
        return [Line(*row) for row in await self._read(READ)]

    async def commits(self) -> int:
        """How many steps have been committed so far."""
        return int((await self._read(COUNT))[0][0])

    async def _read(self, sql: str) -> list[tuple[Any, ...]]:
        if self._file is not None:
            with closing(sqlite3.connect(self._file, timeout=30)) as file:
                return file.execute(sql).fetchall()
        server = await asyncpg.connect(self._url, timeout=10)
        try:
            return [tuple(record) for record in await server.fetch(sql)]
        finally:
            await server.close()


@dataclass
class Verdict:
    """What side log and history say together. ``faults`` is empty when everything is explained."""

    executions: int = 0
    commits: int = 0
    tried_again: int = 0
    """Executions whose attempt failed, counted by the entry that followed."""
    cut_by_kill: int = 0
    """Executions of the killed process whose result was never committed; another process executed the step."""
    taken_over: int = 0
    """Runs the killed process held that another process claimed after it."""
    faults: list[str] = field(default_factory=list)


def judge(
    lines: Sequence[Line], executions: Sequence[Execution], pids: Mapping[int, int], killed: int
) -> Verdict:
    """pids: runner_id → process id. killed: the process id that was killed."""
    holders = {line.claim_id: line.runner_id for line in lines if line.what == "claim"}
    commits: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.what == "commit":
            commits.setdefault((line.run_id, str(line.step_key)), []).append(line)
    verdict = Verdict(executions=len(executions), commits=sum(map(len, commits.values())))
    verdict.taken_over = len(_taken_over(lines, pids, killed))
    by_step: dict[tuple[str, str], list[Execution]] = {}
    for each in executions:
        by_step.setdefault((each.run_id, each.key), []).append(each)
    for step in sorted(by_step.keys() | commits.keys()):
        _judge_step(
            verdict, step, by_step.get(step, []), commits.get(step, []), holders, pids, killed
        )
    return verdict


def _judge_step(
    verdict: Verdict,
    step: tuple[str, str],
    executions: Sequence[Execution],
    commits: Sequence[Line],
    holders: Mapping[int, int | None],
    pids: Mapping[int, int],
    killed: int,
) -> None:
    name = f"{step[0]} {step[1]}"
    if len(commits) != 1:
        verdict.faults.append(f"{name}: {len(commits)} commits of {len(executions)} executions")
        return
    committer = pids.get(holders.get(commits[0].claim_id) or 0)
    ours = Counter(each.attempt for each in executions if each.pid == committer)
    attempts = commits[0].attempt or 1
    if ours[attempts] != 1:
        verdict.faults.append(
            f"{name}: the committed attempt {attempts} was executed {ours[attempts]} times"
        )
    if any(count > 1 or not 1 <= attempt <= attempts for attempt, count in ours.items()):
        verdict.faults.append(
            f"{name}: process {committer} executed attempts {dict(ours)} for {attempts} counted"
        )
    verdict.tried_again += ours.total() - ours[attempts]
    for each in executions:
        if each.pid == killed != committer:
            verdict.cut_by_kill += 1
        elif each.pid != committer:
            verdict.faults.append(
                f"{name}: executed by process {each.pid}, committed by {committer}, nobody was killed"
            )


def _taken_over(lines: Sequence[Line], pids: Mapping[int, int], killed: int) -> set[str]:
    held: set[str] = set()
    taken: set[str] = set()
    for line in lines:
        if line.what == "claim":
            if pids.get(line.runner_id or 0) == killed:
                held.add(line.run_id)
            elif line.run_id in held:
                taken.add(line.run_id)
    return taken
