"""One connection to PostgreSQL: how it is opened, and how a statement on it ends (R9, R10).

A statement either answers, fails with an error whose meaning is known, or loses its connection. At the deadline the
transport is aborted, never the statement cancelled, so a late answer can belong to nobody. Nobody else's cancellation
reaches a session: its callers run in tasks of their own (`pool.run_shielded`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import asyncpg

from perdure.storage.clock import from_micros, to_micros
from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import ConfigurationError, DatabaseUnavailable
from perdure.storage.postgres import queries
from perdure.storage.postgres.address import Address
from perdure.storage.postgres.failures import DRIVER_ERRORS, explain_connect, is_loss, translate
from perdure.storage.postgres.position import Position

T = TypeVar("T")
Row = asyncpg.Record

CONNECT_SECONDS = 10.0
OLDEST_SERVER = 14
EPOCH_2000 = 946_684_800_000_000
"""PostgreSQL counts microseconds from 2000-01-01."""


WATCH_CLIENT = "client_connection_check_interval = '2s'"
GUARD = (
    "tcp_keepalives_idle = 1",
    "tcp_keepalives_interval = 1",
    "tcp_keepalives_count = 2",
    "tcp_user_timeout = 3000",
)
"""A session whose other end is silent is gone after three seconds, and its locks with it."""
LASTING = ("tcp_keepalives_idle = 30", "tcp_keepalives_interval = 10", "tcp_keepalives_count = 3")
"""Any other after a minute, instead of the two hours that are usual."""
QUICKER_TOAST = (
    "select set_config('default_toast_compression', 'lz4', false) from pg_settings"
    " where name = 'default_toast_compression' and 'lz4' = any(enumvals) and source = 'default';"
)
"""Large values are packed several times as fast as by the server's own way, where it was built with it and nobody has
chosen one."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The server's process behind a session; with its start it is never mistaken for a later one."""

    pid: int
    started: float
    """`backend_start`; 0.0 where the server does not tell."""
    mark: str | None = None
    """Where a pooler rotates sessions: what the transaction calls itself, since the process is everybody's."""


_open: weakref.WeakSet[Session] = weakref.WeakSet()


class Session:
    """A connection with its settings made. Not for concurrent use."""

    def __init__(
        self,
        connection: asyncpg.Connection,
        backend: Backend,
        position: Position,
        shown: str,
        *,
        every_time: str | None = None,
    ) -> None:
        """position: where the server stood when this was opened. every_time: settings to be made in each
        transaction, and everything in a transaction: a pooler rotates sessions between them."""
        self._connection = connection
        self._shown = shown
        self._expired = False
        self._every_time = every_time
        self.backend = backend
        self.position = position
        version = connection.get_server_version()
        self.server_version = f"{version.major}.{version.minor}"
        _open.add(self)

    @property
    def alive(self) -> bool:
        return not self._connection.is_closed()

    @property
    def connection(self) -> asyncpg.Connection:
        """The driver's connection, for LISTEN and for Alembic."""
        return self._connection

    @property
    def rotated(self) -> bool:
        """Whether there is another session behind this at each transaction, so that nothing can be left in one."""
        return self._every_time is not None

    async def where_now(self, *, deadline: float) -> Position:
        """Where the server stands by now: what was a standby when this was opened may have been promoted since."""
        found = await self.run(_about, what="about_session", writes=False, deadline=deadline)
        return _position(found)

    async def fetch(self, sql: str, *args: object, writes: bool, deadline: float) -> list[Row]:
        """Run one statement in autocommit. Raises the seam's errors; after a loss the session is dead."""

        async def one(connection: asyncpg.Connection) -> list[Row]:
            return await connection.fetch(sql, *args)

        return await self.run(one, what=name_of(sql), writes=writes, deadline=deadline)

    async def run(
        self,
        work: Callable[[asyncpg.Connection], Awaitable[T]],
        *,
        what: str,
        writes: bool,
        deadline: float,
    ) -> T:
        """The same for several statements; a transaction in them is the caller's."""
        if not self.alive:
            raise DatabaseUnavailable(f"{what}: not connected to {self._shown}; nothing was sent")
        timer = asyncio.get_running_loop().call_later(deadline, self._expire)
        try:
            if self._every_time is None:
                return await work(self._connection)
            return await self._in_transaction(work, self._every_time)
        except asyncio.CancelledError:  # only at the end of the loop: callers are shielded
            self.abort()
            raise
        except Exception as error:
            if self._expired:
                error.add_note(f"the deadline of {deadline:g} s was over")
            if is_loss(error):
                self.abort()
            raise translate(error, what=what, writes=writes, where=self._shown) from error
        finally:
            timer.cancel()

    async def _in_transaction(
        self, work: Callable[[asyncpg.Connection], Awaitable[T]], settings: str
    ) -> T:
        mark = f"perdure/{secrets.token_hex(8)}"
        self.backend = Backend(0, 0.0, mark)
        async with self._connection.transaction():
            await self._connection.execute(f"{settings} set local application_name = '{mark}'")
            return await work(self._connection)

    def _expire(self) -> None:
        self._expired = True
        self.abort()

    def abort(self) -> None:
        """Cut the connection now, without a word to the server. It notices within two seconds, also in a lock wait."""
        self._connection.terminate()

    async def close(self) -> None:
        """Say goodbye, for a second at most."""
        try:
            await self._connection.close(timeout=1.0)
        except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            self.abort()


