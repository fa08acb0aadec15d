"""Starts, messages, and what an operator does to a run nobody holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.storage import births
from perdure.storage.clock import from_micros
from perdure.storage.model import (
    Birth,
    Mailbox,
    Message,
    MessageKind,
    NewRun,
    RunStatus,
    SendOutcome,
    SendStatus,
    StartOutcome,
)
from perdure.storage.sqlite.transaction import Row, Transaction, as_list, storable


def start_runs(tx: Transaction, runs: Sequence[NewRun]) -> list[StartOutcome]:
    """Writers come one at a time, so what the look-up does not find cannot appear before the insert."""
    ids = as_list(sorted({run.run_id for run in runs}))
    known = {row[0]: row[1:] for row in tx.rows("find_runs", {"run_ids": ids})}
    fresh: dict[str, NewRun] = {}
    for run in runs:
        if run.run_id not in known:
            fresh.setdefault(run.run_id, run)
    born = _born(tx, fresh.values())
    rows = [_run_values(fresh[run_id], tx.now, born) for run_id in sorted(fresh)]
    for part in ("start.run", "start.fence", "start.wake"):
        tx.many(part, rows)
    return [_outcome(tx, run, fresh.get(run.run_id), known, born) for run in runs]


def _born(tx: Transaction, runs: Iterable[NewRun]) -> set[str]:
    """Which of them are born claimed."""
    wishes = [
        [run.run_id, birth.runner_id, birth.hold.shard_id, birth.hold.epoch, run.slot]
        for run in runs
        if (birth := run.birth) is not None
    ]
    if not wishes:
        return set()
    return {row[0] for row in tx.rows("start.births", {"births": as_list(wishes)})}


def _run_values(run: NewRun, now: int, born: set[str]) -> dict[str, str | int | None]:
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
        **_claim_values(run.birth if run.run_id in born else None, now),
    }


def _claim_values(birth: Birth | None, now: int) -> dict[str, int | None]:
    if birth is None:
        claim = dict.fromkeys(("claim_id", "runner_id", "born_at"))
        return {**claim, "epoch": 0, "revision": 0, "wake_at": now}
    return {
        "claim_id": birth.claim_id,
        "runner_id": birth.runner_id,
        "epoch": birth.hold.epoch,
        "revision": births.FIRST_REVISION,
        "born_at": now,
        "wake_at": None,
    }


def _outcome(
    tx: Transaction, run: NewRun, fresh: NewRun | None, known: Mapping[str, Row], born: set[str]
) -> StartOutcome:
    if fresh is run:
        return births.created(run, born_at=from_micros(tx.now) if run.run_id in born else None)
    if fresh is not None:  # the same id earlier in this call
        status = RunStatus.RUNNING if run.run_id in born else RunStatus.PENDING
        return StartOutcome(run.run_id, False, fresh.workflow, status)
    workflow, status, token, claim_id, revision, created_at, entered_at, wake_seq = known[
        run.run_id
    ]
    return births.found(
        run,
        workflow=workflow,
        status=status,
        start_token=token,
        claim_id=claim_id,
        revision=revision,
        created_at=from_micros(created_at),
        entered_at=None if entered_at is None else from_micros(entered_at),
        wake_seq=wake_seq,
    )


def send_message(
    tx: Transaction, message: Message, mailbox_limit: int, mailbox_bytes: int
) -> SendOutcome:
    """Insert and bump in one transaction (R6)."""
    key = {"run_id": message.run_id, "message_id": message.message_id}
    wake = tx.row("signal.wake", key)
    if wake is None:
        ended = tx.row("signal.ended", key)
        if ended is None:
            return SendOutcome(SendStatus.UNKNOWN_RUN)
        return SendOutcome(SendStatus.ENDED, ended[0])
    slot, wake_seq, known, unread, size = wake
    if known:
        return SendOutcome(SendStatus.DUPLICATE, slot)
    if unread >= mailbox_limit:
        return SendOutcome(SendStatus.FULL, slot)
    if size + len((message.body or "").encode("utf-8", "surrogatepass")) > mailbox_bytes:
        return SendOutcome(SendStatus.HEAVY, slot)
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
