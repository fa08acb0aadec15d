"""A fresh database for each test, on every engine."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.storage.connect import DatabaseSettings, migrate
from tests.contract.world import World
from tests.harness.postgres import PrivatePostgres

ENGINES = ("sqlite-memory", "sqlite-file", "postgres")
SHARED = ("sqlite-file", "postgres")
TABLES = ("runs", "fences", "wakes", "steps", "messages", "run_events", "runners", "shards")
EMPTY = (
    "do $$ begin "
    + " ".join(f"delete from perdure_{table};" for table in TABLES)
    + " delete from perdure_meta where key in ('shard_count', 'lock_mode'); end $$"
)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with its tables, to be copied."""
    path = tmp_path_factory.mktemp("contract") / "template.db"
    migrate(DatabaseSettings(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_file_url(migrated_file: Path, tmp_path: Path) -> str:
    path = tmp_path / "perdure.db"
    shutil.copy(migrated_file, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def contract_database(postgres: PrivatePostgres) -> str:
    """One migrated PostgreSQL database for the suite; emptying it is quicker than making another."""
    return postgres.template("contract", _migrate)


@pytest.fixture
def emptied_postgres_url(postgres: PrivatePostgres, contract_database: str) -> str:
    postgres.start()  # a test before this one may have left the server down
    postgres.run_sql(EMPTY, database=contract_database)
    return postgres.url(contract_database)


def _migrate(url: str) -> None:
    migrate(DatabaseSettings(url))


def _url_of(engine: str, request: pytest.FixtureRequest) -> str:
    if engine == "sqlite-memory":
        return "sqlite:///:memory:"
    fixture = "sqlite_file_url" if engine == "sqlite-file" else "emptied_postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty database on each engine in turn."""
    return _url_of(request.param, request)


@pytest.fixture(params=SHARED)
def shared_url(request: pytest.FixtureRequest) -> str:
    """The same, on the engines that several processes may use at once."""
    return _url_of(request.param, request)


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    """The opened stores of one process; the cluster has agreed on four shards."""
    opened = await World(url).open()
    yield opened
    await opened.close()


@pytest.fixture
async def worlds(shared_url: str) -> AsyncIterator[tuple[World, World]]:
    """Two processes on one database, as far as storage can tell."""
    first, second = World(shared_url), World(shared_url)
    await first.open()
    await second.open()
    yield first, second
    await first.close()
    await second.close()
