"""Commits behind the fence, and what became of those whose answer was lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.storage.clock import to_micros
from perdure.storage.errors import DataRefused
from perdure.storage.model import FORMAT, Entry, Finish, Park, RunEvent, RunWrite, Verdict
from perdure.storage.recorded import error_summary
from perdure.storage.sqlite.claims import require_alive
from perdure.storage.sqlite.transaction import Row, Transaction, as_list, storable
from perdure.storage.verdicts import FenceSeen, judge


@dataclass(frozen=True, slots=True)
class Fenced:
    """A write whose fence matched, and the fence row after it."""

    write: RunWrite
    revision: int
    entered_at: int


def commit_writes(
    tx: Transaction, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
) -> dict[str, Verdict]:
    """Fence first; what the fence refused is read, never guessed."""
    require_alive(tx, runner_id)
    by_run = {write.run_id: write for write in writes}
    if len(by_run) < len(writes):
        raise DataRefused("a batch holds two writes of one run: merge them before sending")
    fenced = _fence(tx, batch_id, by_run)
    _journal(tx, fenced.values())
    verdicts = _outcomes(tx, batch_id, fenced)
    missing = [write for run_id, write in by_run.items() if run_id not in fenced]
    return verdicts | (settle_writes(tx, batch_id, missing) if missing else {})


def _fence(tx: Transaction, batch_id: int, by_run: Mapping[str, RunWrite]) -> dict[str, Fenced]:
    batch = as_list(
        [run_id, write.claim_id, write.revision, len(write.entries), _first_seq(write)]
        for run_id, write in sorted(by_run.items())
    )
    rows = tx.rows("commit.fence", {"batch": batch, "batch_id": batch_id})
    return {row[0]: Fenced(by_run[row[0]], *row[1:]) for row in sorted(rows)}


def _first_seq(write: RunWrite) -> int | None:
    """Where the entries continue the journal. A journal without gaps is what a replay rests on."""
    if not write.entries:
        return None
    first = write.entries[0].seq
    for expected, entry in enumerate(write.entries, start=first):
        if entry.seq != expected:
            raise DataRefused(
                f"run {write.run_id!r}: entry {entry.seq} stands where {expected} comes next"
            )
    return first


def _journal(tx: Transaction, fenced: Iterable[Fenced]) -> None:
    """Entries, consumed messages and events of every fenced write, in run order."""
    entries: list[tuple[Any, ...]] = []
    consumed: list[tuple[Any, ...]] = []
    events: list[tuple[Any, ...]] = []
    for item in fenced:
        write = item.write
        entries += (_entry_values(write, entry, tx.now) for entry in write.entries)
        consumed += ((seq, write.run_id, message_id) for message_id, seq in write.consumed)
        events += (
            (
                write.run_id,
                event.type,
                to_micros(event.at),
                storable(event.detail, f"an event of {write.run_id!r}"),
            )
            for event in write.events
        )
    tx.many("commit.entry", entries)
    tx.many("commit.consume", consumed)
    tx.many("commit.event", events)


def _entry_values(write: RunWrite, entry: Entry, now: int) -> tuple[Any, ...]:
    what = f"run {write.run_id!r}, entry {entry.seq} ({entry.key!r})"
    return (
        write.run_id,
        entry.seq,
        storable(entry.key, what),
        entry.kind.value,
        entry.attempt,
        entry.status,
        entry.input_hash,
        storable(entry.input, what),
        storable(entry.output, what),
        storable(entry.error, what),
        entry.format,
        write.claim_id,
        to_micros(entry.at),
        None if entry.started_at is None else to_micros(entry.started_at),
        now,
    )


def _outcomes(tx: Transaction, batch_id: int, fenced: Mapping[str, Fenced]) -> dict[str, Verdict]:
    """Parks, then the parents of those that finish, then the finishes."""
    parks: dict[str, Park] = {}
    finishes: dict[str, Finish] = {}
    for run_id, item in fenced.items():
        if isinstance(item.write.outcome, Park):
            parks[run_id] = item.write.outcome
        elif isinstance(item.write.outcome, Finish):
            finishes[run_id] = item.write.outcome
    verdicts = dict.fromkeys(fenced, Verdict.COMMITTED)
    if not parks and not finishes:
        return verdicts
    children = _children(finishes)
    looked_at = as_list(sorted({*parks, *children}))
    wake_seqs: dict[str, int] = dict(tx.rows("commit.wakes", {"run_ids": looked_at}))
    told = {parent: ended for parent, ended in children.items() if parent in wake_seqs}
    parked = {}
    for run_id, park in parks.items():
        # Refused if a message came after `seen`, also one that this very batch brings; a forced hold never is.
        unseen = wake_seqs.get(run_id) != park.seen or run_id in told
        verdicts[run_id] = Verdict.PARK_REFUSED
        if park.reason.forced or not unseen:
            verdicts[run_id] = Verdict.PARKED
            parked[run_id] = park
    _park(tx, parked)
    _tell_parents(tx, told, wake_seqs)
    _finish(tx, batch_id, [(fenced[run_id], finish) for run_id, finish in finishes.items()])
    return verdicts


def _children(finishes: Mapping[str, Finish]) -> dict[str, list[tuple[str, Finish]]]:
    """parent → its children in their order; parents that end in the same batch are not told."""
    children: defaultdict[str, list[tuple[str, Finish]]] = defaultdict(list)
    for run_id, finish in sorted(finishes.items(), key=lambda item: item[0]):
        if finish.parent_id is not None and finish.parent_id not in finishes:
            children[finish.parent_id].append((run_id, finish))
    return children


def _park(tx: Transaction, parks: Mapping[str, Park]) -> None:
    rows = []
    for run_id, park in parks.items():
        timed = park.wake_at is not None and not park.reason.hold
        rows.append(
            {
                "run_id": run_id,
                "reason": park.reason.value,
                "hold": park.reason.value if park.reason.hold else None,
                "wake_at": to_micros(park.wake_at or 0.0) if timed else None,
                "now": tx.now,
            }
        )
    tx.many("commit.park_fence", rows)
    tx.many("commit.park_wake", rows)


def _tell_parents(
    tx: Transaction, told: Mapping[str, list[tuple[str, Finish]]], wake_seqs: Mapping[str, int]
) -> None:
    """One message for each child, one bump for each parent."""
    messages = []
    bumps = []
    for parent, children in sorted(told.items()):
        before = wake_seqs[parent]
        messages += [
            {
                "run_id": parent,
                "message_id": f"child:{child}",
                "wake_seq": before + place,
                "status": finish.status.value,
                "body": finish.error if finish.result is None else finish.result,
                "now": tx.now,
            }
            for place, (child, finish) in enumerate(children, start=1)
        ]
        bumps.append({"run_id": parent, "wake_seq": before + len(children), "now": tx.now})
    tx.many("commit.tell_parent", messages)
    tx.many("commit.wake_parent", bumps)


def _finish(tx: Transaction, batch_id: int, finishes: Sequence[tuple[Fenced, Finish]]) -> None:
    rows = [_finish_values(tx, batch_id, item, finish) for item, finish in finishes]
    for part in ("commit.finish", "end_run.fence", "end_run.wake", "end_run.messages"):
        tx.many(part, rows)


def _finish_values(tx: Transaction, batch_id: int, item: Fenced, finish: Finish) -> dict[str, Any]:
    what = f"run {item.write.run_id!r}: the "
    error_type, error_message = error_summary(finish.error)
    return {
        "run_id": item.write.run_id,
        "status": finish.status.value,
        "result": storable(finish.result, what + "result"),
        "result_format": None if finish.result is None else FORMAT,
        "error": storable(finish.error, what + "error"),
        "error_type": storable(error_type, what + "error's type"),
        "error_message": storable(error_message, what + "error's message"),
        "reason": storable(finish.reason, what + "reason"),
        "entered_at": item.entered_at,
        "now": tx.now,
        "claim_id": item.write.claim_id,
        "batch_id": batch_id,
        "revision": item.revision,
    }


def note_events(tx: Transaction, events: Sequence[tuple[str, RunEvent]]) -> None:
    """Lines for people, of runs that have not ended."""
    tx.many(
        "note_event",
        [
            {"run_id": run_id, "type": e.type, "at": to_micros(e.at), "detail": e.detail}
            for run_id, e in events
        ],
    )


def settle_writes(tx: Transaction, batch_id: int, writes: Sequence[RunWrite]) -> dict[str, Verdict]:
    """Read what is there. Under the write lock it is the last word: nothing of ours can still be on its way."""
    run_ids = as_list(sorted(write.run_id for write in writes))
    found = {row[0]: row[1:] for row in tx.rows("settle", {"run_ids": run_ids})}
    return {write.run_id: _judge(write, batch_id, found.get(write.run_id)) for write in writes}


def _judge(write: RunWrite, batch_id: int, row: Row | None) -> Verdict:
    if row is None:
        return judge(write, batch_id, None, None)
    ended_by, live, *fence = row
    return judge(write, batch_id, FenceSeen(*fence) if live else None, ended_by)
