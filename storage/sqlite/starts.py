"""Starts, messages, and what an operator does to a run nobody holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.storage.clock import from_micros
from perdure.storage.model import (
    Mailbox,
    Message,
    MessageKind,
    NewRun,
    RunStatus,
    SendOutcome,
    SendStatus,
    StartOutcome,
)
from perdure.storage.sqlite.transaction import Transaction, as_list, storable


def start_runs(tx: Transaction, runs: Sequence[NewRun]) -> list[StartOutcome]:
    """Writers come one at a time, so what the look-up does not find cannot appear before the insert."""
    ids = as_list(sorted({run.run_id for run in runs}))
    known = {row[0]: row[1:] for row in tx.rows("find_runs", {"run_ids": ids})}
    fresh: dict[str, NewRun] = {}
    for run in runs:
        if run.run_id not in known:
            fresh.setdefault(run.run_id, run)
    rows = [_run_values(fresh[run_id], tx.now) for run_id in sorted(fresh)]
    for part in ("start.run", "start.fence", "start.wake"):
        tx.many(part, rows)
    return [_outcome(run, fresh.get(run.run_id), known) for run in runs]


def _run_values(run: NewRun, now: int) -> dict[str, str | int | None]:
    text = {
        name: storable(getattr(run, name), f"run {run.run_id!r}: {name}")
        for name in (
            "workflow",
            "source",
            "tenant",
            "subject",
            "tags",
            "trace",
            "parent_id",
            "payload",
        )
    }
    return {
        **text,
        "run_id": run.run_id,
        "slot": run.slot,
        "version": run.version,
        "seed": run.seed,
        "format": run.format,
        "start_token": run.start_token,
        "now": now,
    }


def _outcome(
    run: NewRun, fresh: NewRun | None, known: Mapping[str, tuple[str, str, int]]
) -> StartOutcome:
    if fresh is not None:
        return StartOutcome(run.run_id, fresh is run, fresh.workflow, RunStatus.PENDING)
    workflow, status, token = known[run.run_id]
    return StartOutcome(run.run_id, token == run.start_token, workflow, RunStatus(status))


def send_message(tx: Transaction, message: Message, mailbox_limit: int) -> SendOutcome:
    """Insert and bump in one transaction (R6)."""
    key = {"run_id": message.run_id, "message_id": message.message_id}
    wake = tx.row("signal.wake", key)
    if wake is None:
        ended = tx.row("signal.ended", key)
        if ended is None:
            return SendOutcome(SendStatus.UNKNOWN_RUN)
        return SendOutcome(SendStatus.ENDED, ended[0])
    slot, wake_seq, known, unread = wake
    if known:
        return SendOutcome(SendStatus.DUPLICATE, slot)
    if unread >= mailbox_limit:
        return SendOutcome(SendStatus.FULL, slot)
    what = f"message {message.message_id!r} to run {message.run_id!r}"
    storable(message.message_id, what)
    values = {
        **key,
        "wake_seq": wake_seq + 1,
        "kind": message.kind.value,
        "name": storable(message.name, what),
        "body": storable(message.body, what),
        "format": message.format,
        "now": tx.now,
    }
    tx.run("signal.store", values)
    tx.run("signal.wake_up", values)
    return SendOutcome(SendStatus.DELIVERED, slot)


def read_mailboxes(tx: Transaction, run_ids: Sequence[str]) -> dict[str, Mailbox]:
    wake_seqs: dict[str, int] = {}
    unread: defaultdict[str, list[Message]] = defaultdict(list)
    for row in tx.rows("mailbox", {"run_ids": as_list(sorted(set(run_ids)))}):
        run_id, wake_seqs[row[0]] = row[0], row[1]
        if row[2] is not None:
            unread[run_id].append(_message(run_id, row[2:]))
    now = from_micros(tx.now)
    return {run_id: Mailbox(seq, tuple(unread[run_id]), now) for run_id, seq in wake_seqs.items()}


def _message(run_id: str, row: tuple[str, str, str, str | None, int, int, int]) -> Message:
    message_id, kind, name, body, wake_seq, sent_at, format_number = row
    return Message(
        run_id=run_id,
        message_id=message_id,
        kind=MessageKind(kind),
        name=name,
        body=body,
        wake_seq=wake_seq,
        sent_at=from_micros(sent_at),
        format=format_number,
    )


def cancel_unentered(tx: Transaction, run_id: str, batch_id: int, reason: str | None) -> bool:
    """True also when this very call, sent before, had arrived (R9)."""
    values = {"run_id": run_id, "batch_id": batch_id, "reason": reason, "now": tx.now}
    found = tx.row("cancel_unentered.find", values)
    if found is None:
        return tx.row("cancel_unentered.settle", values) is not None
    storable(reason, f"run {run_id!r}: the reason of the cancel")
    tx.run("cancel_unentered.end", {**values, "entered_at": found[1]})
    for part in ("end_run.fence", "end_run.wake", "end_run.messages"):
        tx.run(part, values)
    return True


def hold_run(tx: Transaction, run_id: str, batch_id: int, reason: str | None) -> bool:
    """True also when this very call, sent before, had arrived (R9)."""
    values = {"run_id": run_id, "batch_id": batch_id, "reason": reason, "now": tx.now}
    found = tx.row("hold.find", values)
    if found is None:
        return False
    hold, claim_id, last_batch = found
    if hold is not None or last_batch == batch_id:
        return True
    if claim_id is not None:
        return False
    storable(reason, f"run {run_id!r}: the reason of the suspend")
    for part in ("hold_run.fence", "hold_run.wake", "hold_run.event"):
        tx.run(part, values)
    return True


def release_hold(tx: Transaction, run_id: str, batch_id: int) -> bool:
    """True also when this very call, sent before, had arrived (R9)."""
    values = {"run_id": run_id, "batch_id": batch_id, "now": tx.now}
    found = tx.row("hold.find", values)
    if found is None:
        return False
    hold, claim_id, last_batch = found
    if hold is None:
        return bool(last_batch == batch_id) or _withdraw_suspend(tx, values)
    if claim_id is not None:
        return False
    for part in ("release_hold.fence", "release_hold.wake", "suspend.take", "release_hold.event"):
        tx.run(part, values)
    return True


def _withdraw_suspend(tx: Transaction, values: Mapping[str, Any]) -> bool:
    """Take back what asked for a hold that has not come; the mailbox has changed, so a park under way is refused."""
    if not tx.rows("suspend.take", values):
        return False
    tx.run("suspend.wake", values)
    tx.run("release_hold.event", values)
    return True
