"""Signed hints over real sockets: who is believed, and that nobody waits for a peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest

from perdure.runtime.signed_hints import (
    ANY,
    LARGEST,
    MOST_WAITING,
    SENT_AT,
    SIGNATURE,
    SignedHints,
    sign,
)
from perdure.runtime.telemetry import Tally
from perdure.sharding.runner_port import RunnerPort
from perdure.storage.clock import SeededRandomness, SystemClock
from perdure.storage.model import Hint, HintKind
from tests.harness.postgres import free_port
from tests.harness.waiting import until

pytestmark = pytest.mark.req("SL2")
KEY = "the cluster's own"
WAKE = Hint(HintKind.WAKE, "run-1", 7)


def hears(who: Process, hint: Hint) -> bool:
    return hint in who.told


class Process:
    """A pod's ear and mouth, in this process: a runner port of its own, and what it was told."""

    def __init__(self, name: str, key: str = KEY, port: int = 0) -> None:
        self.tally = Tally()
        self.told: list[Hint] = []
        self.calls = 0
        self.hints = SignedHints(name, key, SystemClock(), SeededRandomness(1), self.tally)
        self.port = RunnerPort(host="127.0.0.1", port=port, status=dict, hints=self.hints.accept)

    def receive(self, hints: Sequence[Hint]) -> None:
        self.calls += 1
        self.told.extend(hints)

    async def post(self, body: bytes, *, key: str = KEY, at: float | None = None) -> int:
        """What anybody with that key may post to its port."""
        sent_at = f"{time.time() if at is None else at:.3f}"
        headers = {SENT_AT: sent_at, SIGNATURE: sign(key, sent_at, body)}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"http://{self.port.address}/hints", content=body, headers=headers
            )
        return answer.status_code


@asynccontextmanager
async def pod(name: str, key: str = KEY, port: int = 0) -> AsyncIterator[Process]:
    process = Process(name, key, port)
    await process.hints.open(process.receive)
    await process.port.serve(lambda: None)
    try:
        yield process
    finally:
        await process.hints.close()
        await process.port.close()


async def test_what_one_says_the_others_hear_at_once_and_once() -> None:
    async with pod("a") as a, pod("b") as b, pod("c") as c:
        a.hints.send([WAKE])  # before it knows of anybody
        a.hints.peers([b.port.address, c.port.address, "127.0.0.1:0"])
        a.hints.send([Hint(HintKind.DONE, "läuft “x”", 65_535), WAKE])
        await until(lambda: len(b.told) >= 2 and len(c.told) >= 2, what="both hints at both")
        assert set(b.told) == set(c.told) == {WAKE, Hint(HintKind.DONE, "läuft “x”", 65_535)}
        assert a.told == []
        a.hints.peers([c.port.address])
        a.hints.send([Hint(HintKind.SHARDS)])
        await until(lambda: Hint(HintKind.SHARDS) in c.told, what="the third hint")
        assert Hint(HintKind.SHARDS) not in b.told
        assert a.tally.hints_dropped == b.tally.hints_refused == 0


async def test_a_connection_that_the_other_side_closed_is_replaced() -> None:
    port = free_port()
    async with pod("a") as a:
        async with pod("b", port=port) as b:
            a.hints.peers([b.port.address])
            a.hints.send([WAKE])
            await until(lambda: b.told, what="the first hint")
        async with pod("b again", port=port) as b:
            a.hints.send([WAKE])
            await until(lambda: b.told, what="a hint after the restart")
        assert a.tally.hints_dropped == 0


async def test_only_who_knows_the_key_is_believed() -> None:
    body = b'["x",["w","run-1",7]]'
    async with pod("a") as a:
        assert await a.post(body, key="another cluster's") == 403
        assert await a.post(body, at=time.time() - 3_600) == 403
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (
                await client.post(f"http://{a.port.address}/hints", content=body)
            ).status_code == 403
            assert (await client.get(f"http://{a.port.address}/hints")).status_code == 405
        assert await a.post(b"x" * (LARGEST + 1)) == 413
        for nonsense in (b"", b"\xff", b"{}", b'["x",["w"]]', b'["x",["w",1,2]]', b'["x",7]'):
            assert await a.post(nonsense) == 400
        assert a.tally.hints_refused == 9
        assert a.told == []
        # The same post twice is the same hint twice, which is nothing new; a later release's hint is ANY.
        at = time.time()
        assert [await a.post(body, at=at) for _ in range(2)] == [204, 204]
        assert await a.post(b'["x",["of a later release","",-1]]') == 204
        await until(lambda: len(a.told) == 3, what="what was said rightly")
        assert a.told == [WAKE, WAKE, ANY]