def name_of(sql: str) -> str:
    """The query's name from its first line."""
    return sql.split("\n", 1)[0].removeprefix("-- name: ")


@contextlib.contextmanager
def cut_after(connection: asyncpg.Connection, seconds: float) -> Iterator[None]:
    """A deadline for statements outside of `Session.run`: the connection is cut, and `TimeoutError` raised.

    Not `asyncio.timeout`: a driver whose statement is cancelled asks the server to cancel it, and waits for that before
    the next statement, such as the one that ends a transaction. From a server that is silent no word comes."""
    expired = False

    def cut() -> None:
        nonlocal expired
        expired = True
        connection.terminate()

    timer = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    except Exception as error:
        if expired:
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


async def connect_plainly(
    address: Address, seconds: float = CONNECT_SECONDS, *, statements: int = 200
) -> asyncpg.Connection:
    """A connection without our settings. Raises `CannotConnect`, or another `ConfigurationError`, with advice.

    statements: how many prepared ones it keeps; 0 where a pooler may change the session between two transactions."""
    try:
        async with asyncio.timeout(seconds):
            connection = await asyncpg.connect(
                address.dsn,
                timeout=seconds,
                statement_cache_size=statements,
                max_cached_statement_lifetime=0,
                max_cacheable_statement_size=64 * 1024,
            )
    except Exception as error:
        # The driver's error stays out of the chain: its text may quote what the URL holds.
        raise explain_connect(error, address, seconds) from None
    version = connection.get_server_version().major
    if version < OLDEST_SERVER:
        connection.terminate()
        raise ConfigurationError(
            f"{address.shown} is PostgreSQL {version}; {OLDEST_SERVER} or later is needed"
        )
    return connection


async def open_session(
    settings: DatabaseSettings,
    address: Address,
    *,
    hot: bool,
    seconds: float = CONNECT_SECONDS,
    guarded: bool = False,
    rotated: bool = False,
    connection: asyncpg.Connection | None = None,
) -> Session:
    """Connect and make the settings. hot: plans for looping statements. guarded: the server gives the session up
    soon after the network to us is gone. rotated: by a pooler, between two transactions. connection: one that is there
    already. Raises `CannotConnect` or another `ConfigurationError`, with advice."""
    if connection is None:
        connection = await connect_plainly(address, seconds, statements=0 if rotated else 200)
    every_time: str | None = None
    try:
        with cut_after(connection, seconds):
            if rotated:
                every_time = await _settings_of_a_transaction(connection, settings, hot=hot)
                async with connection.transaction():
                    backend, position = await _know(connection)
            else:
                backend, position = await _prepare(connection, settings, hot=hot, guarded=guarded)
    except DRIVER_ERRORS as error:
        connection.terminate()
        raise explain_connect(error, address, seconds) from None
    except BaseException:
        connection.terminate()
        raise
    return Session(connection, backend, position, address.shown, every_time=every_time)


async def _prepare(
    connection: asyncpg.Connection, settings: DatabaseSettings, *, hot: bool, guarded: bool
) -> tuple[Backend, Position]:
    # Settings are made after connecting: poolers refuse startup parameters they do not know.
    # In as few round trips as can be: a keeper that comes back is waited for.
    lines = _session_settings(settings, hot=hot)
    watches = [WATCH_CLIENT, *(GUARD if guarded else LASTING)]
    first = "".join(f"set {line};" for line in lines) + QUICKER_TOAST
    try:
        await connection.execute(first + "".join(f"set {line};" for line in watches))
    except asyncpg.PostgresError:  # the server's system cannot watch sockets in some way
        await connection.execute(first)
        for line in watches:
            with contextlib.suppress(asyncpg.PostgresError):
                await connection.execute(f"set {line}")
    return await _know(connection)


