"""``perdure dev --reload``: a small parent that restarts the pod when a source file changes.

The old process has ended before the new one starts, since both want the same database file. The child runs in a
process group of its own, so that a Ctrl-C at the terminal reaches the parent alone, which passes it on; and it holds
a pipe to the parent, so that it stops by itself should the parent be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from perdure.runtime.cli.output import say

LOOK_EVERY = 0.3  # seconds
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
WATCHED = (".py", "pyproject.toml")

Stamps = Mapping[Path, tuple[int, int]]


def reload_forever(arguments: Sequence[str], folder: Path) -> int:
    """Run ``perdure ARGUMENTS`` and start it anew at each change below ``folder``; the exit code of the last one."""
    command = [sys.executable, "-m", "perdure", *arguments]
    return Reloader(command, folder).run()


def stamps(folder: Path) -> Stamps:
    """Time of change and size of every watched file below ``folder``; hidden folders are left out."""
    found = {}
    for path in _files(folder):
        try:
            status = path.stat()
        except OSError:
            continue  # gone since it was listed: that is a change as well
        found[path] = (status.st_mtime_ns, status.st_size)
    return found


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED
            and not (here / name / "pyvenv.cfg").exists()
        ]
        yield from (here / name for name in files if name.endswith(WATCHED))


class Reloader:
    """One child after the other, never two at once."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._told = 0

    def run(self) -> int:
        """Until a signal; the exit code of the last child."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        kept = {number: signal.signal(number, self._tell) for number in numbers}
        try:
            return self._watch()
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        code = 0
        seen = stamps(self._folder)
        self._start()
        while not self._told:
            time.sleep(LOOK_EVERY)
            if self._child is not None and self._child.poll() is not None and not self._told:
                code = self._end()
                say(f"ended with exit code {code}; waiting for a change below {self._folder}")
            now = stamps(self._folder)
            if now != seen and not self._told:
                say(f"changed: {_first_change(seen, now)}; starting anew")
                seen = now
                code = self._end()
                if not self._told:
                    self._start()
        return self._end() if self._child is not None else code

    def _start(self) -> None:
        theirs, self._pipe = os.pipe()
        try:
            self._child = subprocess.Popen(
                [*self._command, "--tied-to", str(theirs)],
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def _end(self) -> int:
        """Ask the child to stop and wait for its end, however long its grace period is; its exit code."""
        if self._child is None:
            return 0
        self._child.terminate()
        code = self._child.wait()
        self._child = None
        os.close(self._pipe)
        return code

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told += 1
        if self._told > 1 and self._child is not None:
            self._child.terminate()  # told twice: it lets go at once


def _first_change(before: Stamps, after: Stamps) -> Path:
    changed = {path for path, _ in before.items() ^ after.items()}
    return min(changed)
