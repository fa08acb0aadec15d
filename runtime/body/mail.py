"""Unread messages and who waits for them. A message becomes an entry only when somebody waits for it."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.runtime.body.port import MessageWait
from perdure.storage.model import Message, MessageKind


@dataclass(eq=False, slots=True)
class OpenWait:
    """A wait the body is in. deadline: run time or None."""

    key: str
    wait: MessageWait
    future: asyncio.Future[Any]
    deadline: float | None

    @property
    def answered(self) -> bool:
        """By a message or by its time-out."""
        return self.future.done() and not self.future.cancelled()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A message that can be delivered now; ``by`` is None for a cancel."""

    message: Message
    by: OpenWait | None


class Mail:
    """The mailbox as last read, less what was taken since, and the waits by the name they wait for.

    read_at: database time of the last reading; every message stored before it is known.
    """

    def __init__(self) -> None:
        self.read_at = -math.inf
        self.waits: dict[str, OpenWait] = {}
        self._by_name: dict[str, OrderedDict[str, OpenWait]] = {}
        self._unread: dict[str, deque[Message]] = {}
        self._cancel: Message | None = None
        self.unread = False
        """Whether `wanted` has anything to look at."""
        self._taken: set[str] = set()

    def replace(self, messages: Sequence[Message], read_at: float) -> None:
        """What was just read, in mailbox order. Messages taken before their entry was durable may be among them."""
        self.read_at = read_at
        self._unread = {}
        self._cancel = None
        for message in messages:
            if message.message_id in self._taken:
                continue
            if message.kind is MessageKind.SIGNAL:
                self._unread.setdefault(message.name, deque()).append(message)
            elif message.kind is MessageKind.CANCEL and self._cancel is None:
                self._cancel = message
        self.unread = bool(self._unread) or self._cancel is not None

    def open(self, wait: OpenWait) -> None:
        self.waits[wait.key] = wait
        self._by_name.setdefault(wait.wait.name, OrderedDict())[wait.key] = wait

    def close(self, wait: OpenWait) -> None:
        """The wait is over. Harmless for one that was answered."""
        if self.waits.pop(wait.key, None) is not None:
            same = self._by_name[wait.wait.name]
            del same[wait.key]
            if not same:
                del self._by_name[wait.wait.name]

    def wanted(self, *, by: float = math.inf, cancelled: bool) -> Wanted | None:
        """The first message sent at ``by`` or earlier that somebody waits for; a cancel always counts, once.

        Of one name only the oldest may be taken, by the wait that began first.
        """
        if not self.unread:
            return None
        best: Wanted | None = None
        if self._cancel is not None and not cancelled and self._cancel.sent_at <= by:
            best = Wanted(self._cancel, None)
        for name in self._names():
            queue = self._unread[name]
            message = queue[0]
            if message.sent_at <= by and (best is None or message.wake_seq < best.message.wake_seq):
                best = Wanted(message, next(iter(self._by_name[name].values())))
        return best

    def _names(self) -> Iterable[str]:
        if len(self._by_name) <= len(self._unread):
            return [name for name in self._by_name if name in self._unread]
        return [name for name in self._unread if name in self._by_name]

    def take(self, message: Message) -> None:
        """It is an entry now."""
        self._taken.add(message.message_id)
        if message is self._cancel:
            self._cancel = None
            return
        queue = self._unread[message.name]
        queue.popleft()
        if not queue:
            del self._unread[message.name]

    @property
    def cancel(self) -> Message | None:
        """The cancel that nobody was told of yet."""
        return self._cancel

    def clear(self) -> None:
        self.waits.clear()
        self._by_name.clear()
        self._unread.clear()
        self._cancel = None
        self.unread = False
