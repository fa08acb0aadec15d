"""The connections of one store, in lanes: client reads can never keep the committer or the claims waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from perdure.storage.errors import ConfigurationError, DatabaseUnavailable
from perdure.storage.postgres.session import Session

T = TypeVar("T")

SMALLEST_POOL = 3


def lane_sizes(pool: int) -> tuple[int, int, int]:
    """How many connections commits, the runner's other statements, and clients get. Sum: pool."""
    if pool < SMALLEST_POOL:
        raise ConfigurationError(
            f"a pool of {pool} connections is too small: commits, claims and clients need one each; "
            f"set PERDURE_DB_POOL to {SMALLEST_POOL} or more"
        )
    commits = 2 if pool > SMALLEST_POOL else 1
    runner = max(1, pool * 3 // 10)
    return commits, runner, pool - commits - runner


class Lane:
    """A few connections for one kind of work, opened when first needed, replaced when lost."""

    def __init__(self, size: int, open_session: Callable[[], Awaitable[Session]]) -> None:
        self.size = size
        self._open_session = open_session
        self._free = asyncio.Semaphore(size)
        self._idle: list[Session] = []
        self._closed = False

    async def run(self, use: Callable[[Session], Awaitable[T]], *, what: str, patience: float) -> T:
        """Use a connection. Raises `DatabaseUnavailable` if none is free or can be made within ``patience`` seconds."""
        try:
            if self._free.locked():
                async with asyncio.timeout(patience):
                    await self._free.acquire()
            else:  # at once; a time limit costs more than the rest of this
                await self._free.acquire()
        except TimeoutError:
            raise DatabaseUnavailable(
                f"{what}: all {self.size} connections for it were busy for {patience:g} s; nothing was sent. "
                "Find what is slow, or raise PERDURE_DB_POOL"
            ) from None
        try:
            session = await self._session(what)
            try:
                return await use(session)
            finally:
                await self._put_back(session)
        finally:
            self._free.release()

    async def prepare(self) -> None:
        """Open a connection now. Raises `DatabaseUnavailable`."""
        async with self._free:
            await self._put_back(await self._session("connecting"))

    async def offer(self, session: Session) -> None:
        """Keep a connection that was opened before; one that comes after the end is closed."""
        await self._put_back(session)

    async def close(self) -> None:
        """Close what is idle; what is in use closes when it comes back."""
        self._closed = True
        idle, self._idle = self._idle, []
        await asyncio.gather(*(session.close() for session in idle))

    async def _session(self, what: str) -> Session:
        if self._closed:
            raise DatabaseUnavailable(f"{what}: the store is closed; nothing was sent")
        while self._idle:
            session = self._idle.pop()
            if session.alive:
                return session
        try:
            return await self._open_session()
        except ConfigurationError as error:  # it was right when the store was opened
            raise DatabaseUnavailable(f"{what}: {error}") from error

    async def _put_back(self, session: Session) -> None:
        if not session.alive:
            return
        if self._closed:
            await session.close()
        else:
            self._idle.append(session)


class Calls:
    """Database calls as tasks of their own: cancelling whoever waits for one does not touch it (R10)."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work; if the waiting is cancelled the work goes on to its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def settled(self, seconds: float) -> None:
        """Wait until nothing is under way, at most so long."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=seconds)
