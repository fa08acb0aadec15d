"""As much of PostgreSQL's wire protocol (version 3) as the proxy has to understand."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

SSL_REQUEST = 80877103
GSSENC_REQUEST = 80877104
CANCEL_REQUEST = 80877102

NAMED = re.compile(r"\s*(?:--|/\*)\s*(?:name)?\s*:\s*([\w.-]+)")


def statement_name(sql: str) -> str:
    """The name in the comment a statement begins with (``-- name: commit``), else its first word."""
    found = NAMED.match(sql)
    if found:
        return found.group(1)
    words = sql.split(None, 1)
    return words[0].strip(";").lower() if words else ""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """One message: its type letter, and all its bytes as they go over the wire."""

    kind: str
    raw: bytes

    @property
    def body(self) -> bytes:
        return self.raw[5:]


@dataclass(slots=True)
class Framer:
    """Cuts a byte stream into messages; incomplete ones wait for more bytes."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[WireMessage]:
        self._rest += data
        while len(self._rest) >= 5:
            end = 1 + int.from_bytes(self._rest[1:5], "big")
            if len(self._rest) < end:
                return
            raw = bytes(self._rest[:end])
            del self._rest[:end]
            yield WireMessage(chr(raw[0]), raw)


@dataclass(frozen=True, slots=True)
class Statement:
    """One execution as the server sees it. ``name``: see :func:`statement_name`."""

    sql: str

    @property
    def name(self) -> str:
        return statement_name(self.sql)


@dataclass(slots=True)
class StatementMap:
    """Follows Parse, Bind and Close of one connection, so that each Execute has its SQL text."""

    _prepared: dict[bytes, str] = field(default_factory=dict)
    _portals: dict[bytes, str] = field(default_factory=dict)

    def executed(self, message: WireMessage) -> Statement | None:
        """Take note of a message from the client; the statement, if it executes one."""
        body = message.body
        if message.kind == "Q":
            return Statement(_text(body))
        if message.kind == "P":
            name, _, rest = body.partition(b"\0")
            self._prepared[name] = _text(rest)
        elif message.kind == "B":
            portal, _, rest = body.partition(b"\0")
            self._portals[portal] = self._prepared.get(rest.partition(b"\0")[0], "")
        elif message.kind == "E":
            return Statement(self._portals.get(body.partition(b"\0")[0], ""))
        elif message.kind == "C":
            known = self._prepared if body[:1] == b"S" else self._portals
            known.pop(body[1:].partition(b"\0")[0], None)
        return None


def _text(body: bytes) -> str:
    return body.partition(b"\0")[0].decode("utf-8", "replace")


def startup_code(packet: bytes) -> int:
    """The version or request code of a connection's first packet."""
    return int.from_bytes(packet[4:8], "big")


def startup_parameters(packet: bytes) -> dict[str, str]:
    """``user``, ``database``, ``application_name`` … of a startup packet."""
    words = [word.decode("utf-8", "replace") for word in packet[8:].rstrip(b"\0").split(b"\0")]
    return dict(zip(words[::2], words[1::2], strict=False))


def backend_pid(key_data: WireMessage) -> int:
    """The backend's process id from a BackendKeyData message."""
    pid: int = struct.unpack("!i", key_data.body[:4])[0]
    return pid


def error_text(response: WireMessage) -> str:
    """``SQLSTATE message`` of an ErrorResponse."""
    fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in response.body.split(b"\0")}
    return f"{fields.get(b'C', '?????')} {fields.get(b'M', '')}"