async def _settings_of_a_transaction(
    connection: asyncpg.Connection, settings: DatabaseSettings, *, hot: bool
) -> str:
    """What `_prepare` sets once, for where nothing can be set once."""
    lines = ["transaction_isolation = 'read committed'", *_session_settings(settings, hot=hot)]
    lines = [line for line in lines if not line.startswith("application_name")]
    with contextlib.suppress(asyncpg.PostgresError):  # the server's system cannot watch sockets
        await connection.execute(f"begin; set local {WATCH_CLIENT}; rollback")
        lines.append(WATCH_CLIENT)
    return "".join(f"set local {line};" for line in lines)


async def is_direct(connection: asyncpg.Connection) -> bool:
    """Whether the process that answers is the one that greeted: a pooler greets in its own name."""
    greeted = connection.get_server_pid()
    try:
        await connection.execute(  # without parameters: nothing is prepared in a session that may be somebody else's
            f"do $$ begin if pg_backend_pid() <> {greeted} then raise 'pooled' using errcode = 'P0001'; end if; end $$"
        )
    except asyncpg.RaiseError:
        return False
    return True


async def _know(connection: asyncpg.Connection) -> tuple[Backend, Position]:
    await connection.set_type_codec(
        "timestamptz",
        schema="pg_catalog",
        encoder=_encode_instant,
        decoder=_decode_instant,
        format="tuple",
    )
    found = await _about(connection)
    _keep_alive(connection)
    pid = found["pid"] or connection.get_server_pid()
    return Backend(pid, found["backend_start"] or 0.0), _position(found)


async def _about(connection: asyncpg.Connection) -> Row:
    try:
        found = await connection.fetchrow(queries.ABOUT_SESSION)
    except asyncpg.InsufficientPrivilegeError:
        found = await connection.fetchrow(queries.ABOUT_SESSION_PLAIN)
    assert found is not None
    return found


def _position(found: Row) -> Position:
    return Position(found["system"], found["timeline"], found["flushed"])


def _session_settings(settings: DatabaseSettings, *, hot: bool) -> list[str]:
    # The server gives up before our deadline, so that a slow statement usually has a known outcome.
    server_side = max(1, int(settings.deadline * 800))
    lines = [
        f"application_name = {_literal(settings.application_name)}",
        "default_transaction_isolation = 'read committed'",
        "timezone = 'UTC'",
        f"statement_timeout = {server_side}",
        f"lock_timeout = {min(server_side, int(settings.lock_timeout * 1000))}",
        f"idle_in_transaction_session_timeout = {int(settings.deadline * 1000)}",
        "jit = off",
    ]
    if hot:
        # A plan made while a table is small must not read it whole until the next ANALYZE.
        lines += ["plan_cache_mode = force_generic_plan", "enable_seqscan = off"]
    if settings.schema is not None:
        lines.append(f"search_path = {_identifier(settings.schema)}")
    return lines


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "").replace("'", "''") + "'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _encode_instant(instant: float) -> tuple[int]:
    return (to_micros(instant) - EPOCH_2000,)


def _decode_instant(value: tuple[int]) -> float:
    return from_micros(value[0] + EPOCH_2000)


def _socket_of(connection: asyncpg.Connection) -> socket.socket | None:
    transport = getattr(
        connection, "_transport", None
    )  # the driver has no public way to its socket
    return transport.get_extra_info("socket") if transport is not None else None


def _keep_alive(connection: asyncpg.Connection) -> None:
    """A network that went silent is noticed within half a minute, also on a connection that only listens."""
    sock = _socket_of(connection)
    if sock is None or sock.family == getattr(socket, "AF_UNIX", None):
        return
    for option, value in (
        ("SO_KEEPALIVE", 1),
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        number = getattr(socket, option, None)
        if number is not None:
            level = socket.SOL_SOCKET if option.startswith("SO_") else socket.IPPROTO_TCP
            with contextlib.suppress(OSError):
                sock.setsockopt(level, number, value)


def _in_copy() -> None:
    """In a process that was forked off: with its copies of the sockets, our sessions and what they have locked would
    outlive us. The descriptors stay taken, so that whoever closes them late closes nobody else's."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for session in list(_open):
        sock = _socket_of(session.connection)
        if session.alive and sock is not None and sock.fileno() >= 0:
            os.dup2(nowhere, sock.fileno(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_in_copy)