async def test_a_sender_with_a_wrong_key_stops_bothering() -> None:
    async with pod("a", key="an old one") as a, pod("b") as b:
        a.hints.peers([b.port.address])
        for _ in range(50):
            a.hints.send([WAKE])
            await asyncio.sleep(0)
        await until(lambda: a.tally.hints_dropped, what="the refusal")
        for _ in range(50):
            a.hints.send([WAKE])
        assert b.told == []
        assert b.tally.hints_refused == 1


async def test_nobody_waits_for_a_peer_that_is_gone_or_slow() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with_it.append(writer)
        await reader.read()

    with_it: list[asyncio.StreamWriter] = []
    port = free_port()
    slow = await asyncio.start_server(silent, "127.0.0.1", 0)
    slow_address = f"127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    async with pod("a") as a, pod("b") as b:
        a.hints.peers([f"127.0.0.1:{port}", slow_address, b.port.address])
        for number in range(20):
            said, began = Hint(HintKind.WAKE, f"run-{number}", number), time.perf_counter()
            a.hints.send([said])
            assert time.perf_counter() - began < 0.05
            await until(partial(hears, b, said), what="the hint at the living", deadline=0.9)
        await until(
            lambda: a.tally.hints_dropped >= 20, what="what the gone one missed", deadline=5
        )
        # It comes back, and hears what is said from then on.
        async with pod("back", port=port) as back:

            def heard() -> bool:
                a.hints.send([WAKE])
                return WAKE in back.told

            await until(heard, what="the returned hears again", deadline=10)
    for writer in with_it:
        writer.close()
    slow.close()


async def test_whatever_else_answers_there_is_a_peer_that_is_away() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop() if answers else b"x" * 200_000)
        await writer.drain()
        writer.close()

    answers = [
        b"HTTP/1.1\r\n\r\n",
        b"SSH-2.0 hello\r\n\r\n",
        b"HTTP/1.1 204 x\r\ncontent-length: many\r\n\r\n",
    ]
    other = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with pod("a") as a:
        a.hints.peers([f"127.0.0.1:{other.sockets[0].getsockname()[1]}"])

        def dropped() -> bool:
            a.hints.send([WAKE])
            return a.tally.hints_dropped > 40

        await until(dropped, what="many refusals", deadline=10)
        await until(lambda: not answers, what="each of the answers", deadline=10)
        assert a.tally.hints_sent == 0
    other.close()


async def test_a_flood_is_one_call_of_the_loop_and_one_any() -> None:
    async with pod("a") as a:
        for number in range(120):
            said = ",".join(f'["w","run-{number}-{n}",1]' for n in range(100))
            body = f'["x",{said}]'.encode()
            sent_at = f"{time.time():.3f}"
            headers = {SENT_AT: sent_at, SIGNATURE: sign(KEY, sent_at, body)}
            assert a.hints.accept(headers, body) == 204
        assert a.told == [], "the loop was never left to itself"
        await until(lambda: a.told, what="the loop's turn")
        assert a.calls == 1
        assert ANY in a.told
        assert len(a.told) <= MOST_WAITING
        assert a.tally.hints_heard == 12_000


async def test_what_the_key_signs_need_not_make_sense() -> None:
    async with pod("a") as a:
        assert await a.post(b'["x",' + b"[" * 60_000) == 400
        assert await a.post(b'["x",["w","r",1]]', at=float("nan")) == 403
        assert await a.post(b'["x",["w","r",' + b"9" * 5_000 + b"]]") == 400
        assert await a.post(b'["x",["w","\\ud800",-7]]') == 204
        assert a.tally.hints_refused == 3


async def test_a_body_never_outgrows_what_is_taken() -> None:
    """Ids and names may hold what JSON writes as six times as many bytes."""
    said = [Hint(HintKind.WAKE, f"{n:03}" + '"\\\x01' * 65, n) for n in range(400)]
    said += [Hint(HintKind.STRAY, f"{n:03}" + "\N{SNOWMAN}" * 197) for n in range(400)]
    async with pod("a") as a, pod("b") as b:
        a.hints.peers([b.port.address])
        a.hints.send(said)
        await until(lambda: len(b.told) == 800, what="all of them")
        assert a.tally.hints_dropped == 0
