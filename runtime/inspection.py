"""Turning stored rows into answers for people: `why`, the cluster's status, a run's journal. Pure functions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from perdure.runtime.views import ClusterStatus, RunInfo, RunnerView, StepView, Why
from perdure.sharding.slots import shard_of
from perdure.storage.clock import from_micros
from perdure.storage.model import (
    Entry,
    EntryKind,
    Meta,
    OpenItems,
    Reason,
    RunEvent,
    RunnerRow,
    RunRecord,
    RunStatus,
    Topology,
)

REMEDY = {
    Reason.CRASH_LOOP: "each runner that entered it died; fix the cause, then resume or cancel it",
    Reason.NONDETERMINISM: "its code no longer fits its journal; put the old code back, then resume, or cancel it",
    Reason.OPERATOR: "an operator holds it; resume or cancel it",
    Reason.FAILURE: "the database refuses its end, also as a failure; mend what refuses it, then resume, or cancel it",
}


NOTHING_OPEN = OpenItems()
RUNNING, AWAITED, RETRIED, SLEEPS = (
    "running steps",
    "signals awaited",
    "steps to try again",
    "sleeps",
)
_SHOWN = 10


def json_value(text: str | None) -> Any:
    """Stored text as plain JSON values; text that is no JSON as it is."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def failure_summary(text: str | None) -> str | None:
    """A recorded error as one line, "Type: message"."""
    record = json_value(text)
    if not isinstance(record, dict):
        return None if record is None else str(record)
    kind, message = record.get("type", "Error"), record.get("message", "")
    return f"{kind}: {message}" if message else str(kind)


def info_of(record: RunRecord) -> RunInfo:
    """The stored form of a run as people see it."""
    return RunInfo(
        run_id=record.run_id,
        workflow=record.workflow,
        version=record.version,
        status=record.status,
        source=record.source,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        payload=json_value(record.payload),
        result=json_value(record.result),
        error=failure_summary(record.error),
        reason=record.reason,
        wake_at=record.wake_at,
        parent_id=record.parent_id,
        tags=record.tags,
        trace=record.trace,
        record=record,
    )


def step_views(entries: Sequence[Entry]) -> Sequence[StepView]:
    """The journal as people read it."""
    return [
        StepView(
            seq=entry.seq,
            kind=entry.kind,
            name=entry.key.rpartition("/")[2] or entry.kind,
            key=entry.key,
            status=entry.status,
            attempt=entry.attempt,
            at=entry.at,
            started_at=entry.started_at,
            input=entry.input,
            output=entry.output,
            error=failure_summary(entry.error),
            next_retry_at=next_retry_at(entry),
        )
        for entry in entries
    ]


def explain(
    record: RunRecord,
    topology: Topology,
    shard_count: int,
    events: Sequence[RunEvent] = (),
    items: OpenItems = NOTHING_OPEN,
) -> Why:
    """What a run waits for, who holds it, and what would move it. events: its timeline, if it is on hold.
    items: what it has begun and not ended, if it has not ended itself."""
    count = len(topology.shards) or shard_count
    shard_id = shard_of(record.slot, count)
    runners = {runner.runner_id: runner for runner in topology.runners}
    shard = next((s for s in topology.shards if s.shard_id == shard_id), None)
    owner = runners.get(shard.runner_id) if shard is not None and shard.runner_id else None
    holder = runners.get(record.runner_id) if record.runner_id else None
    facts = {
        "workflow": f"{record.workflow} (version {record.version})",
        "shard": f"{shard_id}, held by {_named(owner, topology.db_now)}",
    }
    if holder is not None or record.runner_id:
        facts["claimed by"] = _named(holder, topology.db_now)
    if record.wake_at is not None:
        facts["due"] = _instant(record.wake_at)
    doing = doings(record, items, topology.db_now)
    facts |= doing
    if said := _hold_said(record, events):
        facts["said"] = said
    if record.unread:
        facts["unread messages"] = str(record.unread)
    if record.reclaim_count:
        facts["runners lost inside it"] = str(record.reclaim_count)
    summary = _summary(record, topology, owner, holder, doing)
    return Why(
        run_id=record.run_id,
        status=record.status,
        summary=summary,
        shard=shard_id,
        holder=holder.replica_id if holder is not None else None,
        facts=facts,
    )


