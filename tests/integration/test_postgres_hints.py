"""Hints over LISTEN and NOTIFY: they arrive, in pieces if they must, and after an outage there is one for anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from perdure.runtime.hints import HintBus
from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint, HintKind
from perdure.storage.postgres.hints import PAYLOAD_BYTES, channel_name, decode, encode
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.harness.waiting import until

pytestmark = pytest.mark.req("CL11")


@pytest.fixture
async def proxy(postgres: PrivatePostgres) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(postgres.port) as running:
        yield running


@pytest.fixture
def url(proxy: PostgresProxy, postgres_url: str) -> str:
    return proxy.url(postgres_url.rpartition("/")[2])


class Ear:
    """A channel and what it has heard."""

    def __init__(self, url: str) -> None:
        self.channel: HintChannel = connect(DatabaseSettings(url), clock=SystemClock()).hints()
        self.heard: list[Hint] = []

    async def __aenter__(self) -> Ear:
        await self.channel.open(self.heard.extend)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()


async def test_hints_reach_the_others_and_not_their_sender(url: str) -> None:
    sent = [
        Hint(HintKind.START, slot=65_535),
        Hint(HintKind.WAKE, run_id='o"rder\\ 1 – ü\n', slot=3),
        Hint(HintKind.DONE, run_id="r" * 200),
        Hint(HintKind.SHARDS),
    ]
    async with Ear(url) as first, Ear(url) as second, Ear(url) as third:
        first.channel.send(sent)
        second.channel.send([Hint(HintKind.ANY)])
        await until(lambda: len(third.heard) == 5, what="hints of both")
        await until(lambda: len(second.heard) == 4, what="hints of the first")
        await until(lambda: first.heard, what="hints of the second")
        assert second.heard == sent
        assert first.heard == [Hint(HintKind.ANY)]


async def test_many_long_hints_arrive_in_pieces_below_the_limit(url: str) -> None:
    sent = [Hint(HintKind.WAKE, run_id=f"{n:03}" + "ä" * 98, slot=n) for n in range(300)]
    payloads = encode(sent, sender="f" * 16)
    assert len(payloads) > 5
    assert max(len(payload.encode()) for payload in payloads) < PAYLOAD_BYTES
    async with Ear(url) as first, Ear(url) as second:
        first.channel.send(sent)
        await until(lambda: len(second.heard) == 300, what="all hints")
        assert second.heard == sent


async def test_hints_sent_at_once_are_told_once(url: str) -> None:
    async with Ear(url) as first, Ear(url) as second:
        for _ in range(100):
            first.channel.send([Hint(HintKind.START, slot=1), Hint(HintKind.START, slot=2)])
        first.channel.send([Hint(HintKind.SHARDS)])
        await until(lambda: Hint(HintKind.SHARDS) in second.heard, what="the last hint")
        assert len(second.heard) == 3


async def test_after_an_outage_there_is_a_hint_for_anything(url: str, proxy: PostgresProxy) -> None:
    async with Ear(url) as first, Ear(url) as second:
        async with proxy.refusing():
            first.channel.send(
                [Hint(HintKind.START, slot=1)]
            )  # into the dark: neither blocks nor raises
            await asyncio.sleep(0)
            first.channel.send([Hint(HintKind.START, slot=2)])
        await until(lambda: Hint(HintKind.ANY) in first.heard and Hint(HintKind.ANY) in second.heard,
                    what="hints for anything")  # fmt: skip

        def told() -> bool:
            first.channel.send([Hint(HintKind.START, slot=9)])
            return Hint(HintKind.START, slot=9) in second.heard

        await until(told, what="hints after the outage")


async def test_an_ended_session_is_replaced(url: str, postgres_url: str) -> None:
    async with Ear(url) as ear:
        other = await asyncpg.connect(postgres_url)
        ended = await other.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity where query ilike 'listen%'"
            " and datname = current_database()"
        )
        await other.close()
        assert len(ended) == 1
        await until(lambda: ear.heard == [Hint(HintKind.ANY)], what="a hint for anything")


async def test_closing_ends_the_session(url: str, postgres: PrivatePostgres) -> None:
    async with Ear(url) as ear:
        ear.channel.send([Hint(HintKind.ANY)])
    ear.channel.send([Hint(HintKind.ANY)])

    async def sessions() -> bool:
        name = url.rpartition("/")[2]
        found = await postgres.query("select 1 from pg_stat_activity where datname = $1", name)
        return found == []

    await until(sessions, what="the end of the session")


async def test_what_was_said_before_closing_is_heard(url: str) -> None:
    """A command that starts a run and ends at once."""
    said = Hint(HintKind.START, slot=7)
    async with Ear(url) as ear:
        async with Ear(url) as mouth:
            bus = HintBus(mouth.channel)
            bus.publish([said])
            await bus.close()
        await until(lambda: said in ear.heard, what="the last hint")


async def test_closing_does_not_wait_for_a_server_that_is_away(
    url: str, proxy: PostgresProxy
) -> None:
    async with Ear(url) as mouth, proxy.refusing():
        async with asyncio.timeout(5):
            mouth.channel.send([Hint(HintKind.ANY)])
            await mouth.channel.close()


def test_what_cannot_be_read_is_a_hint_for_anything() -> None:
    assert decode("not json", own="me") == [Hint(HintKind.ANY)]
    assert decode('["you",["new-kind","r1",4]]', own="me") == [Hint(HintKind.ANY)]
    assert decode('["me",["s","",4]]', own="me") == []


def test_a_channel_is_a_name_of_its_schema() -> None:
    names = [channel_name(schema) for schema in (None, "one", "s" * 63, "s" * 62 + "t")]
    assert len(set(names)) == 4
    assert max(len(name.encode()) for name in names) <= 63
