"""What each caller was told, compared with what the tables hold when everybody has ended.

The audit history has the checkers of `tests.harness.checkers`; here stands what only the callers know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perdure.storage.model import (
    Entry,
    Mailbox,
    MessageKind,
    Park,
    RunRecord,
    RunStatus,
    SendStatus,
    Verdict,
)
from tests.interleaving.notes import DURABLE, Attempt, Claiming, Notes, Sending


@dataclass(frozen=True, slots=True)
class Facts:
    """A run as it is in the end. mailbox: None once it has ended."""

    record: RunRecord
    journal: Sequence[Entry]
    mailbox: Mailbox | None
    db_now: float

    @property
    def unread(self) -> list[str]:
        return [] if self.mailbox is None else [m.message_id for m in self.mailbox.messages]


def lies(notes: Notes, facts: Mapping[str, Facts]) -> Iterator[str]:
    """One sentence for each thing that is not as somebody was told."""
    for key, attempt in notes.attempts.items():
        for what in _of_write(notes, attempt, facts[attempt.write.run_id]):
            yield f"{key} was told {attempt.told}, but {what}"
    for key, sent in notes.sendings.items():
        for what in _of_message(notes, sent, facts[sent.message.run_id]):
            yield f"{key} was told {sent.status}, but {what}"
    yield from _of_rivals(notes)
    for key, claiming in notes.claims.items():
        if claiming.run is not None:
            for what in _of_claim(notes, claiming, facts[claiming.run.run_id]):
                yield f"{key} was told of a claim, but {what}"
    yield from _of_cancels(notes, facts)
    yield from _of_starts(notes, facts)
    yield from _of_births(notes, facts)
    for found in facts.values():
        yield from _of_run(notes, found)


def _of_write(notes: Notes, attempt: Attempt, found: Facts) -> Iterator[str]:
    record, write, verdict = found.record, attempt.write, attempt.verdict
    durable = verdict in DURABLE
    for entry in write.entries:
        if (entry in found.journal) != durable:
            yield f"entry {entry.key} is {'missing' if durable else 'there'}"
    end = attempt.ending
    if end is not None and (record.status is end.status) != durable:
        yield f"the run is {record.status}"
    if verdict is Verdict.AGAIN:
        yield "sending it again never helped"
    if verdict is Verdict.FENCED and record.claim_id == write.claim_id:
        yield "it still has the run"
    others = {c.run.claim_id for c in notes.claims.values() if c.run is not None}
    if verdict is Verdict.PARKED:
        if record.claim_id == write.claim_id:
            yield "it still has the run"
        park = write.outcome
        assert isinstance(park, Park)
        left_alone = record.status is RunStatus.SUSPENDED and not others
        if left_alone and park.wake_at is not None and record.wake_at is None:
            yield "its timer is gone"
        alarmed = bool(notes.sendings) or _resumed(notes)
        early = park.wake_at is not None and park.wake_at > found.db_now
        if record.status is RunStatus.RUNNING and early and not alarmed:
            yield "somebody has the run before its time"
        if left_alone and park.reason.hold and not _resumed(notes) and record.hold is None:
            yield "its hold is gone"
    later = [a for a in notes.attempts.values() if a.write.revision > write.revision]
    stays = verdict is Verdict.PARK_REFUSED or (durable and write.outcome is None)
    if stays and not others and not later and record.claim_id != write.claim_id:
        yield f"the run's claim is {record.claim_id}"


def _resumed(notes: Notes) -> bool:
    return any(asking.resume and asking.answer for asking in notes.askings.values())


def _of_message(notes: Notes, sent: Sending, found: Facts) -> Iterator[str]:
    message_id, record = sent.message.message_id, found.record
    taken = {
        name
        for attempt in notes.attempts.values()
        if attempt.verdict in DURABLE
        for name, _ in attempt.write.consumed
    }
    there = message_id in found.unread or message_id in taken or record.status.final
    if sent.status is SendStatus.DELIVERED and not there:
        yield "the message is nowhere"
    if message_id in found.unread and message_id in taken:
        yield "the message is unread though it was taken"
    if sent.status is SendStatus.ENDED and not record.status.final:
        yield f"the run is {record.status}"
    if sent.status in (None, SendStatus.UNKNOWN_RUN, SendStatus.FULL):
        yield "that cannot be"


def _of_claim(notes: Notes, claiming: Claiming, found: Facts) -> Iterator[str]:
    run = claiming.run
    assert run is not None
    if len(found.journal) < run.next_seq - 1:
        yield f"the journal has {len(found.journal)} entries, not {run.next_seq - 1}"
    read = claiming.journal
    if read is not None:
        if len(read) != run.next_seq - 1:
            yield f"it read {len(read)} entries where {run.next_seq} comes next"
        if list(read) != list(found.journal[: len(read)]):
            yield "the journal is not what it read"
        own = [a for a in notes.attempts.values() if a.write.claim_id == run.claim_id]
        added = sum(len(a.write.entries) for a in own if a.verdict in DURABLE)
        if len(found.journal) > len(read) + added:
            yield "somebody else wrote after it"


def _of_rivals(notes: Notes) -> Iterator[str]:
    """A runner is not given a run again that it has."""
    given = Counter(
        (claiming.request.runner_id, claiming.run.run_id)
        for claiming in notes.claims.values()
        if claiming.run is not None
    )
    parked = any(attempt.verdict is Verdict.PARKED for attempt in notes.attempts.values())
    yield from (f"{run_id} was claimed {n} times by {me}" for (me, run_id), n in given.items()
                if n > 1 and not parked)  # fmt: skip


def _of_cancels(notes: Notes, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Of several calls that end a run at once, one does, and says so whenever it is asked."""
    asked = {key: a for key, a in notes.askings.items() if not (a.resume or a.suspend)}
    if not asked:
        return
    cancelled = facts[notes.key].record.status is RunStatus.CANCELLED
    ended = {asking.batch_id for asking in asked.values() if asking.answer}
    if len(ended) != cancelled:
        yield f"{sorted(asked)}: {len(ended)} ended the run, but cancelled is {cancelled}"