def doings(record: RunRecord, items: OpenItems, now: float) -> dict[str, str]:
    """What a run that has not ended waits for and executes, by kind. A wait whose time is over has ended."""
    if record.status.final:
        return {}
    told = [(event, json_value(event.detail) or {}) for event in items.events]
    given_up = {said["key"] for event, said in told if event.type == "signal-abandoned"}
    running = {
        said["key"]: (event, said) for event, said in reversed(told) if event.type == "step-started"
    }
    waits = {
        (event.type, said["key"]): said
        for event, said in reversed(told)
        if event.type in ("signal-awaited", "timer-set")
        and said["key"] not in given_up
        and (said["due"] is None or said["due"] > now or record.status is RunStatus.RUNNING)
    }
    attempts = {entry.key: entry for entry in items.attempts}
    parts = {
        RUNNING: [
            f"{_short(key)} (attempt {said['attempt']}, since {_instant(event.at)})"
            for key, (event, said) in running.items()
            if record.status is RunStatus.RUNNING and _latest(said["attempt"], attempts.get(key))
        ],
        AWAITED: [
            said["name"] + (f" until {_instant(said['due'])}" if said["due"] is not None else "")
            for (kind, _), said in waits.items()
            if kind == "signal-awaited"
        ],
        SLEEPS: [
            f"{said['name'] or _short(key)} until {_instant(said['due'])}"
            for (kind, key), said in waits.items()
            if kind == "timer-set" and said["due"] is not None
        ],
        RETRIED: [
            f"{_short(key)}, which failed {entry.attempt} times "
            f"({failure_summary(entry.error)}); the next attempt is at {_instant(next_retry_at(entry) or 0.0)}"
            for key, entry in attempts.items()
        ],
    }
    return {
        kind: "; ".join(said[:_SHOWN])
        + (f"; and {len(said) - _SHOWN} more" if said[_SHOWN:] else "")
        for kind, said in parts.items()
        if said
    }


def next_retry_at(entry: Entry) -> float | None:
    """When the step of a failed attempt is tried again (Unix seconds); None for every other entry."""
    if entry.kind is not EntryKind.ATTEMPT or not (entry.output or "").isdigit():
        return None
    return from_micros(int(entry.output or 0))


def _latest(attempt: int, failed: Entry | None) -> bool:
    """Whether an attempt of that number has not failed yet."""
    return failed is None or failed.attempt < attempt


def _short(key: str) -> str:
    return key.rpartition("/")[2]


HOLD_EVENTS = {
    Reason.OPERATOR: "run-suspended",
    Reason.CRASH_LOOP: "run-crashlooped",
    Reason.NONDETERMINISM: "nondeterminism-suspected",
    Reason.FAILURE: "run-unstorable",
}


def _hold_said(record: RunRecord, events: Sequence[RunEvent]) -> str | None:
    """What was said when the run was put on hold."""
    if record.hold is None:
        return None
    told = [event.detail for event in events if event.type == HOLD_EVENTS.get(Reason(record.hold))]
    return told[-1] if told else None


def _summary(
    record: RunRecord,
    topology: Topology,
    owner: RunnerRow | None,
    holder: RunnerRow | None,
    doing: Mapping[str, str],
) -> str:
    if record.status.final:
        error = failure_summary(record.error)
        said = f": {error}" if error else f": {record.reason}" if record.reason else ""
        return f"it has ended{said}"
    if record.hold is not None:
        return f"on hold ({record.hold}): {REMEDY.get(Reason(record.hold), 'resume or cancel it')}"
    if record.status is RunStatus.RUNNING:
        if holder is None or holder.dead:
            return f"its runner is dead; {_why_unclaimed(record, topology, owner)}"
        steps = f", in step {doing[RUNNING]}" if RUNNING in doing else ""
        return (
            f"it is being executed by {holder.replica_id}{steps}{_elsewhere(record, owner, holder)}"
        )
    if record.status is RunStatus.SUSPENDED and not (record.stray or _due(record, topology.db_now)):
        until = f" until {_instant(record.wake_at)}" if record.wake_at is not None else ""
        if record.reason == Reason.SIGNAL and AWAITED in doing:
            return f"it waits for signal {doing[AWAITED]}"
        if record.reason == Reason.RETRY and RETRIED in doing:
            return f"it waits for another attempt of {doing[RETRIED]}"
        return f"it waits for a {record.reason or 'message'}{until}"
    return _why_unclaimed(record, topology, owner)


