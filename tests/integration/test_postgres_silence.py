"""The server goes away, or says nothing any more, while a connection is being set up or looked at: each call still
ends, and with an error of the seam (R10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.errors import ConfigurationError, DatabaseUnavailable, PerdureError
from perdure.storage.postgres.address import address_of
from perdure.storage.postgres.server import Server
from perdure.storage.postgres.session import open_session
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy, Rule
from tests.integration.in_process import port_and_name

pytestmark = pytest.mark.req("CL11")

DEADLINE = 1.0
FAULTS = pytest.mark.parametrize("fault", ["cut", "hang"])


@pytest.fixture
async def proxy(postgres: PrivatePostgres) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(postgres.port) as running:
        yield running


@pytest.fixture
def settings(proxy: PostgresProxy, postgres_url: str) -> DatabaseSettings:
    return DatabaseSettings(proxy.url(port_and_name(postgres_url)[1]), deadline=DEADLINE)


def at(proxy: PostgresProxy, fault: str, words: str, nth: int = 1) -> Rule:
    """The fault before the ``nth`` statement with these words."""
    arm = proxy.cut if fault == "cut" else proxy.hang
    return arm(predicate=lambda sql: words in sql.lower(), nth=nth)


async def failure(call: Callable[[], Awaitable[object]], *, within: float) -> PerdureError:
    began = time.monotonic()
    with pytest.raises(PerdureError) as caught:
        await asyncio.wait_for(call(), within + 10)
    assert time.monotonic() - began < within
    return caught.value


@FAULTS
@pytest.mark.parametrize(
    ("words", "nth"), [("set_config('perdure.probe'", 1), ("pg_backend_pid()::text", 7)]
)
async def test_looking_for_a_pooler(
    proxy: PostgresProxy, settings: DatabaseSettings, fault: str, words: str, nth: int
) -> None:
    """At the first statement of its first connection, and at the last, when five others were looked at."""
    rule = at(proxy, fault, words, nth)
    server = Server(settings, SystemClock())
    if (fault, nth) == ("hang", 7):  # which is what a busy pooler looks like
        facts = await asyncio.wait_for(server.lock_facts(), 5)
        assert facts.rotated == "a second statement had to wait for a session"
    else:
        error = await failure(server.lock_facts, within=4)
        assert isinstance(error, DatabaseUnavailable), repr(error)
        assert "127.0.0.1" in str(error)
    assert rule.happened.is_set()


@FAULTS
@pytest.mark.parametrize("rotated", [False, True])
async def test_setting_up_a_session(
    proxy: PostgresProxy, settings: DatabaseSettings, fault: str, rotated: bool
) -> None:
    rule = at(proxy, fault, "name: about_session")
    address = address_of(settings.url)
    error = await failure(
        lambda: open_session(settings, address, hot=False, seconds=DEADLINE, rotated=rotated),
        within=4,
    )
    assert isinstance(error, ConfigurationError), repr(error)
    assert rule.happened.is_set()


@FAULTS
async def test_beginning_to_listen(
    proxy: PostgresProxy, settings: DatabaseSettings, fault: str
) -> None:
    rule = at(proxy, fault, "listen ")
    channel = connect(settings, clock=SystemClock()).hints()
    try:
        error = await failure(lambda: channel.open(lambda _: None), within=4)
        assert isinstance(error, ConfigurationError), repr(error)
    finally:
        await channel.close()
    assert rule.happened.is_set()
