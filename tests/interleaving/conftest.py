"""The ground of the races on each engine, and one line at the end that counts the merges."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.storage.connect import DatabaseSettings, migrate
from tests.harness.audit import install_audit_now
from tests.harness.interleave import Report
from tests.harness.postgres import PrivatePostgres
from tests.interleaving.actors import GATE_SCRIPT
from tests.interleaving.arena import Arena, Ground, Listener

HERE = Path(__file__).parent
RACED, PLANTED = "merges raced", "merges with a plant"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests share one event loop, to which their connections belong."""
    mark = pytest.mark.asyncio(loop_scope="package")
    for item in items:
        if HERE in item.path.parents and pytest_asyncio.is_async_test(item):
            item.add_marker(mark, append=False)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def racing_postgres(postgres: PrivatePostgres) -> AsyncIterator[Ground]:
    """One database for all races: each merge has rows of its own."""
    postgres.start()  # a test may have left it down
    name = postgres.create_database()
    url = postgres.url(name)
    migrate(DatabaseSettings(url))
    install_audit_now(url)
    for statement in GATE_SCRIPT:
        postgres.run_sql(statement, database=name)
    async with Ground(url) as ground:
        yield ground
    postgres.drop_database(name)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def racing_sqlite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """One file for all races."""
    url = f"sqlite:///{tmp_path_factory.mktemp('races') / 'perdure.db'}"
    migrate(DatabaseSettings(url))
    install_audit_now(url)
    async with Ground(url) as ground:
        yield ground


def _listener(request: pytest.FixtureRequest) -> Listener:
    def note(kind: str, report: Report) -> None:
        request.node.user_properties.append((kind, f"{report.merges} {report.bad}"))

    return note


@pytest.fixture
def statements(racing_postgres: Ground, request: pytest.FixtureRequest) -> Arena:
    """PostgreSQL, statement by statement."""
    return Arena(racing_postgres, split=True, listener=_listener(request))


@pytest.fixture(params=["postgres statements", "postgres methods", "sqlite methods"])
def arena(request: pytest.FixtureRequest) -> Arena:
    """PostgreSQL's statements, then the methods of the seam on each engine."""
    engine, _, unit = request.param.partition(" ")
    ground = request.getfixturevalue(f"racing_{engine}")
    return Arena(ground, split=unit == "statements", listener=_listener(request))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many merges there were, and how many were bad."""
    for kind in (RACED, PLANTED):
        counts = [
            [int(number) for number in value.split()]
            for reports in terminalreporter.stats.values()
            for report in reports
            if getattr(report, "when", None) == "call"
            for key, value in report.user_properties
            if key == kind
        ]
        if counts:
            merges, bad = (sum(column) for column in zip(*counts, strict=True))
            terminalreporter.write_line(
                f"interleavings: {merges} {kind} in {len(counts)} races, {bad} bad"
            )
