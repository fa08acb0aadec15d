"""The runner port: probes and status over HTTP, served by the keeper's loop so that user code cannot block it (R3).

/livez    200 as long as the keeper's loop runs: a restart would not cure anything else
/readyz   200 while the lease is trusted and the main loop answers, else 503 and the reason in one line
/status   what the runner says of itself, as JSON
/metrics  its numbers in Prometheus' text form, where it is given any
/hints    what other processes have to say (POST), where somebody listens
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import weakref
from collections.abc import Callable, Mapping

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.storage.clock import Clock
from perdure.storage.errors import ConfigurationError, PortTaken

log = structlog.stdlib.get_logger("perdure.sharding")


LARGEST_POST = 64 * 1024
"""Bytes."""
REQUEST_WITHIN = 10.0
"""Seconds for a request and its answer; also for the first one to come."""
KEEP_ALIVE = 75
"""Seconds an idle connection stays open: peers that say something now and then need not connect anew."""


class LoopWatch:
    """Whether another thread's event loop still answers. `ping` and `lag` are called from the watching thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._asked_at: float | None = None
        self._last = 0.0

    def ping(self) -> None:
        """Ask the loop for an answer, unless one is still owed."""
        if self._asked_at is None:
            self._asked_at = self._clock.monotonic()
            with contextlib.suppress(RuntimeError):  # a closed loop never answers
                self._loop.call_soon_threadsafe(self._answer)

    def lag(self) -> float:
        """Seconds an answer has been owed for; 0.0 when none is."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else self._clock.monotonic() - asked_at

    def delay(self) -> float:
        """Seconds the last answer took, or has been owed for, whichever is longer."""
        return max(self._last, self.lag())

    def _answer(self) -> None:
        asked_at, self._asked_at = self._asked_at, None
        if asked_at is not None:
            self._last = self._clock.monotonic() - asked_at


class Punctual(H11Protocol):
    """A connection that is cut when a request on it is not over in time: whoever sends half of one, or none, would keep
    one of the process's descriptors for ever."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        self._expect()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._over()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over()
        super().connection_lost(exc)

    @property
    def unfinished(self) -> bool:
        """A request, or the first of them, is not over yet."""
        return self._late is not None

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(REQUEST_WITHIN, self.transport.abort)

    def _over(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


_bound: weakref.WeakSet[RunnerPort] = weakref.WeakSet()


class RunnerPort:
    """One listening socket and its server. `bind` first, then `serve` on the keeper's loop until `close`."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        status: Callable[[], Mapping[str, object]],
        metrics: Callable[[], str] | None = None,
        hints: Callable[[Mapping[str, str], bytes], int] | None = None,
        advertise: str | None = None,
    ) -> None:
        """host: the address to listen on. port: 0 takes any free one. advertise: the host others reach it by,
        default the same. status, metrics: what /status and /metrics show; called on the keeper's thread, so they read
        snapshots only. hints: takes headers and body of a post there and says what to answer; called there too."""
        self._host = host
        self._port = port
        self._advertise = advertise or host
        self._status = status
        self._metrics = metrics
        self._hints = hints
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def bind(self) -> str:
        """Take the port and return the address that others use, ``host:port``.

        Safe to call twice. Raises `PortTaken` when somebody has the port, `ConfigurationError` for a host that is
        not this machine's.
        """
        if self._socket is not None:
            return self.address
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, place = found[0]
            listening = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # also a name that can be none of a host
            raise ConfigurationError(self._cannot_listen(error)) from error
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"port {self._port} on {self._host} is taken by another process: stop that one, or choose "
                    "another with PERDURE_RUNNER_PORT (0 takes any free port)"
                ) from error
            raise ConfigurationError(self._cannot_listen(error)) from error
        listening.setblocking(False)
        self._socket = listening
        _bound.add(self)
        return self.address

    @property
    def address(self) -> str:
        """``host:port`` as others use it; the real port once bound."""
        port = self._port if self._socket is None else self._socket.getsockname()[1]
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"{host}:{port}"

    async def serve(self, unready: Callable[[], str | None]) -> None:
        """Begin to serve, on the running loop. unready: why the runner is not ready, None when it is."""
        self.bind()
        assert self._socket is not None
        config = uvicorn.Config(
            self._app(unready),
            http=Punctual,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
        )
        config.load()
        # Only the listening half of uvicorn: its `serve` would also want the process's signals, wake up ten times
        # a second, and write lines that look like those of an application's own server.
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([self._socket])
        self._server = server

    async def close(self) -> None:
        """Stop listening. Safe to call twice, and before `serve`."""
        server, listening = self._server, self._socket
        self._server = self._socket = None
        if server is not None:
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
                if isinstance(connection, Punctual) and connection.unfinished:
                    connection.transport.abort()
        if listening is not None:
            listening.close()

    def _forget(self) -> None:
        """In a process that was forked off: with its copy of the socket it would keep the port beyond our end."""
        if self._socket is not None:
            self._socket.close()

    def _cannot_listen(self, error: OSError | UnicodeError) -> str:
        reason = getattr(error, "strerror", None) or str(error)
        return (
            f"cannot listen on {self._host}:{self._port}: {reason}; PERDURE_RUNNER_HOST (or POD_IP) must be "
            "an address of this machine and PERDURE_RUNNER_PORT a port it may use"
        )

    def _app(self, unready: Callable[[], str | None]) -> Starlette:
        async def livez(request: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def readyz(request: Request) -> Response:
            reason = unready()
            if reason is None:
                return PlainTextResponse("ok\n")
            return PlainTextResponse(f"{reason}\n", status_code=503)

        async def status(request: Request) -> Response:
            try:
                text = json.dumps(dict(self._status()), default=str)
            except Exception as error:
                log.exception("port.status-failed")
                return PlainTextResponse(f"status failed: {error!r}\n", status_code=500)
            return Response(text, media_type="application/json")

        async def metrics(request: Request) -> Response:
            if self._metrics is None:
                return PlainTextResponse("no metrics here\n", status_code=404)
            return Response(self._metrics(), media_type="text/plain; version=0.0.4")

        async def hints(request: Request) -> Response:
            if self._hints is None:
                return Response(status_code=404)
            body = await _bounded_body(request)
            if body is None:
                return Response(status_code=413)
            return Response(status_code=self._hints(request.headers, body))

        return Starlette(
            routes=[
                Route("/livez", livez),
                Route("/readyz", readyz),
                Route("/status", status),
                Route("/metrics", metrics),
                Route("/hints", hints, methods=["POST"]),
            ]
        )


def _in_copy() -> None:
    for port in list(_bound):
        port._forget()


os.register_at_fork(after_in_child=_in_copy)


async def _bounded_body(request: Request) -> bytes | None:
    """None: there is more of it than anybody has to say, or its sender has gone."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_POST:
                return None
    except ClientDisconnect:  # nobody is there to be told
        return None
    return body
