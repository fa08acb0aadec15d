"""A witness outside the database: every execution of a step appends one line to a file.

The file is opened for appending and each line is one write, so lines of several processes never mix, and a line
stays even if its process is killed the moment after. Without ``ORDERS_SIDE_LOG`` nothing is written.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure import current_step

VARIABLE = "ORDERS_SIDE_LOG"


@dataclass(frozen=True)
class Execution:
    """One execution of a step function has begun. at: Unix seconds of the machine."""

    run_id: str
    key: str
    attempt: int
    pid: int
    at: float


def note_execution() -> None:
    """Called first in each step."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    me = current_step()
    line = Execution(me.run_id, me.key, me.attempt, os.getpid(), time.time())
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(asdict(line)) + "\n").encode())
    finally:
        os.close(descriptor)


def read_executions(path: Path) -> list[Execution]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Execution(**json.loads(line)) for line in lines]
