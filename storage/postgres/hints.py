"""Hints by LISTEN and NOTIFY on one connection of their own (R5).

A payload is JSON text: ``[sender, [kind, run_id, slot], …]``, below PostgreSQL's limit of 8,000 bytes. Hints are
gathered while a NOTIFY is under way. What goes missing while the connection is down is made good by an ANY hint after
the reconnect, and by the safety scan.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence

from perdure.storage.clock import Randomness
from perdure.storage.errors import CannotConnect, ConfigurationError, PerdureError
from perdure.storage.interface import HintChannel
from perdure.storage.model import Hint, HintKind
from perdure.storage.postgres import queries
from perdure.storage.postgres.failures import DRIVER_ERRORS, is_loss, reason_of
from perdure.storage.postgres.server import Server
from perdure.storage.postgres.session import Session, cut_after

log = logging.getLogger(__name__)

PAYLOAD_BYTES = 7_900
MOST_WAITING = 10_000
"""Hints gathered while the channel is slow; more of them become one ANY."""
STRAY_SLOT, PARKED_SLOT = -2, -3
RECONNECT_FIRST, RECONNECT_MOST = 0.1, 5.0
PROBE_SECONDS = 10.0
PARTING_SECONDS = 1.0
"""How long a channel that is closed may take to send what was said before."""


class PostgresHintChannel(HintChannel):
    """One process's ear and mouth. Lives on the loop that opens it."""

    def __init__(self, server: Server, *, randomness: Randomness) -> None:
        self._server = server
        self._settings = settings = server.settings
        self._randomness = randomness
        self._address = server.address
        self._sender = f"{randomness.bits63():016x}"
        self._channel = channel_name(settings.schema)
        self._receive: Callable[[Sequence[Hint]], None] | None = None
        self._session: Session | None = None
        self._waiting: dict[Hint, None] = {}  # an ordered set
        self._wanted = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, receive: Callable[[Sequence[Hint]], None]) -> None:
        self._receive = receive
        await self._listen()
        self._tasks = [
            asyncio.create_task(self._keep_listening(), name="perdure-hints-listen"),
            asyncio.create_task(self._keep_sending(), name="perdure-hints-send"),
        ]

    def send(self, hints: Sequence[Hint]) -> None:
        if self._session is None or not self._session.alive:
            return
        self._waiting.update(dict.fromkeys(hints))
        if len(self._waiting) > MOST_WAITING:
            self._waiting = {Hint(HintKind.ANY): None}
        self._sent.clear()
        self._wanted.set()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARTING_SECONDS):
                await self._sent.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- listening
    async def _listen(self) -> None:
        session = await self._server.open_session(hot=False)
        try:
            session.connection.add_termination_listener(self._on_lost)
            # Rotated, nobody would listen a moment later: scans find what there is.
            if not session.rotated:
                with cut_after(session.connection, self._settings.deadline):
                    await session.connection.add_listener(self._channel, self._on_notify)
        except DRIVER_ERRORS as error:
            session.abort()
            if is_loss(error):
                raise CannotConnect(
                    f"the connection to {self._address.shown} was lost before LISTEN ({reason_of(error)})"
                ) from error
            raise ConfigurationError(
                f"cannot LISTEN in {self._address.shown} ({error}); set PERDURE_HINTS=off behind a pooler "
                "that rotates sessions"
            ) from error
        self._session = session
        self._lost.clear()

    def _on_lost(self, _connection: object) -> None:
        self._lost.set()

    def _on_notify(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        hints = decode(str(payload), own=self._sender)
        if hints and self._receive is not None:
            self._receive(hints)

    async def _keep_listening(self) -> None:
        """Probe the connection while it is quiet; bring it back when it is lost."""
        while True:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._lost.wait()
            except TimeoutError:
                self._wanted.set()  # an empty NOTIFY statement is the probe
                continue
            await self._reconnect()
            if self._receive is not None:
                self._receive([Hint(HintKind.ANY)])

    async def _reconnect(self) -> None:
        pause = RECONNECT_FIRST
        while True:
            try:
                return await self._listen()
            except (PerdureError, OSError) as error:
                log.warning("hints.unavailable", extra={"error": str(error)})
            await asyncio.sleep(pause * (0.5 + self._randomness.fraction()))
            pause = min(RECONNECT_MOST, pause * 2)

    # -- sending
    async def _keep_sending(self) -> None:
        while True:
            if not self._waiting:
                self._sent.set()
            await self._wanted.wait()
            self._wanted.clear()
            hints, self._waiting = self._waiting, {}
            session = self._session
            if session is not None and session.alive:
                await self._notify(session, hints)
            # else dropped: the safety scan finds what they were about

    async def _notify(self, session: Session, hints: Iterable[Hint]) -> None:
        payloads = encode(hints, sender=self._sender)
        try:
            await session.fetch(
                queries.NOTIFY,
                self._channel,
                payloads,
                writes=False,
                deadline=self._settings.deadline,
            )
        except PerdureError as error:
            log.warning("hints.dropped", extra={"error": str(error)})


def channel_name(schema: str | None) -> str:
    """One channel a schema; names longer than an identifier may be are told apart by a digest."""
    name = f"perdure_{schema or 'default'}"
    if len(name.encode()) <= 63:
        return name
    return f"perdure_{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


_dumps = json.JSONEncoder(ensure_ascii=False).encode
"""`json.dumps` makes its encoder anew at each call."""


def encode(hints: Iterable[Hint], *, sender: str) -> list[str]:
    """Payloads below the limit; a run id is at most 200 bytes, so each hint fits."""
    payloads: list[str] = []
    parts: list[str] = []
    size = 0
    for hint in hints:
        part = _dumps(_wire(hint))
        length = len(part.encode()) + 1
        if parts and size + length > PAYLOAD_BYTES - 32:
            payloads.append(_payload(sender, parts))
            parts, size = [], 0
        parts.append(part)
        size += length
    if parts:
        payloads.append(_payload(sender, parts))
    return payloads


def _wire(hint: Hint) -> list[object]:
    """The first release takes a kind it does not know for ANY and looks at everything. So what came later travels as
    the end of a run nobody has, at a slot there is not, which it ignores (R16)."""
    match hint.kind:
        case HintKind.STRAY:
            return [HintKind.DONE.value, hint.run_id, STRAY_SLOT]
        case HintKind.PARKED:
            return [HintKind.DONE.value, hint.run_id, PARKED_SLOT - hint.slot]
    return [hint.kind.value, hint.run_id, hint.slot]


def _hint(kind: str, run_id: str, slot: int) -> Hint:
    if kind == HintKind.DONE and slot == STRAY_SLOT:
        return Hint(HintKind.STRAY, run_id)
    if kind == HintKind.DONE and slot <= PARKED_SLOT:
        return Hint(HintKind.PARKED, run_id, PARKED_SLOT - slot)
    return Hint(HintKind(kind), run_id, slot)


def _payload(sender: str, parts: list[str]) -> str:
    return f'["{sender}",{",".join(parts)}]'


def decode(payload: str, *, own: str) -> list[Hint]:
    """What somebody else sent; nothing for one's own, ANY for what cannot be read (R16)."""
    try:
        sender, *parts = json.loads(payload)
        if sender == own:
            return []
        return [_hint(kind, run_id, slot) for kind, run_id, slot in parts]
    except (ValueError, TypeError):
        return [Hint(HintKind.ANY)]