def _of_starts(notes: Notes, facts: Mapping[str, Facts]) -> Iterator[str]:
    tokens = set()
    for key, start in notes.starts.items():
        if start.outcome is None:
            continue
        mine = facts[start.run.run_id].record.tags == start.run.tags
        if start.outcome.created != mine:
            yield f"{key} was told created={start.outcome.created}, but the run is another's"
        if start.outcome.created:
            tokens.add(start.run.start_token)
    if notes.starts and len(tokens) != 1:
        yield f"{len(tokens)} starts created the run"


def _of_births(notes: Notes, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Whoever has a run that was born claimed knows of it, and is one."""
    wished = [start.run for start in notes.starts.values() if start.run.birth is not None]
    if not wished:
        return
    told = {s.outcome.claimed for s in notes.starts.values() if s.outcome and s.outcome.claimed}
    claims = [c for c in notes.claims.values() if c.run is not None]
    record = facts[notes.key].record
    known = {run.claim_id for run in told} | {c.run.claim_id for c in claims if c.run is not None}
    if record.claim_id is not None and record.claim_id not in known:
        yield f"nobody knows of the claim {record.claim_id} that the run was born with"
    for run in told:
        if not claims and record.claim_id != run.claim_id:
            yield f"it was born with the claim {run.claim_id}, but has {record.claim_id}"
        if any(claim.request.runner_id == record.runner_id == notes.a for claim in claims):
            yield "runner a was told of its birth and has claimed it as well"


def _of_run(notes: Notes, found: Facts) -> Iterator[str]:
    record = found.record
    if record.status.final:
        if record.unread:
            yield f"{record.run_id} has ended and {record.unread} messages are left behind"
        return
    if record.wake_at is not None and not record.stray and record.status is not RunStatus.RUNNING:
        wait = record.wake_at - found.db_now
        if 10 < wait < 10_000:
            yield f"{record.run_id} is put off for {wait:.0f} s, and is no stray"
    assert found.mailbox is not None
    stored = {s.message.message_id for s in notes.sendings.values()
              if s.message.run_id == record.run_id and s.status is SendStatus.DELIVERED}  # fmt: skip
    told = sum(
        1
        for attempt in notes.attempts.values()
        if attempt.ending is not None
        and attempt.verdict in DURABLE
        and attempt.ending.parent_id == record.run_id
    )
    came = len(stored) + told + notes.seen.get("before", 0)
    if not came <= found.mailbox.wake_seq <= came + _resumed(notes):  # a suspend taken back is news
        yield f"wake_seq is {found.mailbox.wake_seq} after {came} messages"
    twice = [name for name, n in Counter(found.unread).items() if n > 1]
    if twice:
        yield f"{twice} stand twice in the mailbox"
    children = [m for m in found.mailbox.messages if m.kind is MessageKind.CHILD]
    order = [message.wake_seq for message in found.mailbox.messages]
    if order != sorted(set(order)):
        yield f"messages have the numbers {order}"
    if record.status is RunStatus.SUSPENDED and record.hold is None and found.unread:
        if not record.stray and (record.wake_at is None or record.wake_at > found.db_now):
            yield f"it sleeps until {record.wake_at} over {found.unread}"
        if len(children) > told:
            yield "a child that has not ended reported"
    if record.hold is not None and record.wake_at is not None:
        yield "a held run is due"
    yield from _of_holds(notes, found)


def _of_holds(notes: Notes, found: Facts) -> Iterator[str]:
    """Who suspends gets the run on hold, or a message that will; who resumes gets neither."""
    held = found.record.hold is not None
    asked = any(message.kind is MessageKind.SUSPEND for message in found.mailbox.messages)  # type: ignore[union-attr]
    suspended = any(asking.suspend for asking in notes.askings.values())
    if suspended and not _resumed(notes) and not (held or asked):
        yield "it was suspended and nothing holds it"
    if _resumed(notes) and not suspended and (held or asked):
        yield "it was resumed and is held again"
