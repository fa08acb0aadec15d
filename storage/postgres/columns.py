"""Between the model's values and the arrays and rows of the statements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.storage import births
from perdure.storage.model import (
    FLOOR_MARGIN,
    FORMAT,
    ClaimedRun,
    ClaimRequest,
    Claims,
    Entry,
    EntryKind,
    Finish,
    Message,
    MessageKind,
    NewRun,
    Park,
    RunnerRow,
    RunRecord,
    RunStatus,
    RunWrite,
    ShardRow,
    StartOutcome,
    StrayRequest,
    Topology,
)
from perdure.storage.postgres.literals import numbers, texts
from perdure.storage.postgres.session import Row
from perdure.storage.recorded import error_summary
from perdure.storage.verdicts import FenceSeen

Columns = list[object]

MANY = 2**31 - 1


def start_columns(runs: Sequence[NewRun]) -> Columns:
    """The arrays of `start`."""
    births = [run.birth for run in runs]
    return [
        *fresh_columns(runs),
        numbers([None if birth is None else birth.runner_id for birth in births]),
        numbers([None if birth is None else birth.hold.shard_id for birth in births]),
        numbers([None if birth is None else birth.hold.epoch for birth in births]),
        numbers([None if birth is None else birth.claim_id for birth in births]),
    ]


def fresh_columns(runs: Sequence[NewRun]) -> Columns:
    """The arrays of `start_fresh`."""
    return [
        texts([run.run_id for run in runs]),
        numbers([run.slot for run in runs]),
        texts([run.workflow for run in runs]),
        numbers([run.version for run in runs], usual=1),
        texts([run.source for run in runs], usual="app"),
        texts([run.tenant for run in runs]),
        texts([run.subject for run in runs]),
        texts([run.tags for run in runs]),
        texts([run.trace for run in runs]),
        texts([run.parent_id for run in runs]),
        numbers([run.seed for run in runs]),
        numbers([run.start_token for run in runs]),
        [run.payload for run in runs],
        numbers([run.format for run in runs], usual=FORMAT),
    ]


def _column(values: list[Any]) -> list[Any]:
    """Empty if all values are null: the statement fills them in."""
    return [] if values.count(None) == len(values) else values


def start_found(run: NewRun, row: Row) -> StartOutcome:
    """From a line of `find_runs`."""
    return births.found(
        run,
        workflow=row["workflow"],
        status=row["status"],
        start_token=row["start_token"],
        claim_id=row["claim_id"],
        revision=row["revision"],
        created_at=row["created_at"],
        entered_at=row["entered_at"],
        wake_seq=row["wake_seq"],
    )


def claim_columns(request: ClaimRequest, claim_ids: Sequence[int]) -> Columns:
    """The arguments of `claim`."""
    return [
        request.runner_id,
        numbers([hold.shard_id for hold in request.holds]),
        numbers([hold.epoch for hold in request.holds]),
        list(request.workflows),
        list(request.in_memory)
        if request.orphans
        else [],  # else none that is running is looked at
        request.per_shard,
        list(claim_ids),
        request.orphans,
        request.ahead,
        request.floor,
        FLOOR_MARGIN,
        MANY if request.suspects is None else request.suspects,
    ]


def stray_columns(request: StrayRequest, claim_ids: Sequence[int]) -> Columns:
    """The arguments of `claim_strays`."""
    return [
        request.runner_id,
        list(request.workflows),
        list(request.in_memory),
        list(claim_ids),
        MANY if request.suspects is None else request.suspects,
        request.from_slot,
        request.lost,
    ]


def claims_of(rows: Sequence[Row]) -> Claims:
    """The answer of `claim` and `claim_strays`: facts of the whole in each row, a run in each but that of none."""
    head = rows[0]
    runs = tuple(claimed_run(row) for row in rows if row["run_id"] is not None)
    strays = tuple(sorted(head["strays"] or ()))
    return Claims(
        runs=runs,
        db_now=head["db_now"],
        more=head["more"] and bool(runs or strays),
        complete=head["complete"],
        suspects_left=head["suspects_left"],
        strays=strays,
    )


def commit_columns(runner_id: int, batch_id: int, writes: Sequence[RunWrite]) -> Columns:
    """The arrays of `commit`; the writes are sorted by run_id."""
    return [
        *commit_ends_columns(runner_id, batch_id, writes),
        *_sent(_REST, [_rest(write) for write in writes]),
        *_consumed_columns(writes),
        *_event_columns(writes),
    ]


def commit_ends_columns(runner_id: int, batch_id: int, writes: Sequence[RunWrite]) -> Columns:
    """The same of writes that are `only_ends`."""
    return [
        *commit_steps_columns(runner_id, batch_id, writes),
        *_sent(_OUTCOME, [_outcome(write) for write in writes]),
        FORMAT,
    ]


def commit_steps_columns(runner_id: int, batch_id: int, writes: Sequence[RunWrite]) -> Columns:
    """The same of writes that are `only_entries`."""
    return [runner_id, batch_id, *_member_columns(writes), *_entry_columns(writes)]


def only_entries(writes: Sequence[RunWrite]) -> bool:
    """Whether the writes hold nothing else, as most do."""
    return not any(write.outcome is not None or write.consumed or write.events for write in writes)


def only_ends(writes: Sequence[RunWrite]) -> bool:
    """Whether the writes hold nothing but entries and the ends of runs that are no children."""
    return all(
        not (write.consumed or write.events)
        and (
            write.outcome is None
            or (isinstance(write.outcome, Finish) and write.outcome.parent_id is None)
        )
        for write in writes
    )


def _member_columns(writes: Sequence[RunWrite]) -> Columns:
    return [
        texts([write.run_id for write in writes]),
        numbers([write.claim_id for write in writes]),
        numbers([write.revision for write in writes]),
        numbers([write.entries[0].seq if write.entries else None for write in writes]),
        numbers([len(write.entries) for write in writes]),
    ]


Encode = Callable[[list[Any]], object]

_OUTCOME: Sequence[Encode] = (texts, texts, texts, _column, _column, texts, _column)
_REST: Sequence[Encode] = (texts, _column, numbers, texts)
"""How each of the columns is sent."""


def _sent(how: Sequence[Encode], rows: Sequence[tuple[Any, ...]]) -> Columns:
    if not rows:  # a statement is being planned
        return [encode([]) for encode in how]
    columns = zip(*rows, strict=True)
    return [encode(list(column)) for encode, column in zip(how, columns, strict=True)]


def _outcome(write: RunWrite) -> tuple[Any, ...]:
    match write.outcome:
        case None:
            return (None,) * len(_OUTCOME)
        case Park(reason=reason):
            return ("park", reason, *([None] * 5))
        case Finish() as end:
            told = (end.status, end.result, end.error, *error_summary(end.error))
            return ("finish", end.reason, *told)


def _rest(write: RunWrite) -> tuple[Any, ...]:
    match write.outcome:
        case None:
            return (None,) * len(_REST)
        case Park(wake_at=wake_at, seen=seen, reason=reason):
            due = None if reason.hold else wake_at
            return (None, due, seen, "true" if reason.forced else "false")
        case Finish(parent_id=parent_id):
            return (parent_id, None, None, None)


def _entry_columns(writes: Sequence[RunWrite]) -> Columns:
    entries = [entry for write in writes for entry in write.entries]
    return [
        texts([write.run_id for write in writes for _ in write.entries]),
        numbers([entry.seq for entry in entries]),
        texts([entry.key for entry in entries]),
        texts([entry.kind for entry in entries], usual=EntryKind.STEP),
        numbers([entry.attempt for entry in entries], usual=1),
        texts([entry.status for entry in entries], usual="ok"),
        numbers([entry.input_hash for entry in entries]),
        _column([entry.input for entry in entries]),
        _column([entry.output for entry in entries]),
        _column([entry.error for entry in entries]),
        numbers([entry.at for entry in entries]),
        numbers([entry.started_at for entry in entries]),
        numbers([entry.format for entry in entries], usual=FORMAT),
    ]


def _consumed_columns(writes: Sequence[RunWrite]) -> Columns:
    consumed = [(write.run_id, *taken) for write in writes for taken in write.consumed]
    return [
        texts([run_id for run_id, _, _ in consumed]),
        texts([message_id for _, message_id, _ in consumed]),
        numbers([seq for _, _, seq in consumed]),
    ]


def _event_columns(writes: Sequence[RunWrite]) -> Columns:
    events = [(write.run_id, event) for write in writes for event in write.events]
    return [
        texts([run_id for run_id, _ in events]),
        texts([event.type for _, event in events]),
        [event.at for _, event in events],
        [event.detail for _, event in events],
    ]


def claimed_run(row: Row) -> ClaimedRun:
    return ClaimedRun(
        run_id=row["run_id"],
        slot=row["slot"],
        claim_id=row["claim_id"],
        epoch=row["epoch"],
        revision=row["revision"],
        next_seq=row["next_seq"],
        entered_at=row["entered_at"],
        reclaim_count=row["reclaim_count"],
        wake_seq=row["wake_seq"],
        workflow=row["workflow"],
        version=row["version"],
        payload=row["payload"],
        payload_format=row["payload_format"],
        seed=row["seed"],
        created_at=row["created_at"],
        source=row["source"],
        parent_id=row["parent_id"],
        trace=row["trace"],
        taken_over=row["taken_over"],
        tenant=row["tenant"],
        last_batch=row["last_batch"],
    )


def entry_of(row: Row) -> Entry:
    return Entry(
        seq=row["seq"],
        kind=EntryKind(row["kind"]),
        key=row["step_key"],
        at=row["at"],
        status=row["status"],
        attempt=row["attempt"],
        input_hash=row["input_hash"],
        input=row["input"],
        output=row["output"],
        error=row["error"],
        started_at=row["started_at"],
        format=row["format"],
    )


def message_of(row: Row) -> Message:
    return Message(
        run_id=row["run_id"],
        message_id=row["message_id"],
        kind=MessageKind(row["kind"]),
        name=row["name"],
        body=row["body"],
        wake_seq=row["given"],
        sent_at=row["sent_at"],
        format=row["format"],
    )


def fence_of(row: Row) -> FenceSeen:
    return FenceSeen(row["claim_id"], row["revision"], row["last_batch"], row["next_seq"])


def ended_record(row: Row) -> RunRecord:
    """Of a run that has ended: the cold row says it all."""
    return record_of(row, _NOT_LIVE)


def live_record(row: Row) -> RunRecord:
    """Of a row that also has the columns of fence and wake row, null where the run has ended."""
    return record_of(row, row)


_NOT_LIVE: Mapping[str, Any] = dict.fromkeys(
    (
        "live_status", "live_reason", "entered_at", "wake_at", "hold", "runner_id", "claim_id", "epoch",
        "reclaim_count", "next_seq", "unread", "stray",
    )
)  # fmt: skip


def record_of(row: Row, live: Row | Mapping[str, Any]) -> RunRecord:
    return RunRecord(
        run_id=row["run_id"],
        workflow=row["workflow"],
        version=row["version"],
        status=RunStatus(live["live_status"] or row["status"]),
        slot=row["slot"],
        source=row["source"],
        created_at=row["created_at"],
        payload=row["payload"],
        payload_format=row["payload_format"],
        started_at=live["entered_at"] or row["started_at"],
        finished_at=row["finished_at"],
        result=row["result"],
        error=row["error"],
        reason=live["live_reason"] or row["reason"],
        wake_at=live["wake_at"],
        hold=live["hold"],
        runner_id=live["runner_id"],
        claim_id=live["claim_id"],
        epoch=live["epoch"],
        reclaim_count=live["reclaim_count"] or 0,
        next_seq=live["next_seq"] or 1,
        unread=live["unread"] or 0,
        parent_id=row["parent_id"],
        tenant=row["tenant"],
        trace=row["trace"],
        subject=row["subject"],
        tags=row["tags"],
        stray=bool(live["stray"]),
    )


def runner_row(row: Row) -> RunnerRow:
    return RunnerRow(
        runner_id=row["runner_id"],
        replica_id=row["replica_id"],
        address=row["address"],
        started_at=row["started_at"],
        expires_at=row["expires_at"],
        renew_count=row["renew_count"],
        dead=row["dead"],
        draining=row["draining"],
        workflows=tuple(json.loads(row["workflows"])),
        placement_version=row["placement_version"],
        info=json.loads(row["info"]),
    )


def shard_row(row: Row) -> ShardRow:
    return ShardRow(row["shard_id"], row["slot_lo"], row["slot_hi"], row["runner_id"], row["epoch"])


def topology_of(rows: Sequence[Row]) -> Topology:
    """The answer of `topology`."""
    runners = [runner_row(row) for row in rows if row["runner_row"] is True]
    shards = [shard_row(row) for row in rows if row["runner_row"] is False]
    return Topology(
        runners=sorted(runners, key=lambda runner: runner.runner_id),
        shards=sorted(shards, key=lambda shard: shard.shard_id),
        db_now=rows[0]["db_now"],
    )
