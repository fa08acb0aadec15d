"""Whether a lock held by a session can tell that a runner lives, and which lock that is."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import AsyncExitStack

import asyncpg

from perdure.storage.errors import ConfigurationError, DatabaseUnavailable
from perdure.storage.postgres.address import Address
from perdure.storage.postgres.failures import DRIVER_ERRORS, translate
from perdure.storage.postgres.session import connect_plainly, cut_after

OTHERS = 5
"""Transactions opened between two statements of one connection: a pooler has to give its session to one of them."""
PROBE_SECONDS = 2.0


def lock_key(schema: str | None, cluster_id: str, runner_id: int) -> int:
    """A signed 64-bit number: advisory locks of one database are shared by all clusters in it, and by others."""
    text = f"perdure_/{schema or ''}/{cluster_id}/{runner_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def rotation(address: Address, *, deadline: float) -> str | None:
    """How it shows that a pooler gives one connection's statements to several sessions; None: it does not.

    A quiet pooler hands the same session out again and again, so others use what it has in between; what it then
    has left, and what the others were given, tells. deadline: seconds in which a first session must be given. Raises
    `ConfigurationError` if nothing can be connected to, `DatabaseUnavailable` when the connection is lost meanwhile.
    """
    async with AsyncExitStack() as stack:
        first = await _connected(address, stack)
        mark = secrets.token_hex(8)
        try:
            before = await _session_of(first, address, deadline, leave=mark)
        except TimeoutError as error:
            raise DatabaseUnavailable(f"{address.shown} gave no session: {error}") from None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                for _ in range(OTHERS):
                    other = await _connected(address, stack)
                    await other.transaction().start()
                    if mark in await _here(other):
                        return "another connection was given the session of this one"
        except (ConfigurationError, *DRIVER_ERRORS):
            pass  # no more to be had: those that were found are used
        try:
            after = await _session_of(first, address, PROBE_SECONDS)
        except TimeoutError:
            return "a second statement had to wait for a session"
    if after != before:
        return "two statements of one connection ran in different sessions"
    return None


async def _connected(address: Address, stack: AsyncExitStack) -> asyncpg.Connection:
    connection = await connect_plainly(address, statements=0)
    stack.callback(connection.terminate)
    return connection


async def _session_of(
    connection: asyncpg.Connection, address: Address, seconds: float, *, leave: str | None = None
) -> tuple[str, str]:
    """Pid and mark of the session that answers now; ``leave``: a mark to leave in it. Raises `TimeoutError`,
    `DatabaseUnavailable`."""
    try:
        # In a transaction: its statements are prepared in the session they run in.
        with cut_after(connection, seconds):
            async with connection.transaction():
                if leave is not None:
                    await connection.fetchval(
                        "select set_config('perdure.probe', $1, false)", leave
                    )
                return await _here(connection)
    except TimeoutError:
        raise
    except DRIVER_ERRORS as error:
        raise translate(
            error, what="looking for a pooler", writes=False, where=address.shown
        ) from None


async def _here(connection: asyncpg.Connection) -> tuple[str, str]:
    row = await connection.fetchrow(
        "select pg_backend_pid()::text, coalesce(current_setting('perdure.probe', true), '')"
    )
    assert row is not None
    return row[0], row[1]
