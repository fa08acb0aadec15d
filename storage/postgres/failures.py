"""From driver errors to the storage errors of the seam: what a failure means for the data."""

from __future__ import annotations

import asyncio
import socket
import ssl

import asyncpg

from perdure.storage.errors import (
    CannotConnect,
    ConfigurationError,
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    PerdureError,
    SchemaError,
    StorageError,
    UnknownOutcome,
)
from perdure.storage.postgres.address import Address

# Rolled back at the server's wish: deadlock, serialization failure, lock and statement time-out.
CONFLICTS = frozenset({"40001", "40P01", "55P03", "57014"})
# Wrong data: cardinality, data exception, integrity, program limit.
REFUSALS = ("21", "22", "23", "54")
# Resources, operator intervention, system error, read-only transaction: nothing was written.
OUTAGES = ("53", "57", "58", "25", "XX")
DRIVER_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    EOFError,
)
"""What a connection without a `Session` around it may raise: for `translate` or `explain_connect`."""


def is_loss(error: BaseException) -> bool:
    """True if the connection went away, or its session with it, so that a write may or may not be committed.

    Only a server's ERROR, and a value the driver refused to encode, say for certain that nothing was written.
    """
    if isinstance(error, asyncpg.PostgresError):
        severity = getattr(error, "severity_en", None)
        unsent = severity is None and isinstance(error, asyncpg.DataError)
        ended = (error.sqlstate or "").startswith("57P")
        return ended or (severity != "ERROR" and not unsent)
    driver = (asyncpg.InterfaceError, asyncpg.InternalClientError)
    return isinstance(error, (*driver, OSError, TimeoutError, EOFError))


def translate(error: BaseException, *, what: str, writes: bool, where: str) -> BaseException:
    """The storage error for what a statement raised. what: the statement's name. where: the database as shown."""
    if isinstance(error, PerdureError) or not isinstance(error, Exception):
        return error
    reason = reason_of(error)
    if is_loss(error):
        if writes:
            return UnknownOutcome(
                f"{what}: the connection to {where} was lost during a write ({reason})"
            )
        return DatabaseUnavailable(f"{what}: the connection to {where} was lost ({reason})")
    state = getattr(error, "sqlstate", None) or ""
    if state in CONFLICTS:
        return ConflictError(f"{what}: {where} rolled it back, try again ({reason})")
    if state.startswith(REFUSALS):
        return DataRefused(f"{what}: {where} refuses the data ({reason})")
    if state == "42P01":
        return SchemaError(f"{what}: {reason} in {where}; run: perdure migrate --db {where}")
    if state == "42501":
        return ConfigurationError(f"{what}: {reason} in {where}; grant the role what it needs")
    if state.startswith(OUTAGES):
        return DatabaseUnavailable(f"{what}: {where} cannot do it now ({reason})")
    return StorageError(f"{what}: {where} answered {reason}")


def reason_of(error: BaseException) -> str:
    """The driver's words, cut short: they may quote a whole value."""
    state = getattr(error, "sqlstate", None)
    text = str(error) or type(error).__name__
    text = text if len(text) <= 300 else text[:300] + "…"
    return f"{state}: {text}" if state else text


def explain_connect(error: BaseException, address: Address, seconds: float) -> ConfigurationError:
    """Why connecting failed and what to check, in words; `CannotConnect` where that may pass by itself."""
    kind = ConfigurationError if _is_lasting(error, address) else CannotConnect
    return kind(f"cannot connect to {address.shown}: {_advice(error, address.host, seconds)}")


def _is_lasting(error: BaseException, address: Address) -> bool:
    """Whether the settings have to be changed: the server is there and refuses them, or the driver does."""
    match error:
        case asyncpg.TargetServerAttributeNotMatched():  # a fail-over may be under way
            return False
        case asyncpg.PostgresError():
            return not (error.sqlstate or "08").startswith((*OUTAGES, "08"))
        case FileNotFoundError():  # a certificate; but a server that is stopped takes its socket along
            return not address.host.startswith("/")
        case ConnectionError() if "rejected SSL" in str(error):
            return True
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():  # the server went away in the handshake
            return False
        case ssl.SSLError() | asyncpg.ClientConfigurationError():
            return True
        case _:
            return False


def _advice(error: BaseException, host: str, seconds: float) -> str:
    match error:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return f"{error}. Check user and password in the URL, and that the role may log in from here"
        case asyncpg.InvalidCatalogNameError():
            return f"{error}. Check the database name in the URL, or create it: createdb NAME"
        case asyncpg.TooManyConnectionsError():
            return f"{error}. Lower PERDURE_DB_POOL or raise max_connections of the server"
        case asyncpg.CannotConnectNowError():
            return f"{error}. The server is starting or stopping; try again shortly"
        case asyncpg.PostgresError() if error.sqlstate and not error.sqlstate.startswith("08"):
            return f"the server answered {reason_of(error)}"
        case asyncio.TimeoutError():
            return (
                f"no answer from {host} within {seconds:g} s. "
                "Check host, port and firewall, and that PostgreSQL runs there"
            )
        case socket.gaierror():
            return f"the host name of {host} is not known. Check the host in the URL"
        case ssl.SSLError():
            reason = getattr(error, "reason", None) or "handshake"
            return f"TLS failed ({reason}). Check sslmode and the certificates named in the URL"
        case asyncpg.ClientConfigurationError():
            return f"{str(error).splitlines()[0]}. Check the parameters in the URL"
        case asyncpg.TargetServerAttributeNotMatched():
            return f"no server at {host} is what target_session_attrs in the URL asks for"
        case FileNotFoundError():
            return (
                "a file named in the URL does not exist: a certificate, a key, or the socket in "
                f"{host}. Check its path"
            )
        case ConnectionError() if "rejected SSL" in str(error):
            return (
                f"{host} rejects TLS: a PostgreSQL without it, where sslmode asks for it, "
                "or no PostgreSQL at all. Check host, port and sslmode in the URL"
            )
        case ConnectionRefusedError():
            return f"nothing listens at {host}. Check host and port in the URL, and that PostgreSQL runs"
        case OSError() if not isinstance(error, ConnectionError):
            return f"{host} cannot be reached ({error.strerror or 'network error'}). Check host and port in the URL"
        case _:
            return f"what answers at {host} does not speak PostgreSQL's protocol. Check host and port in the URL"
