"""The server as all connections of one process know it: what one of them has learnt counts for the others.

Whether it is still the same: another system identifier or time line, or a log that ends before what this process has
seen flushed, means that commits may be gone (a fail-over to a replica that lagged, an old copy that was started). What
the process believes of rows is void then; `history` tells everybody who holds such beliefs.
"""

from __future__ import annotations

import threading

import asyncpg
import structlog

from perdure.storage.clock import Clock
from perdure.storage.connect import DatabaseSettings
from perdure.storage.model import LockFacts
from perdure.storage.postgres.address import Address, address_of
from perdure.storage.postgres.failures import DRIVER_ERRORS, explain_connect
from perdure.storage.postgres.liveness import rotation
from perdure.storage.postgres.position import Position, what_changed
from perdure.storage.postgres.precedence import Precedence
from perdure.storage.postgres.session import (
    CONNECT_SECONDS,
    Session,
    connect_plainly,
    cut_after,
    is_direct,
    open_session,
)

log = structlog.stdlib.get_logger("perdure.storage")


_NOTHING = object()


class Server:
    """Opens the sessions of one process. For several threads."""

    def __init__(self, settings: DatabaseSettings, clock: Clock) -> None:
        self.settings = settings
        self.address: Address = address_of(settings.url)
        self.precedence = Precedence(clock)
        self._lock = threading.RLock()
        self._known: Position | None = None
        self._history = 0
        self._change: str | None = None
        self._told: object = _NOTHING
        self._asked = False
        self._rotated: str | None = None

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
        connection = None if self._asked else await self._first_connection(seconds)
        known, history = self._known, self._history
        session = await open_session(
            self.settings,
            self.address,
            hot=hot,
            seconds=seconds,
            guarded=guarded,
            rotated=self._rotated is not None,
            connection=connection,
        )
        self._note(known, history, session.position)
        if keeper:
            session.connection.add_termination_listener(lambda _: self.precedence.lost(session))
            self.precedence.back(session)
        return session

    async def _first_connection(self, seconds: float) -> asyncpg.Connection | None:
        """Find out what is between us and the server. The connection, if it can be used."""
        connection = await connect_plainly(self.address, seconds)
        try:
            with cut_after(connection, seconds):
                if await is_direct(connection):
                    self._asked = True
                    return connection
        except DRIVER_ERRORS as error:
            connection.terminate()
            raise explain_connect(error, self.address, seconds) from None
        except BaseException:
            connection.terminate()
            raise
        connection.terminate()
        self._rotated = await rotation(self.address, deadline=self.settings.deadline)
        self._asked = True
        if self._rotated is not None:
            log.warning(
                "sessions.rotated",
                database=self.address.shown,
                what="a pooler rotates sessions: each statement is a transaction of several round trips, and the "
                "database's notifications do not arrive",
                how=self._rotated,
            )
        return None

    async def lock_facts(self) -> LockFacts:
        """Probes anew. Raises `ConfigurationError` if nothing can be connected to, `DatabaseUnavailable`."""
        found = await rotation(self.address, deadline=self.settings.deadline)
        return LockFacts(session_locks=True, rotated=found or self._rotated)

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

    def is_news(self, change: str | None) -> bool:
        """Whether what `meta` says was the last change is not what this process knows of."""
        return self._told is not _NOTHING and change != self._told

    def told(self, change: str | None, *, mine: bool = False) -> None:
        """What `meta` says was the last change. Another one than before: somebody else was here first, and may have
        written enough that the log no longer looks short. mine: it was written by this process."""
        with self._lock:
            news = self.is_news(change) and not mine
            self._told = change
        if news:
            self.commits_lost(f"another process found out: {change or 'nothing is written there'}")

    def commits_lost(self, what: str) -> None:
        """Somebody has found out."""
        with self._lock:
            self._history += 1
            self._change = None if what.startswith("another process") else what
        log.error("server.changed", database=self.address.shown, what=what)

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
