"""Reads for bodies, people and clients, and retention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.storage.clock import from_micros, to_micros
from perdure.storage.model import (
    Entry,
    EntryKind,
    JournalPage,
    OpenItems,
    RunEvent,
    RunFilter,
    RunRecord,
    RunStatus,
)
from perdure.storage.paging import journal_page
from perdure.storage.sqlite.statements import statements
from perdure.storage.sqlite.transaction import Row, Transaction, as_list

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
OPEN = "open"


def read_journal_page(
    tx: Transaction, after: Mapping[str, int], *, entries: int, size: int
) -> JournalPage:
    read: list[tuple[str, Entry]] = []
    for run_id, seq in after.items():
        values = {"run_id": run_id, "seq": seq, "entries": entries - len(read)}
        with closing(tx.each("journal", values)) as rows:
            for row in rows:
                if size <= 0:  # it does not fit
                    return journal_page(list(after), read, found=len(read) + 1, limit=entries)
                entry = _entry(row)
                read.append((run_id, entry))
                size -= _weight(entry)
        if len(read) == entries:
            break
    return journal_page(list(after), read, found=len(read), limit=entries)


def _weight(entry: Entry) -> int:
    return 200 + sum(len(text) for text in (entry.input, entry.output, entry.error) if text)


def _entry(row: Row) -> Entry:
    seq, kind, key, at, status, attempt, input_hash, input_, output, error, started_at, format_ = (
        row
    )
    return Entry(
        seq=seq,
        kind=EntryKind(kind),
        key=key,
        at=from_micros(at),
        status=status,
        attempt=attempt,
        input_hash=input_hash,
        input=input_,
        output=output,
        error=error,
        started_at=_instant(started_at),
        format=format_,
    )


def _instant(micros: int | None) -> float | None:
    return None if micros is None else from_micros(micros)


def read_run(tx: Transaction, run_id: str) -> RunRecord | None:
    rows = tx.select(f"{statements()['read_runs']}\n where r.run_id = :run_id", {"run_id": run_id})
    return _record(rows[0]) if rows else None


def read_results(tx: Transaction, run_ids: Sequence[str]) -> dict[str, RunRecord]:
    text = (
        f"{statements()['read_runs']}\n"
        " where r.run_id in (select value from json_each(:run_ids)) and r.finished_at is not null"
    )
    rows = tx.select(text, {"run_ids": as_list(sorted(set(run_ids)))})
    return {row[0]: _record(row) for row in rows}


def list_runs(tx: Transaction, wanted: RunFilter) -> list[RunRecord]:
    """The conditions are put together, so that each kind of list has a text whose plan fits it."""
    conditions, values = _conditions(wanted)
    text = statements()["read_runs"]
    if conditions:
        text += "\n where " + "\n   and ".join(conditions)
    text += "\n order by r.created_at desc, r.run_id desc\n limit :limit offset :offset"
    return [_record(row) for row in tx.select(text, values)]


def _conditions(wanted: RunFilter) -> tuple[list[str], dict[str, Any]]:
    conditions: list[str] = []
    values: dict[str, Any] = {"limit": wanted.limit, "offset": wanted.offset}

    def add(condition: str, **more: Any) -> None:
        conditions.append(condition)
        values.update(more)

    if wanted.workflow is not None:
        add("r.workflow = :workflow", workflow=wanted.workflow)
    if wanted.statuses:
        live = [status.value for status in wanted.statuses if not status.final]
        stored = [status.value for status in wanted.statuses if status.final] + [OPEN] * bool(live)
        add("r.status in (select value from json_each(:stored))", stored=as_list(stored))
        if live:
            add(
                "(f.status is null or f.status in (select value from json_each(:live)))",
                live=as_list(live),
            )
    if wanted.reason is not None:
        add("coalesce(f.reason, r.reason) = :reason", reason=wanted.reason)
    if wanted.source is not None:
        add("r.source = :source", source=wanted.source)
    if wanted.id_prefix:
        add(
            "r.run_id >= :prefix and substr(r.run_id, 1, length(:prefix)) = :prefix",
            prefix=wanted.id_prefix,
        )
    if wanted.since is not None:
        add("r.created_at >= :since", since=to_micros(wanted.since))
    return conditions, values


def _record(row: Row) -> RunRecord:
    (
        run_id,
        workflow,
        version,
        status,
        slot,
        source,
        created_at,
        payload,
        payload_format,
        *rest,
    ) = row
    (
        started_at,
        finished_at,
        result,
        error,
        reason,
        wake_at,
        hold,
        runner_id,
        claim_id,
        epoch,
        *rest,
    ) = rest
    reclaim_count, next_seq, unread, parent_id, tenant, trace, subject, tags, stray = rest
    return RunRecord(
        run_id=run_id,
        workflow=workflow,
        version=version,
        status=RunStatus(status),
        slot=slot,
        source=source,
        created_at=from_micros(created_at),
        payload=payload,
        payload_format=payload_format,
        started_at=_instant(started_at),
        finished_at=_instant(finished_at),
        result=result,
        error=error,
        reason=reason,
        wake_at=_instant(wake_at),
        hold=hold,
        runner_id=runner_id,
        claim_id=claim_id,
        epoch=epoch,
        reclaim_count=reclaim_count,
        next_seq=next_seq,
        unread=unread,
        parent_id=parent_id,
        tenant=tenant,
        trace=trace,
        subject=subject,
        tags=tags,
        stray=bool(stray),
    )


def count_runs(tx: Transaction) -> dict[str, int]:
    return dict(tx.rows("count_runs"))


def read_events(tx: Transaction, run_id: str) -> list[RunEvent]:
    rows = tx.rows("read_events", {"run_id": run_id})
    return [RunEvent(type_, _parse_instant(at), detail) for type_, at, detail in rows]


def read_open(tx: Transaction, run_id: str) -> OpenItems:
    values = {"run_id": run_id}
    return OpenItems(
        [
            RunEvent(kind, from_micros(at), detail)
            for kind, at, detail in tx.rows("open_events", values)
        ],
        [_entry(row) for row in tx.rows("open_attempts", values)],
    )


def _parse_instant(text: str) -> float:
    """An instant as the views show it."""
    return from_micros((datetime.fromisoformat(text) - EPOCH) // MICROSECOND)


def delete_finished(tx: Transaction, before: float, limit: int) -> int:
    """The runs picked are the runs deleted: nobody else writes meanwhile."""
    picked = [
        row[0]
        for row in tx.rows("delete_finished.pick", {"before": to_micros(before), "limit": limit})
    ]
    values = {"run_ids": as_list(picked)}
    for part in ("steps", "events", "messages", "runs"):
        tx.run(f"delete_finished.{part}", values)
    return len(picked)
