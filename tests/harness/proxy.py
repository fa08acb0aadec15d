"""A TCP proxy before PostgreSQL that can lose a connection at a chosen statement.

    async with PostgresProxy(server_port) as proxy:
        rule = proxy.cut(name="commit", where="after_commit", nth=3)
        ...                               # the client talks to 127.0.0.1:proxy.port
        await rule.happened.wait()

A statement is chosen by its name (the comment it begins with, ``-- name: commit``) or by a
predicate on its SQL text, whether it comes as a simple query or as an execution of something
prepared earlier. Connections are cut with a reset (RST), as by a dying peer or firewall.

where            what the server did                            what the client sees
``before``       never got the statement; its session ends      connection lost, nothing written
``after_commit`` executed it, answer swallowed; session ends    connection lost, it is written
``lock_wait``    got it and goes on, as behind a dead link      connection lost, outcome open

``after_commit`` means after the statement's transaction only for one in autocommit mode, or for
the COMMIT itself (``name="commit"`` by its first word).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from .postgres import free_port
from .wire import (
    CANCEL_REQUEST,
    GSSENC_REQUEST,
    SSL_REQUEST,
    Framer,
    Statement,
    StatementMap,
    WireMessage,
    backend_pid,
    error_text,
    startup_code,
    startup_parameters,
)

CutWhere = Literal["before", "after_commit", "lock_wait"]
HangWhere = Literal["before", "answer"]
Action = Literal["cut", "hang", "call"]

# A client's messages up to one of these are decided on together: before them the server does not
# have to answer, so nothing is lost by holding the others back.
ENDS_UNIT = frozenset("SHQXpFdcf")
RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Rule:
    """A fault that is armed. ``happened`` is set when it has been done ``times`` times.

    backend_pid, statement: of the last time it was done. answer: the command tag the server gave
    (of ``after_commit``, and of a call at the ``answer``). error: what it answered instead of
    success, None if it did not.
    """

    action: Action
    where: str
    matches: Callable[[Statement], bool]
    connection: Callable[[ProxiedConnection], bool]
    nth: int
    times: int
    when: Callable[[int], Awaitable[object]] | None
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    seen: int = 0
    begun: int = 0
    done: int = 0
    backend_pid: int = 0
    statement: Statement | None = None
    answer: str | None = None
    error: str | None = None
    armed: bool = True

    def disarm(self) -> None:
        """Take the rule back; what it has done stays done."""
        self.armed = False

    def due(self, connection: ProxiedConnection, statement: Statement) -> bool:
        """Count one statement; True from the ``nth`` matching one on, as long as armed."""
        if not self.armed or not self.connection(connection) or not self.matches(statement):
            return False
        self.seen += 1
        return self.seen >= self.nth

    def begin(self, connection: ProxiedConnection, statement: Statement) -> None:
        self.backend_pid, self.statement = connection.backend_pid, statement
        self.begun += 1
        self.armed = self.begun < self.times

    def note_done(self) -> None:
        self.done += 1
        if self.done >= self.times:
            self.happened.set()


class PostgresProxy:
    """Listens on ``127.0.0.1:port`` and forwards to PostgreSQL on ``127.0.0.1:server_port``.

    Belongs to the event loop in which it was started. ``statements`` counts executions by name,
    ``messages`` counts the clients' protocol messages by letter, ``log`` lists (connection number,
    name) in the order in which statements were sent on.
    """

    def __init__(self, server_port: int, *, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self.statements: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.log: list[tuple[int, str]] = []
        self.connections: list[ProxiedConnection] = []
        self.accepted = 0
        self._server_port = server_port
        self._rules: list[Rule] = []
        self._listener: asyncio.Server | None = None
        self._flow = asyncio.Event()
        self._flow.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> PostgresProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        self.port = self.port or free_port()
        await self.accept()

    async def close(self) -> None:
        """Stop listening and cut everything, ghosts included."""
        self.refuse()
        self._flow.set()
        self.cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, database: str, *, user: str = "postgres") -> str:
        """The URL of a database through the proxy."""
        return f"postgresql://{user}@{self.host}:{self.port}/{database}"

    # ---- faults at a statement ----------------------------------------------------------------

    def cut(
        self,
        *,
        name: str | None = None,
        predicate: Callable[[str], bool] | None = None,
        where: CutWhere = "before",
        nth: int = 1,
        times: int = 1,
        on: Callable[[ProxiedConnection], bool] | None = None,
        when: Callable[[int], Awaitable[object]] | None = None,
    ) -> Rule:
        """Arm a cut at the ``nth`` execution (and the ``times - 1`` after it) of a statement.

        ``on`` restricts it to some connections. ``when`` is for ``lock_wait``: called with the
        backend's process id after the statement went to the server, and awaited before the
        client is cut, so that a test can wait until the backend really waits for the lock.
        """
        return self._arm("cut", where, name, predicate, nth, times, on, when)

    def hang(
        self,
        *,
        name: str | None = None,
        predicate: Callable[[str], bool] | None = None,
        where: HangWhere = "before",
        nth: int = 1,
        times: int = 1,
        on: Callable[[ProxiedConnection], bool] | None = None,
    ) -> Rule:
        """Arm a hang: the connection stays open and nothing passes any more, in no direction.

        ``before``: the statement never reaches the server. ``answer``: it does, its answer does
        not come back.
        """
        return self._arm("hang", where, name, predicate, nth, times, on, None)

    def call(
        self,
        do: Callable[[int], object],
        *,
        name: str | None = None,
        predicate: Callable[[str], bool] | None = None,
        where: HangWhere = "before",
        nth: int = 1,
        times: int = 1,
        on: Callable[[ProxiedConnection], bool] | None = None,
    ) -> Rule:
        """Arm a call of ``do(backend_pid)``, plain or async, such as one that kills the client.

        ``before``: then the statement goes to the server, if the client still lives. ``answer``:
        the server has executed it, its answer is delivered after the call.
        """

        async def when(pid: int) -> object:
            outcome = do(pid)
            return await outcome if inspect.isawaitable(outcome) else outcome

        return self._arm("call", where, name, predicate, nth, times, on, when)

    def _arm(
        self,
        action: Action,
        where: str,
        name: str | None,
        predicate: Callable[[str], bool] | None,
        nth: int,
        times: int,
        on: Callable[[ProxiedConnection], bool] | None,
        when: Callable[[int], Awaitable[object]] | None,
    ) -> Rule:
        if (name is None) == (predicate is None):
            raise ValueError("a rule needs either a name or a predicate")

        def matches(statement: Statement) -> bool:
            return statement.name == name if predicate is None else predicate(statement.sql)

        rule = Rule(action, where, matches, on or (lambda _: True), nth, times, when)
        self._rules.append(rule)
        return rule

    # ---- faults at any moment -----------------------------------------------------------------

    def cut_all(self) -> int:
        """Reset every connection, on both sides; the number of them."""
        live = list(self.connections)
        for connection in live:
            connection.reset()
        return len(live)

    def hang_all(self) -> None:
        """Nothing passes on any connection; new ones are accepted and stay silent."""
        self._flow.clear()

    def resume(self) -> None:
        """The end of :meth:`hang_all`: what waited is delivered."""
        self._flow.set()

    def refuse(self) -> None:
        """New connections are refused from now on; existing ones go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def accept(self) -> None:
        """The end of :meth:`refuse`, on the same port."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, self.host, self.port)

    @contextlib.asynccontextmanager
    async def refusing(self, *, cut: bool = True) -> AsyncIterator[None]:
        """The server is away: connections are cut (unless ``cut=False``), new ones refused."""
        self.refuse()
        if cut:
            self.cut_all()
        try:
            yield
        finally:
            await self.accept()

    # ---- used by the connections --------------------------------------------------------------

    async def flowing(self) -> None:
        await self._flow.wait()

    def decide(self, connection: ProxiedConnection, executed: list[Statement]) -> Rule | None:
        """The first rule that fires at one of the statements that were sent together."""
        for statement in executed:
            due = [rule for rule in self._rules if rule.due(connection, statement)]
            if due:
                due[0].begin(connection, statement)
                return due[0]
        return None

    def note_sent(self, connection: ProxiedConnection, executed: list[Statement]) -> None:
        for statement in executed:
            self.statements[statement.name] += 1
            self.log.append((connection.number, statement.name))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        connection = ProxiedConnection(self, self.accepted, reader, writer)
        self.connections.append(connection)
        try:
            await connection.run(self._server_port)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two ends has gone; the other one is told below
        except asyncio.CancelledError:
            pass  # only `close` does that; the streams module of 3.11 would log it as an error
        finally:
            connection.close()
            self.connections.remove(connection)
            self._tasks.discard(task)


class ProxiedConnection:
    """One client connection and its server connection.

    number: 1 for the first the proxy accepted. parameters: of the startup packet (database,
    application_name …). backend_pid: 0 until the server has given it.
    """

    def __init__(
        self,
        proxy: PostgresProxy,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.number = number
        self.parameters: dict[str, str] = {}
        self.backend_pid = 0
        self._proxy = proxy
        self._client_reader, self._client = reader, writer
        self._server: asyncio.StreamWriter | None = None
        self._statements = StatementMap()
        self._syncs_sent = 0
        self._ready_seen = 0
        self._answered = asyncio.Condition()
        self._swallow_after: int | None = None  # number of the first answer not to be delivered
        self._swallowing: Rule | None = None
        self._held: list[bytes] | None = None  # an answer that is delivered later

    async def run(self, server_port: int) -> None:
        packet = await self._startup()
        await self._proxy.flowing()
        server_reader, self._server = await asyncio.open_connection(self._proxy.host, server_port)
        self._server.write(packet)
        if startup_code(packet) == CANCEL_REQUEST:
            await server_reader.read()  # the server closes when it has passed the request on
            return
        self.parameters = startup_parameters(packet)
        downward = asyncio.create_task(self._pump_server(server_reader))
        upward = asyncio.create_task(self._pump_client())
        try:
            done, _ = await asyncio.wait({downward, upward}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (downward, upward):
                task.cancel()
            await asyncio.gather(downward, upward, return_exceptions=True)

    def reset(self) -> None:
        """Reset both sides at once."""
        _reset(self._client)
        if self._server is not None:
            _reset(self._server)

    def close(self) -> None:
        """An orderly end of both sides, after what is on its way; nothing after a reset."""
        self._client.close()
        if self._server is not None:
            self._server.close()

    async def _startup(self) -> bytes:
        """The startup packet; requests for encryption before it are declined."""
        while True:
            head = await self._client_reader.readexactly(4)
            packet = head + await self._client_reader.readexactly(int.from_bytes(head, "big") - 4)
            if startup_code(packet) not in (SSL_REQUEST, GSSENC_REQUEST):
                return packet
            await self._proxy.flowing()
            self._client.write(b"N")

    # ---- from the client ----------------------------------------------------------------------

    async def _pump_client(self) -> None:
        framer = Framer()
        unit: list[WireMessage] = []
        executed: list[Statement] = []
        while data := await self._client_reader.read(65_536):
            for message in framer.feed(data):
                self._proxy.messages[message.kind] += 1
                unit.append(message)
                statement = self._statements.executed(message)
                if statement is not None:
                    executed.append(statement)
                if message.kind in ENDS_UNIT:
                    await self._pass_on(unit, executed)
                    unit, executed = [], []

    async def _pass_on(self, unit: list[WireMessage], executed: list[Statement]) -> None:
        await self._proxy.flowing()
        rule = self._proxy.decide(self, executed)
        if rule is None:
            await self._send(unit, executed)
        elif rule.action == "hang":
            await self._hang(rule, unit, executed)
        elif rule.action == "call":
            await self._call(rule, unit, executed)
        else:
            await self._cut(rule, unit, executed)

    async def _send(self, unit: list[WireMessage], executed: list[Statement]) -> None:
        assert self._server is not None
        self._proxy.note_sent(self, executed)
        self._syncs_sent += sum(message.kind in "SQF" for message in unit)
        self._server.write(b"".join(message.raw for message in unit))
        await self._server.drain()

    async def _hang(self, rule: Rule, unit: list[WireMessage], executed: list[Statement]) -> None:
        self._swallow_after = self._syncs_sent
        if rule.where == "answer":
            await self._send(unit, executed)
        rule.note_done()
        await asyncio.Event().wait()  # until the connection is reset or the proxy closed

    async def _call(self, rule: Rule, unit: list[WireMessage], executed: list[Statement]) -> None:
        assert rule.when is not None
        if rule.where == "before":
            await rule.when(self.backend_pid)
            rule.note_done()
            await asyncio.sleep(0)  # two turns of the loop: it reads what the client's end left
            await asyncio.sleep(0)
            if self._client_reader.at_eof() or self._client_reader.exception() is not None:
                raise ConnectionAbortedError
            await self._send(unit, executed)
            return
        self._swallow_after, self._swallowing, self._held = self._syncs_sent, rule, []
        await self._send(unit, executed)
        await self._all_answered()
        await rule.when(self.backend_pid)
        rule.note_done()
        self._client.write(b"".join(self._held))
        self._swallow_after = self._swallowing = self._held = None

    async def _cut(self, rule: Rule, unit: list[WireMessage], executed: list[Statement]) -> None:
        if rule.where == "before":
            self.reset()
            rule.note_done()
            raise ConnectionAbortedError
        self._swallow_after, self._swallowing = self._syncs_sent, rule
        await self._send(unit, executed)
        if rule.where == "lock_wait":
            if rule.when is not None:
                await rule.when(self.backend_pid)
            _reset(self._client)
            rule.note_done()
        await self._all_answered()
        self.reset()
        if rule.where == "after_commit":
            rule.note_done()
        raise ConnectionAbortedError

    async def _all_answered(self) -> None:
        async with self._answered:
            await self._answered.wait_for(lambda: self._ready_seen >= self._syncs_sent)

    # ---- from the server ----------------------------------------------------------------------

    async def _pump_server(self, reader: asyncio.StreamReader) -> None:
        framer = Framer()
        while data := await reader.read(65_536):
            await self._proxy.flowing()
            for message in framer.feed(data):
                await self._deliver(message)

    async def _deliver(self, message: WireMessage) -> None:
        if message.kind == "K" and not self.backend_pid:
            self.backend_pid = backend_pid(message)
            self._syncs_sent += 1  # the start-up, too, is answered by a ReadyForQuery
        swallowed = self._swallow_after is not None and self._ready_seen >= self._swallow_after
        if not swallowed:
            self._client.write(message.raw)
        if swallowed and self._held is not None:
            self._held.append(message.raw)
        if swallowed and self._swallowing is not None:
            _note_answer(self._swallowing, message)
        if message.kind == "Z":
            async with self._answered:
                self._ready_seen += 1
                self._answered.notify_all()


def _note_answer(rule: Rule, message: WireMessage) -> None:
    if message.kind == "C":
        rule.answer = message.body.rstrip(b"\0").decode()
    elif message.kind == "E":
        rule.error = error_text(message)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer gets a reset, not an orderly end."""
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
