"""Pytest fixtures: a server for the session, a fresh database for each test.

                empty           with perdure's tables     … and the witness (see ``audit``)
PostgreSQL      postgres_url    migrated_postgres_url     audited_postgres_url
SQLite          sqlite_url      migrated_sqlite_url       audited_sqlite_url
each in turn    db_url          migrated_url              audited_url
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.storage.connect import DatabaseSettings, migrate

from .audit import install_audit_now
from .postgres import MISSING, PrivatePostgres, find_binaries

ENGINES = ["postgres", "sqlite"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """One running private server, without fsync, for the whole test session."""
    if find_binaries() is None:
        pytest.skip(MISSING)
    with PrivatePostgres() as server:
        yield server


# ---- empty ------------------------------------------------------------------------------------


@pytest.fixture
def postgres_url(postgres: PrivatePostgres) -> Iterator[str]:
    """The URL of a fresh, empty database on the private server; dropped after the test."""
    with _database(postgres) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet: ``sqlite:////absolute/path``."""
    return f"sqlite:///{tmp_path / 'perdure.db'}"


@pytest.fixture(params=ENGINES)
def db_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh, empty database on each engine in turn."""
    return _chosen(request, "{}_url")


# ---- with the tables --------------------------------------------------------------------------


@pytest.fixture
def migrated_postgres_url(postgres: PrivatePostgres) -> Iterator[str]:
    with _database(postgres, _migrated_template(postgres)) as url:
        yield url


@pytest.fixture
def migrated_sqlite_url(sqlite_url: str) -> str:
    _migrate(sqlite_url)
    return sqlite_url


@pytest.fixture(params=ENGINES)
def migrated_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database with perdure's tables, none of them filled, on each engine in turn."""
    return _chosen(request, "migrated_{}_url")


# ---- with the tables and the witness ----------------------------------------------------------


@pytest.fixture
def audited_postgres_url(postgres: PrivatePostgres) -> Iterator[str]:
    with audited_database(postgres) as url:
        yield url


@contextmanager
def audited_database(server: PrivatePostgres) -> Iterator[str]:
    """The same for fixtures of another scope."""

    def prepare(url: str) -> None:
        _migrate(url)
        install_audit_now(url)

    server.start()
    with _database(server, server.template("perdure_audited", prepare)) as url:
        yield url


@pytest.fixture
def audited_sqlite_url(migrated_sqlite_url: str) -> str:
    install_audit_now(migrated_sqlite_url)
    return migrated_sqlite_url


@pytest.fixture(params=ENGINES)
def audited_url(request: pytest.FixtureRequest) -> str:
    """The same as ``migrated_url`` with the audit triggers installed."""
    return _chosen(request, "audited_{}_url")


# ---- inside -----------------------------------------------------------------------------------


def _chosen(request: pytest.FixtureRequest, pattern: str) -> str:
    url: str = request.getfixturevalue(pattern.format(request.param))
    return url


def _migrate(url: str) -> None:
    migrate(DatabaseSettings(url))


def _migrated_template(server: PrivatePostgres) -> str:
    server.start()
    return server.template("perdure_migrated", _migrate)


@contextmanager
def _database(server: PrivatePostgres, template: str | None = None) -> Iterator[str]:
    server.start()  # a test before this one may have left the server down
    name = server.create_database(template=template)
    try:
        yield server.url(name)
    finally:
        server.start()
        server.drop_database(name)
