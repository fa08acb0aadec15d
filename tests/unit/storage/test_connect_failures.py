"""Which failures to connect may pass by themselves, and which say that the settings are wrong."""

from __future__ import annotations

import errno
import socket
import sqlite3
import ssl
from pathlib import Path

import asyncpg
import pytest

from perdure.storage.errors import CannotConnect, ConfigurationError
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.failures import explain_connect
from perdure.storage.sqlite import file

SERVER = address_of("postgresql://me:secret@db.example/x")
SOCKET = address_of("postgresql://me:secret@/x?host=/run/postgresql")


def refused(error: BaseException, address: object = SERVER) -> ConfigurationError:
    return explain_connect(error, address, 10.0)  # type: ignore[arg-type]


def state(sqlstate: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": sqlstate, "M": "said the server", "S": "FATAL"})


@pytest.mark.req("CL11", "DB1")
@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError(),
        OSError(errno.EHOSTUNREACH, "no route"),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        state("57P03"),  # it is starting
        state("57P01"),  # it is being stopped
        state("53300"),  # too many connections
        state("08P01"),  # of a pooler that does not reach its server
        state("08006"),
        asyncpg.ConnectionDoesNotExistError("closed in the middle"),
        asyncpg.TargetServerAttributeNotMatched("a fail-over is under way"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        asyncpg.InternalClientError("got something else"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'sqlstate', '')}",
)
def test_what_may_pass(error: BaseException) -> None:
    assert type(refused(error)) is CannotConnect


@pytest.mark.req("CL11", "DB1")
@pytest.mark.parametrize(
    "error",
    [
        state("28P01"),
        state("28000"),
        state("3D000"),
        state("42501"),
        ssl.SSLError("certificate verify failed"),
        asyncpg.ClientConfigurationError("`sslmode` parameter must be one of …"),
        FileNotFoundError(errno.ENOENT, "no certificate"),
        ConnectionError("PostgreSQL server at host rejected SSL upgrade"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'sqlstate', '')}",
)
def test_what_the_settings_are_wrong_about(error: BaseException) -> None:
    assert type(refused(error)) is ConfigurationError


def test_a_server_that_is_stopped_has_no_socket() -> None:
    assert type(refused(FileNotFoundError(errno.ENOENT, "gone"), SOCKET)) is CannotConnect


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, CannotConnect),
        (sqlite3.SQLITE_IOERR, CannotConnect),
        (sqlite3.SQLITE_NOMEM, CannotConnect),
        (sqlite3.SQLITE_BUSY, CannotConnect),
        (sqlite3.SQLITE_LOCKED, CannotConnect),
        (sqlite3.SQLITE_NOTADB, ConfigurationError),
        (sqlite3.SQLITE_CORRUPT, ConfigurationError),
        (sqlite3.SQLITE_READONLY, ConfigurationError),
        (sqlite3.SQLITE_CANTOPEN, ConfigurationError),
    ],
)
def test_a_file_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[ConfigurationError]
) -> None:
    def fails(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("said SQLite")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(file, "_prepare", fails)
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: sqlite3.Connection(":memory:"))
    with pytest.raises(ConfigurationError) as caught:
        file.open_file(Path("/tmp/x.db"), busy=1)
    assert type(caught.value) is kind
