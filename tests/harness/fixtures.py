"""Pytest fixtures: a server for the session, a fresh database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .postgres import MISSING, PrivatePostgres, find_binaries


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """One running private server, without fsync, for the whole test session."""
    if find_binaries() is None:
        pytest.skip(MISSING)
    with PrivatePostgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PrivatePostgres) -> Iterator[str]:
    """The URL of a fresh, empty database on the private server; dropped after the test."""
    postgres.start()  # a test before this one may have left the server down
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.start()
    postgres.drop_database(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet: ``sqlite:////absolute/path``."""
    return f"sqlite:///{tmp_path / 'perdure.db'}"


@pytest.fixture(params=["postgres", "sqlite"])
def db_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh, empty database on each engine in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
