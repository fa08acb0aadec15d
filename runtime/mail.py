"""What a client leaves in mailboxes and asks of runs that are under way: each settled when its answer was lost (R9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from perdure.runtime.authoring.names import check_known_id, check_label
from perdure.runtime.errors import MailboxFull, RunEnded, RunNotFound, WrongStatus
from perdure.runtime.hints import HintBus
from perdure.runtime.outcomes import Repeated
from perdure.runtime.settings import Settings
from perdure.sharding.slots import slot_of
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import UnknownOutcome
from perdure.storage.interface import RunStore
from perdure.storage.model import (
    Hint,
    HintKind,
    Message,
    MessageKind,
    RunRecord,
    RunStatus,
    SendOutcome,
    SendStatus,
)

UNLIMITED = 1 << 53
"""Of a mailbox: an operator is heard also when it is full."""


class Mail:
    """The part of `Client` that sends. opened: its store, if it is open. existing: a run, or `RunNotFound`."""

    def __init__(
        self,
        settings: Settings,
        bus: HintBus,
        clock: Clock,
        randomness: Randomness,
        *,
        opened: Callable[[], RunStore],
        existing: Callable[[str], Awaitable[RunRecord]],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._randomness = randomness
        self._opened = opened
        self._existing = existing

    async def cancel(self, run_id: str, reason: str | None) -> None:
        """See `Client.cancel`."""
        check_known_id(run_id)
        check_label("the reason of a cancel,", reason)
        batch_id = self._randomness.bits63()
        ended = await self._repeated().answer(
            lambda: self._opened().cancel_unentered(run_id, batch_id=batch_id, reason=reason)
        )
        if ended:
            self._bus.publish([Hint(HintKind.DONE, run_id, slot_of(run_id))])
            return
        message = Message(run_id, "cancel", MessageKind.CANCEL, body=reason)
        try:
            outcome = await self.send(message, limit=UNLIMITED)
        except UnknownOutcome:
            if (await self._existing(run_id)).status is not RunStatus.CANCELLED:
                raise
            return
        if outcome.status is SendStatus.ENDED:
            record = await self._existing(run_id)
            if record.status is RunStatus.CANCELLED:
                return
        self.check_sent(outcome, run_id, "cancel")

    async def suspend(self, run_id: str, reason: str | None) -> None:
        """See `Client.suspend`."""
        check_known_id(run_id)
        check_label("the reason of a suspend,", reason)
        batch_id = self._randomness.bits63()

        async def hold() -> bool:
            return await self._repeated().answer(
                lambda: self._opened().hold_run(run_id, batch_id=batch_id, reason=reason)
            )

        if await hold():
            return
        asked = Message(run_id, f"suspend:{batch_id:x}", MessageKind.SUSPEND, body=reason)
        try:
            outcome = await self.send(asked, limit=UNLIMITED)
        except UnknownOutcome:
            if not (await self._existing(run_id)).status.final:
                raise
            raise RunEnded(run_id, "suspend") from None
        self.check_sent(outcome, run_id, "suspend")
        await hold()  # it may have left memory before the message came

    async def resume(self, run_id: str) -> None:
        """See `Client.resume`."""
        check_known_id(run_id)
        batch_id = self._randomness.bits63()
        write = self._repeated()
        while not await write.answer(
            lambda: self._opened().release_hold(run_id, batch_id=batch_id)
        ):
            record = await self._existing(run_id)
            if record.hold is not None:  # since a moment ago
                continue
            if write.lost is not None and not record.status.final:
                break  # an earlier send has taken the suspend back
            raise WrongStatus(run_id, "resume", record.status, "only a run on hold can be resumed")
        slot = slot_of(run_id)
        self._bus.publish([Hint(HintKind.START, run_id, slot), Hint(HintKind.WAKE, run_id, slot)])

    def _repeated(self) -> Repeated:
        return Repeated(self._clock, self._randomness, patience=2 * self._settings.storage_deadline)

    async def send(self, message: Message, *, limit: int | None = None) -> SendOutcome:
        """Waits for the run's wake row (bounded by the store); an unknown outcome is settled by the message id.

        Raises `UnknownOutcome` also when an answer was lost and the run, with its mailbox, is gone by the next try."""
        write = self._repeated()
        settings = self._settings
        most, size = settings.mailbox_limit, settings.mailbox_bytes
        if limit is not None:
            most, size = limit, limit
        outcome = await write.answer(
            lambda: self._opened().send_message(message, mailbox_limit=most, mailbox_bytes=size)
        )
        gone = outcome.status in (SendStatus.ENDED, SendStatus.UNKNOWN_RUN)
        if gone and write.lost is not None:
            raise UnknownOutcome(
                f"run {message.run_id!r} has ended since a first try, whose answer was lost: its journal "
                f"says whether it took the {message.kind} {message.name!r}"
            ) from write.lost
        if outcome.status is SendStatus.DELIVERED or outcome.status is SendStatus.DUPLICATE:
            self._bus.publish([Hint(HintKind.WAKE, message.run_id, slot_of(message.run_id))])
        return outcome

    def check_sent(self, outcome: SendOutcome, run_id: str, what: str) -> None:
        if outcome.status is SendStatus.UNKNOWN_RUN:
            raise RunNotFound(run_id)
        if outcome.status is SendStatus.ENDED:
            raise RunEnded(run_id, what)
        if outcome.status is SendStatus.FULL:
            raise MailboxFull(run_id, what, self._settings.mailbox_limit)
        if outcome.status is SendStatus.HEAVY:
            raise MailboxFull(run_id, what, self._settings.mailbox_bytes, "mailbox_bytes")
