"""Hints from process to process over HTTP, where the database does not push them. Never the truth (R5).

A sender posts what its process has to say to the runner port of every live pod: ``POST /hints``, the body
``[sender, [kind, run_id, slot], …]``, signed by HMAC-SHA256 over the time and the body with a key from the cluster's
own `meta`. Whoever knows that key can read and write the database anyway, so a forged hint could do no more than a
forged row; the signature keeps everybody else from making pods busy.

Sending never blocks and never waits: one connection per pod is kept open, what gathers while a post is under way goes
with the next, and what a pod that is away should have heard is dropped; its safety scan finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from perdure.runtime.telemetry import Tally
from perdure.storage.clock import Clock, Randomness
from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint, HintKind

log = structlog.get_logger("perdure.hints")

SIGNATURE, SENT_AT = "x-perdure-signature", "x-perdure-time"
LARGEST = 64 * 1024
"""Bytes of one body."""
MOST_IN_BODY = 200
HINT_OVERHEAD = 40
"""Bytes of a hint beside its text, and of the sender."""
MOST_WAITING = 10_000
"""Hints that wait to be sent to one pod, or to be looked at here; more of them become one ANY."""
TOLERANCE = 300.0
"""Seconds the clocks of two hosts may differ. A hint said twice does no harm, this only bounds for how long."""
ANSWER_WITHIN = 1.0
REST_FIRST, REST_MOST = 0.1, 5.0
"""Seconds without a try after a pod did not answer."""
IDLE = 50.0
"""Seconds after which a connection is not used again: the other side closes it at 75."""
ANY = Hint(HintKind.ANY)

NO_CONTENT, BAD_REQUEST, FORBIDDEN = 204, 400, 403


def sign(key: str, sent_at: str, body: bytes) -> str:
    return hmac.new(key.encode(), sent_at.encode() + b"\n" + body, hashlib.sha256).hexdigest()


class SignedHints(HintChannel):
    """One process's mouth, and where it has a runner port its ear.

    name: of this process, unlike any other's. `peers` says who listens; until it was called once, hints wait.
    """

    def __init__(
        self, name: str, key: str, clock: Clock, randomness: Randomness, tally: Tally
    ) -> None:
        self._name = name
        self._key = key
        self._clock = clock
        self._randomness = randomness
        self._tally = tally
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[Sequence[Hint]], None] | None = None
        self._peers: dict[str, _Peer] = {}
        self._unsent: dict[Hint, None] | None = {}
        """Said before the peers were known; None since."""
        self._heard: dict[Hint, None] = {}
        self._lock = threading.Lock()

    # -- HintChannel
    async def open(self, receive: Callable[[Sequence[Hint]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive

    def send(self, hints: Sequence[Hint]) -> None:
        if self._unsent is not None:
            _gather(self._unsent, hints)
        for peer in self._peers.values():
            peer.send(hints)

    async def close(self) -> None:
        """What is under way gets a moment to leave: the last thing a short-lived process says is often all it says."""
        peers, self._peers = list(self._peers.values()), {}
        self._receive = None
        await asyncio.gather(*(peer.close() for peer in peers))

    def peers(self, addresses: Collection[str]) -> None:
        """The runner ports of the live pods but this one, ``host:port``."""
        wanted = {address for address in addresses if not address.endswith(":0")}
        for address in self._peers.keys() - wanted:
            self._peers.pop(address).end()
        for address in wanted - self._peers.keys():
            peer = _Peer(address, self._post, self._clock, self._randomness, self._tally)
            self._peers[address] = peer
            if self._unsent:
                peer.send(list(self._unsent))
        self._unsent = None

    def _post(self, address: str, hints: Sequence[Hint]) -> bytes:
        """A whole request."""
        said = [self._name, *([hint.kind.value, hint.run_id, hint.slot] for hint in hints)]
        body = json.dumps(said, ensure_ascii=False).encode()
        sent_at = f"{self._clock.now():.3f}"
        head = (
            f"POST /hints HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{SENT_AT}: {sent_at}\r\n"
            f"{SIGNATURE}: {sign(self._key, sent_at, body)}\r\n\r\n"
        )
        return head.encode() + body

    # -- the ear
    def accept(self, headers: Mapping[str, str], body: bytes) -> int:
        """Take what was posted to the runner port, in whatever thread that is; the HTTP status to answer with."""
        try:
            sent_at = headers.get(SENT_AT, "")
            given = headers.get(SIGNATURE, "").encode()
            right = hmac.compare_digest(sign(self._key, sent_at, body).encode(), given)
            if not (right and abs(float(sent_at) - self._clock.now()) <= TOLERANCE):
                self._tally.hints_refused += 1
                return FORBIDDEN
            sender, *said = json.loads(body)
            hints = [_hint(*parts) for parts in said]
        except (ValueError, TypeError, UnicodeError, RecursionError):
            self._tally.hints_refused += 1
            return BAD_REQUEST
        self._tally.hints_heard += len(hints)
        if sender != self._name:
            self._hear(hints)
        return NO_CONTENT

    def _hear(self, hints: Sequence[Hint]) -> None:
        with self._lock:
            first = not self._heard
            _gather(self._heard, hints)
        # One call of the main loop for all that arrives before it: however many post, it is not flooded.
        if first and hints and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            hints, self._heard = list(self._heard), {}
        if self._receive is not None:
            self._receive(hints)


def _hint(kind: object, run_id: object, slot: object) -> Hint:
    """ANY for what a later release may say (R16). Raises TypeError for what is no hint."""
    if not isinstance(run_id, str) or not isinstance(slot, int):
        raise TypeError("not a hint")
    try:
        return Hint(HintKind(str(kind)), run_id, slot)
    except ValueError:
        return ANY


def _gather(into: dict[Hint, None], hints: Sequence[Hint]) -> None:
    into.update(dict.fromkeys(hints))
    if len(into) > MOST_WAITING:
        into.clear()
        into[ANY] = None


class _Peer:
    """One pod as others see it: a connection, what it is to hear next, and a rest after it did not answer."""

    def __init__(
        self,
        address: str,
        post: Callable[[str, Sequence[Hint]], bytes],
        clock: Clock,
        randomness: Randomness,
        tally: Tally,
    ) -> None:
        self._address = address
        self._post = post
        self._clock = clock
        self._randomness = randomness
        self._tally = tally
        self._waiting: dict[Hint, None] = {}
        self._wanted = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()
        self._failures = 0
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used_at = 0.0
        self._task = asyncio.create_task(self._run(), name=f"hints to {address}")

    def send(self, hints: Sequence[Hint]) -> None:
        if self._failures and self._resting:
            self._tally.hints_dropped += len(hints)
            return
        _gather(self._waiting, hints)
        self._sent.clear()
        self._wanted.set()

    _resting = False

    def end(self) -> None:
        """At once; what it was to hear is dropped."""
        self._task.cancel()
        self._drop_connection()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_WITHIN / 4):
                await self._sent.wait()
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            hints = self._next()
            if not self._waiting:
                self._wanted.clear()
            answered = await self._tell(hints)
            if not self._waiting:
                self._sent.set()
            if answered:
                self._tally.hints_sent += len(hints)
                self._failures = 0
            else:
                await self._rest(hints)

    def _next(self) -> list[Hint]:
        """As many as a body may hold; their texts are counted as if nothing but ASCII could be written."""
        hints: list[Hint] = []
        room = LARGEST - HINT_OVERHEAD
        for hint in itertools.islice(self._waiting, MOST_IN_BODY):
            room -= len(json.dumps(hint.run_id)) + HINT_OVERHEAD
            if room < 0:
                break
            hints.append(hint)
        for hint in hints:
            del self._waiting[hint]
        return hints

    async def _tell(self, hints: Sequence[Hint]) -> bool:
        """Over the open connection if it still serves, else over a new one."""
        request = self._post(self._address, hints)
        if self._streams is not None and self._clock.monotonic() - self._used_at < IDLE:
            with contextlib.suppress(Exception):  # whatever answers there, or does not
                return await self._exchange(request)
        self._drop_connection()
        try:
            host, _, port = self._address.rpartition(":")
            async with asyncio.timeout(ANSWER_WITHIN):
                self._streams = await asyncio.open_connection(host.strip("[]"), int(port))
            return await self._exchange(request)
        except Exception as error:
            self._drop_connection()
            if not self._failures:
                log.info("hints.peer-away", address=self._address, error=str(error) or "no answer")
            return False

    async def _exchange(self, request: bytes) -> bool:
        assert self._streams is not None
        reader, writer = self._streams
        async with asyncio.timeout(ANSWER_WITHIN):
            writer.write(request)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = head.partition("content-length:")[2].partition("\r\n")[0].strip()
            if length:
                await reader.readexactly(min(int(length), LARGEST))
        self._used_at = self._clock.monotonic()
        status = int(head.split(" ", 2)[1])
        if status == FORBIDDEN and not self._failures:
            log.warning("hints.refused", address=self._address, status=status)
        return status == NO_CONTENT

    async def _rest(self, hints: Sequence[Hint]) -> None:
        """Everything said meanwhile is dropped: it would be old when the pod is back."""
        self._failures += 1
        self._tally.hints_dropped += len(hints) + len(self._waiting)
        self._waiting.clear()
        self._wanted.clear()
        self._sent.set()
        rest = min(REST_MOST, REST_FIRST * 2.0 ** min(self._failures - 1, 16))
        self._resting = True
        await asyncio.sleep(rest * (0.5 + self._randomness.fraction() / 2))
        self._resting = False

    def _drop_connection(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()
