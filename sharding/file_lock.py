"""The operating system's lock beside a database file: who may use the file, and how many.

A process with runner storage `memory` believes to be alone and holds the lock exclusively; processes with runner
storage `sql` share it. The kernel lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from types import TracebackType

from perdure.storage.errors import ConfigurationError, InUseError

try:
    import fcntl
except ImportError as error:  # pragma: no cover - there is no such module on Windows only
    raise ConfigurationError(
        "perdure locks its database file with fcntl, which this operating system does not have: "
        "Windows is not supported, run it under WSL or in a container"
    ) from error


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock on ``DATABASE.lock``, held from `acquire` to `release`; also a context manager."""

    def __init__(
        self,
        database: Path,
        *,
        shared: bool,
        remedy: str = "stop it, or let several processes share the file by starting each with "
        "PERDURE_RUNNER_STORAGE=sql",
    ) -> None:
        """database: the database file, which need not exist yet. shared: beside other shared holders. remedy: what to
        do when others have it and it cannot be shared."""
        database = database.resolve()
        self.path = database.with_name(database.name + ".lock")
        self._database = database
        self._shared = shared
        self._remedy = remedy
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise at once.

        Raises `InUseError` naming the process that holds it, `ConfigurationError` where no lock file can be written.
        """
        if self._file is not None:
            return
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write the lock file {self.path}: {error.strerror}; "
                "the folder of the database file must exist and be writable"
            ) from error
        try:
            self._lock(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Let go. Safe to call twice. The file stays: removing it would let two processes lock two files."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _lock(self, file: int) -> None:
        # Whoever gets it alone starts the list of holders afresh; then those who share it step down.
        if _try(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
        elif not self._shared:
            raise InUseError(self._refusal(file))
        if self._shared and not _try(file, fcntl.LOCK_SH):
            raise InUseError(self._refusal(file))
        os.write(file, b"%d\n" % os.getpid())

    def _refusal(self, file: int) -> str:
        pids = _living(os.pread(file, 65_536, 0))
        who = f"process {', '.join(map(str, pids))}" if pids else "another process"
        if self._shared:
            return (
                f"{self._database} is in use by {who} with runner storage 'memory', which shares it with "
                "nobody: stop it, or start it too with PERDURE_RUNNER_STORAGE=sql"
            )
        return f"{self._database} is in use by {who}: {self._remedy}"


def _in_copy() -> None:
    """In a process that was forked off: with its copy of the descriptor it would hold the lock beyond our end."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_in_copy)


def _try(file: int, mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living(text: bytes) -> list[int]:
    """The process ids in a lock file whose processes exist."""
    pids = []
    for line in dict.fromkeys(text.split()):
        with contextlib.suppress(ValueError, ProcessLookupError, OverflowError):
            pid = int(line)
            with contextlib.suppress(PermissionError):
                os.kill(pid, 0)
            pids.append(pid)
    return pids