def _elsewhere(record: RunRecord, owner: RunnerRow | None, holder: RunnerRow) -> str:
    """Why a runner executes a run whose shard it does not hold."""
    if owner is None or owner.runner_id == holder.runner_id:
        return ""
    if record.workflow in owner.workflows:
        return f" (pinned there until its step has ended, then {owner.replica_id} goes on)"
    return f" (lent to it: {owner.replica_id}, who holds its shard, lacks the workflow)"


def _why_unclaimed(record: RunRecord, topology: Topology, owner: RunnerRow | None) -> str:
    live = [r for r in topology.runners if lives(r, topology.db_now)]
    if not live:
        return "it is due and no runner is alive: start one with perdure serve"
    knowing = [r for r in live if record.workflow in r.workflows]
    if not knowing:
        return f"no live runner knows the workflow {record.workflow!r}: deploy code that has it"
    if owner is None or not lives(owner, topology.db_now):
        return "it is due; its shard has no live holder at the moment"
    if record.stray or record.workflow not in owner.workflows:
        names = ", ".join(sorted(r.replica_id for r in knowing))
        return f"its shard's holder lacks the workflow {record.workflow!r}: it waits for a free slot of {names}"
    return f"it is due and waits for a free slot of {owner.replica_id}"


def _due(record: RunRecord, now: float) -> bool:
    return record.wake_at is not None and record.wake_at <= now


def lives(runner: RunnerRow, now: float) -> bool:
    """By its row. A runner alone on its file (runner storage `memory`) keeps no lease: it lives until it says not."""
    alone = runner.info.get("engine") == "memory"
    return not runner.dead and (alone or runner.expires_at >= now)


def unowned(topology: Topology) -> int:
    """How many shards nobody serves: free ones, and those whose holder does not live, whose row may name it for long
    when nobody is left to take them."""
    living = {each.runner_id for each in topology.runners if lives(each, topology.db_now)}
    return sum(1 for shard in topology.shards if shard.runner_id not in living)


def _named(runner: RunnerRow | None, now: float) -> str:
    if runner is None:
        return "nobody"
    if runner.dead:
        return f"{runner.replica_id} (dead)"
    if not lives(runner, now):
        return f"{runner.replica_id} (its lease ran out {now - runner.expires_at:.1f} s ago)"
    return f"{runner.replica_id} at {runner.address}"


def _instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cluster_status(topology: Topology, meta: Meta, runs: Mapping[str, int]) -> ClusterStatus:
    """The cluster as its database knows it, live runners first."""
    shards = Counter(shard.runner_id for shard in topology.shards)
    runners = [
        RunnerView(
            runner_id=runner.runner_id,
            replica_id=runner.replica_id,
            address=runner.address,
            alive=lives(runner, topology.db_now),
            draining=runner.draining,
            shards=shards[runner.runner_id],
            lease_left=runner.expires_at - topology.db_now,
            lease_age=topology.db_now - runner.started_at,
            started_at=runner.started_at,
            workflows=runner.workflows,
            info=runner.info,
        )
        for runner in topology.runners
    ]
    runners.sort(key=lambda r: (not r.alive, r.replica_id, r.started_at))
    return ClusterStatus(
        runners=runners,
        shard_count=meta.shard_count,
        shards_unowned=unowned(topology),
        lock_mode=meta.lock_mode,
        runs=runs,
        db_now=topology.db_now,
    )
