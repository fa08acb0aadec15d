"""What a PostgreSQL server's sessions do, watched from outside."""

from __future__ import annotations

import asyncio
from collections import Counter

import asyncpg

from .wire import statement_name

LOCK_WAITS = """
select pid, query_start, query from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock'
   and wait_event not in ('extend', 'page', 'spectoken') and pid <> pg_backend_pid()
"""
SESSIONS = """
select pid, application_name, query from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
"""
TERMINATE = "select pg_terminate_backend($1)"


class LockWatch:
    """Looks each ``period`` seconds for sessions of one database that wait for a lock.

    async with LockWatch(url) as watch: … ; then ``watch.waits`` counts, by the name of the
    statement (see ``wire.statement_name``), in how many looks it was found waiting. ``looks`` is
    the number of looks: a test asks that there were enough of them. A wait counts from its second
    look on: the server takes the text from a snapshot and the wait live, so one row may show the
    wait of the statement after the one it names.
    """

    def __init__(self, url: str, *, period: float = 0.005) -> None:
        self.waits: Counter[str] = Counter()
        self.looks = 0
        self._url, self._period = url, period
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LockWatch:
        connection = await asyncpg.connect(self._url, timeout=10)
        self._task = asyncio.create_task(self._watch(connection))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        failed = self._task.done()  # it only ends by itself when the server went away
        self._task.cancel()
        outcome = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if failed and isinstance(outcome, Exception):
            raise outcome

    async def _watch(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        before: set[tuple[object, object]] = set()
        try:
            while True:
                rows = await connection.fetch(LOCK_WAITS)
                for row in rows:
                    if (row["pid"], row["query_start"]) in before:
                        self.waits[statement_name(row["query"])] += 1
                before = {(row["pid"], row["query_start"]) for row in rows}
                self.looks += 1
                await asyncio.sleep(self._period)
        finally:
            connection.terminate()


async def terminate_sessions(
    url: str, *, application: str = "", statement: str | None = None
) -> list[int]:
    """``pg_terminate_backend`` for the sessions of one database; the process ids ended.

    application: what the application's name has to contain. statement: the name of the statement
    the session runs, or ran last.
    """
    connection = await asyncpg.connect(url, timeout=10)
    try:
        ended = []
        for row in await connection.fetch(SESSIONS):
            if statement not in (None, statement_name(row["query"])):
                continue
            fits = application in row["application_name"]
            if fits and await connection.fetchval(TERMINATE, row["pid"]):
                ended.append(row["pid"])
        return ended
    finally:
        await connection.close()
