"""An append-only log of what really was executed, kept beside the database.

Steps and bodies of the tests write a line when they begin and one when they end. Each line is a
single write to a file opened for appending, so lines of many processes never mix and a line of a
killed process is either whole or absent. Times are the machine's monotonic clock, the same for all
processes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

E = TypeVar("E")
F = TypeVar("F")

ENVIRONMENT = "SIDE_LOG_FILE"  # not PERDURE_…, where the project refuses names it does not know
INPUT_LIMIT = 200


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a step or body. ended: None when its process never came to the end of it.

    how: ``returned``, ``cancelled`` or ``raised``; empty while it has not ended. runner: what the
    process calls itself. started, ended: seconds of the monotonic clock.
    """

    run: str
    key: str
    attempt: int
    input: str
    pid: int
    runner: str
    started: float
    ended: float | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to the system that may cost an execution.

    pid: the process it was done to, None for all of them (the database was away). at, until: when
    it was done, and when it was over (the same moment, unless it lasted), monotonic seconds.
    """

    kind: str
    at: float
    pid: int | None = None
    until: float | None = None

    def explains(self, execution: Execution, window: float) -> bool:
        """Whether it can have kept this execution's entry from being committed: it ran then, or
        had ended no longer than ``window`` seconds before."""
        if self.pid is not None and self.pid != execution.pid:
            return False
        still_open = execution.ended is None or execution.ended >= self.at - window
        return execution.started <= (self.at if self.until is None else self.until) and still_open


class SideLog:
    """The log in one file. Any number of processes and threads may write to it."""

    def __init__(self, path: Path, *, runner: str = "") -> None:
        self.path = path
        self.runner = runner
        self._numbers = itertools.count(1)
        self._opened: tuple[int, int] | None = None  # (process, file descriptor)

    @classmethod
    def from_environment(cls) -> SideLog:
        """The log named by ``SIDE_LOG_FILE``, for applications that run in pods."""
        name = os.environ.get(ENVIRONMENT)
        if not name:
            raise LookupError(f"{ENVIRONMENT} is not set; it has to name the side log's file")
        return cls(Path(name), runner=os.environ.get("POD_NAME", ""))

    @contextmanager
    def execution(
        self, run: str, key: str, *, attempt: int = 1, input: object = None
    ) -> Iterator[None]:
        """Around the code of a step or body: one line before it and one after it."""
        number = next(self._numbers)
        started = {
            "run": run,
            "key": key,
            "attempt": attempt,
            "input": repr(input)[:INPUT_LIMIT],
            "runner": self.runner,
        }
        self._write(number, "start", started)
        how = "raised"
        try:
            yield
            how = "returned"
        except (asyncio.CancelledError, GeneratorExit):
            how = "cancelled"
            raise
        finally:
            self._write(number, "end", {"how": how})

    def executions(self) -> list[Execution]:
        """All executions, in the order in which they were begun."""
        if not self.path.exists():
            return []
        found: dict[tuple[int, int], Execution] = {}
        whole, _, _ = self.path.read_text("utf-8").rpartition("\n")  # what follows is being written
        for text in whole.splitlines():
            line = json.loads(text)
            at = (line.pop("pid"), line.pop("number"))
            phase, moment = line.pop("phase"), line.pop("t")
            if phase == "start":
                found[at] = Execution(pid=at[0], started=moment, **line)
            else:
                found[at] = replace(found[at], ended=moment, how=line["how"])
        return sorted(found.values(), key=lambda execution: execution.started)

    def _write(self, number: int, phase: str, more: Mapping[str, object]) -> None:
        pid = os.getpid()
        if self._opened is None or self._opened[0] != pid:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._opened = (pid, os.open(self.path, flags, 0o644))
        line = {"pid": pid, "number": number, "phase": phase, "t": time.monotonic(), **more}
        os.write(self._opened[1], json.dumps(line).encode() + b"\n")


def check_executions(
    executions: Sequence[Execution],
    accounted: Mapping[tuple[str, str], int],
    faults: Sequence[Fault] = (),
    *,
    window: float = 1.0,
    excused: Callable[[Execution], bool] = lambda _: False,
) -> list[str]:
    """Executions beyond those the journal accounts for must each be explained by a fault.

    accounted: (run, key) → number of executions the journal knows of (see
    ``checkers.accounted_executions``). Of the executions of one step each fault explains at most
    one. ``window``: how long before a fault an execution may have ended and still be lost with it.
    ``excused``: executions that count for nothing, such as those of forgotten steps. One sentence
    per violation; also for a step that the journal knows more often than it was executed.
    """
    places: dict[tuple[str, str], list[Execution]] = defaultdict(list)
    for execution in executions:
        if not excused(execution):
            places[execution.run, execution.key].append(execution)
    violations = []
    for (run, key), mine in places.items():
        known = accounted.get((run, key), 0)
        beyond = len(mine) - known
        explained = most_explained(
            mine, faults, lambda fault, execution: fault.explains(execution, window)
        )
        if beyond < 0:
            violations.append(f"run {run}: {key} is recorded {known} times, executed {len(mine)}")
        elif explained < beyond:
            violations.append(
                f"run {run}: {key} was executed {len(mine)} times and recorded {known}; faults "
                f"explain {explained}: {', '.join(_told(execution) for execution in mine)}"
            )
    return violations


def _told(execution: Execution) -> str:
    end = "never ended" if execution.ended is None else f"{execution.how} {execution.ended:.3f}"
    name = execution.runner or execution.pid
    return f"[{name} attempt {execution.attempt} began {execution.started:.3f}, {end}]"


def most_explained(
    executions: Sequence[E], faults: Sequence[F], explains: Callable[[F, E], bool]
) -> int:
    """How many executions can be explained when no fault is used twice (a maximum matching)."""
    taken: dict[int, int] = {}

    def place(index: int, tried: set[int]) -> bool:
        for number, fault in enumerate(faults):
            if number in tried or not explains(fault, executions[index]):
                continue
            tried.add(number)
            if number not in taken or place(taken[number], tried):
                taken[number] = index
                return True
        return False

    return sum(place(index, set()) for index in range(len(executions)))
