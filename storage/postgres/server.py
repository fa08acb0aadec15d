"""The server as all connections of one process know it: what one of them has learnt counts for the others.

Whether it is still the same: another system identifier or time line, or a log that ends before what this process has
seen flushed, means that commits may be gone (a fail-over to a replica that lagged, an old copy that was started). What
the process believes of rows is void then; `history` tells everybody who holds such beliefs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import structlog

from perdure.storage.clock import Clock
from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import StorageError
from perdure.storage.postgres import queries
from perdure.storage.postgres.address import Address, address_of
from perdure.storage.postgres.precedence import Precedence
from perdure.storage.postgres.session import CONNECT_SECONDS, Session, open_session

log = structlog.stdlib.get_logger("perdure.storage")


@dataclass(frozen=True, slots=True)
class Position:
    """system: identifier of the cluster of databases, "unknown" where the role may not read it. timeline, flushed:
    which of its histories, and how far that is on disk (bytes); None where the server does not say."""

    system: str
    timeline: int | None
    flushed: int | None

    def __str__(self) -> str:
        return f"{self.system}/{self.timeline if self.timeline is not None else 'unknown'}"


def what_changed(known: Position, found: Position) -> str | None:
    """In words, what must have happened between two looks; None: nothing that matters."""
    if "unknown" not in (known.system, found.system) and known.system != found.system:
        return f"another server: system identifier {found.system}, before {known.system}"
    flushed = None not in (known.flushed, found.flushed)
    lost = flushed and (found.flushed or 0) < (known.flushed or 0)
    ends = f"its log ends at {found.flushed}, {known.flushed} had been flushed before"
    if None not in (known.timeline, found.timeline) and known.timeline != found.timeline:
        rest = f"commits are lost: {ends}" if lost else "no commit that was seen here is missing"
        return f"a fail-over: time line {found.timeline}, before {known.timeline}; {rest}"
    return f"an older copy of the server: commits are lost: {ends}" if lost else None


class Server:
    """Opens the sessions of one process. For several threads."""

    def __init__(self, settings: DatabaseSettings, clock: Clock) -> None:
        self.settings = settings
        self.address: Address = address_of(settings.url)
        self.precedence = Precedence(clock)
        self._lock = threading.Lock()
        self._known: Position | None = None
        self._history = 0
        self._change: str | None = None

    @property
    def history(self) -> int:
        """Grows when the server turns out to be another one, or to lack commits."""
        return self._history

    async def open_session(
        self,
        *,
        hot: bool,
        seconds: float = CONNECT_SECONDS,
        keeper: bool = False,
        guarded: bool = False,
    ) -> Session:
        """keeper: goes first, the others wait while it is not connected. guarded: the server is to notice within
        seconds that the other end is gone. Raises `ConfigurationError` with advice, `DatabaseUnavailable`."""
        if keeper:
            self.precedence.away()
        else:
            await self.precedence.wait(seconds)
        known, history = self._known, self._history
        session = await open_session(
            self.settings, self.address, hot=hot, seconds=seconds, guarded=guarded
        )
        try:
            found = await position_of(session, self.settings.deadline)
        except BaseException:
            session.abort()
            raise
        self._note(known, history, found)
        if keeper:
            session.connection.add_termination_listener(lambda _: self.precedence.away())
            self.precedence.back()
        return session

    def _note(self, known: Position | None, history: int, found: Position) -> None:
        """known, history: from before the server was asked, so that no answer on its way can look too old."""
        with self._lock:
            if history != self._history:
                return  # somebody else has found out meanwhile
            change = None if known is None else what_changed(known, found)
            if change is not None:
                self._history += 1
                self._change = change
            if (
                change is not None
                or self._known is None
                or (known is not None and known.timeline is None)
            ):
                self._known = found
        if change is not None:
            log.error("server.changed", database=self.address.shown, what=change)

    def flushed(self, position: int | None) -> None:
        """A later answer of the same server: so much is on its disk."""
        with self._lock:
            known = self._known
            if known is not None and position is not None and position > (known.flushed or 0):
                self._known = Position(known.system, known.timeline, position)

    def take_change(self) -> str | None:
        """What happened to the server, to be written down; once."""
        with self._lock:
            change, self._change = self._change, None
        return change


async def position_of(session: Session, deadline: float) -> Position:
    """Where a session's server stands."""
    rows = await session.fetch(queries.SERVER_POSITION, writes=False, deadline=deadline)
    system = "unknown"
    try:
        found = await session.fetch(queries.SERVER_IDENTITY, writes=False, deadline=deadline)
        system = str(found[0][0])
    except StorageError:  # not for this role
        if not session.alive:
            raise
    return Position(system, rows[0]["timeline"], rows[0]["flushed"])
