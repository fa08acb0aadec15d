"""What processes of this machine have used, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of a process's own memory: what it shares with others (the server's shared buffers) is not counted."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def processor_seconds(pid: int) -> float:
    """Used so far by a process and its children, dead ones included."""
    total = _spent(pid, with_dead=True)
    for child in children(pid):
        total += _spent(child, with_dead=False)
    return total


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


def _spent(pid: int, *, with_dead: bool) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()
    own, dead = fields[11:13], fields[13:15]
    return sum(map(int, own + dead if with_dead else own)) / TICK
