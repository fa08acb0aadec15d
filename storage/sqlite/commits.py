"""Commits behind the fence, and what became of those whose answer was lost."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.storage.clock import to_micros
from perdure.storage.errors import DataRefused
from perdure.storage.model import FORMAT, Entry, Finish, Park, RunWrite, Verdict
from perdure.storage.sqlite.claims import require_alive
from perdure.storage.sqlite.transaction import Transaction, as_list, storable


@dataclass(frozen=True, slots=True)
class Fenced:
    """A write whose fence matched, and the fence row after it."""

    write: RunWrite
    next_seq: int
    revision: int
    entered_at: int


@dataclass(frozen=True, slots=True)
class Found:
    """A run's row and fence as they stand, for a write that was not applied."""

    last_claim: int | None
    last_batch: int | None
    live: bool
    claim_id: int | None
    revision: int | None
    fence_batch: int | None


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
        [run_id, write.claim_id, write.revision, len(write.entries)]
        for run_id, write in sorted(by_run.items())
    )
    rows = tx.rows("commit_writes.fence", {"batch": batch, "batch_id": batch_id})
    fenced = {row[0]: Fenced(by_run[row[0]], *row[1:]) for row in sorted(rows)}
    for item in fenced.values():
        _require_sequence(item)
    return fenced


def _require_sequence(item: Fenced) -> None:
    """A journal without gaps is what a replay rests on."""
    entries = item.write.entries
    first = item.next_seq - len(entries)
    for expected, entry in enumerate(entries, start=first):
        if entry.seq != expected:
            raise DataRefused(
                f"run {item.write.run_id!r}: entry {entry.seq} was sent where {expected} comes next"
            )


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
    tx.many("commit_writes.entry", entries)
    tx.many("commit_writes.consume", consumed)
    tx.many("commit_writes.event", events)


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
    finishes = {
        run_id: (item, item.write.outcome)
        for run_id, item in fenced.items()
        if isinstance(item.write.outcome, Finish)
    }
    parks = {
        run_id: item.write.outcome
        for run_id, item in fenced.items()
        if isinstance(item.write.outcome, Park)
    }
    verdicts = dict.fromkeys(fenced, Verdict.COMMITTED)
    if not finishes and not parks:
        return verdicts
    children = _children(finishes)
    wake_seqs: dict[str, int] = dict(
        tx.rows("commit_writes.wakes", {"run_ids": as_list(sorted({*parks, *children}))})
    )
    told = {
        parent: of
        for parent, of in children.items()
        if parent in wake_seqs and parent not in finishes
    }
    for run_id, park in parks.items():
        parked = park.reason.hold or (wake_seqs.get(run_id) == park.seen and run_id not in told)
        verdicts[run_id] = Verdict.PARKED if parked else Verdict.PARK_REFUSED
    _park(
        tx, {run_id: park for run_id, park in parks.items() if verdicts[run_id] is Verdict.PARKED}
    )
    _tell_parents(tx, told, wake_seqs)
    _finish(tx, batch_id, finishes)
    return verdicts


def _children(
    finishes: Mapping[str, tuple[Fenced, Finish]],
) -> dict[str, list[tuple[str, str | None]]]:
    """parent → (child, result), in the children's order."""
    children: defaultdict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for run_id, (_, finish) in sorted(finishes.items()):
        if finish.parent_id is not None:
            children[finish.parent_id].append((run_id, finish.result))
    return children


def _park(tx: Transaction, parks: Mapping[str, Park]) -> None:
    rows = [
        {
            "run_id": run_id,
            "reason": park.reason.value,
            "hold": park.reason.value if park.reason.hold else None,
            "wake_at": None
            if park.wake_at is None or park.reason.hold
            else to_micros(park.wake_at),
        }
        for run_id, park in parks.items()
    ]
    tx.many("commit_writes.park_fence", rows)
    tx.many("commit_writes.park_wake", rows)


def _tell_parents(
    tx: Transaction, told: Mapping[str, list[tuple[str, str | None]]], wake_seqs: Mapping[str, int]
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
                "name": child,
                "body": result,
                "now": tx.now,
            }
            for place, (child, result) in enumerate(children, start=1)
        ]
        bumps.append({"run_id": parent, "wake_seq": before + len(children), "now": tx.now})
    tx.many("commit_writes.tell_parent", messages)
    tx.many("commit_writes.wake_parent", bumps)


def _finish(tx: Transaction, batch_id: int, finishes: Mapping[str, tuple[Fenced, Finish]]) -> None:
    rows = [_finish_values(tx, batch_id, item, finish) for item, finish in finishes.values()]
    for part in ("commit_writes.finish", "end_run.fence", "end_run.wake", "end_run.messages"):
        tx.many(part, rows)


def _finish_values(tx: Transaction, batch_id: int, item: Fenced, finish: Finish) -> dict[str, Any]:
    what = f"run {item.write.run_id!r}: the "
    error_type, error_message = error_columns(finish.error)
    return {
        "run_id": item.write.run_id,
        "status": finish.status.value,
        "result": storable(finish.result, what + "result"),
        "result_format": None if finish.result is None else FORMAT,
        "error": storable(finish.error, what + "error"),
        "error_type": error_type,
        "error_message": error_message,
        "reason": storable(finish.reason, what + "reason"),
        "entered_at": item.entered_at,
        "now": tx.now,
        "claim_id": item.write.claim_id,
        "batch_id": batch_id,
        "revision": item.revision,
    }


def error_columns(error: str | None) -> tuple[str | None, str | None]:
    """Type and message of a recorded error, for plain SQL; (None, None) where it does not have them."""
    if error is None:
        return None, None
    try:
        recorded = json.loads(error)
    except ValueError:
        return None, None
    if not isinstance(recorded, dict):
        return None, None
    return _plain_text(recorded.get("type")), _plain_text(recorded.get("message"))


def _plain_text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    return value.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def settle_writes(tx: Transaction, batch_id: int, writes: Sequence[RunWrite]) -> dict[str, Verdict]:
    """Read what is there. Under the write lock it is the last word: nothing of ours can still be on its way."""
    run_ids = as_list(sorted(write.run_id for write in writes))
    found = {row[0]: Found(*row[1:]) for row in tx.rows("settle_writes", {"run_ids": run_ids})}
    return {write.run_id: verdict(write, batch_id, found.get(write.run_id)) for write in writes}


def verdict(write: RunWrite, batch_id: int, found: Found | None) -> Verdict:
    """What became of a write, given the rows as they stand. ``last_batch`` equal means: it was committed (R9)."""
    if found is None:
        return Verdict.FENCED
    if not found.live:
        mine = found.last_batch == batch_id and found.last_claim == write.claim_id
        return Verdict.COMMITTED if mine and isinstance(write.outcome, Finish) else Verdict.FENCED
    mine = found.claim_id == write.claim_id
    if found.fence_batch == batch_id:
        if isinstance(write.outcome, Park):
            return Verdict.PARK_REFUSED if mine else Verdict.PARKED
        return Verdict.COMMITTED if mine else Verdict.FENCED
    if not mine:
        return Verdict.FENCED
    return Verdict.AGAIN if found.revision == write.revision else Verdict.RELOAD
