"""What people and clients are shown of runs and of the cluster. Plain values, made from what storage reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.storage.model import RunRecord, RunStatus


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run. Instants are Unix seconds of the database's clock.

    payload, result: decoded JSON values (not the workflow's types). error: "Type: message".
    reason: why it is suspended or was cancelled. wake_at: when a parked run falls due.
    """

    run_id: str
    workflow: str
    version: int
    status: RunStatus
    source: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    payload: Any
    result: Any
    error: str | None
    reason: str | None
    wake_at: float | None
    parent_id: str | None
    tags: str | None
    trace: str | None
    record: RunRecord
    """The stored form, with the hold, claim and counters that `why` explains."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One line of a run's journal, as people read it. name: ``name#n`` within its task."""

    seq: int
    kind: str
    name: str
    key: str
    status: str
    attempt: int
    at: float
    started_at: float | None
    input: str | None
    output: str | None
    error: str | None
    next_retry_at: float | None = None
    """Of a failed attempt."""


@dataclass(frozen=True, slots=True)
class Why:
    """What a run waits for, who holds it, and what to do about it."""

    run_id: str
    status: str
    summary: str
    shard: int
    holder: str | None
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunnerView:
    """One runner of the cluster. lease_left: seconds, by the database's clock; negative = expired."""

    runner_id: int
    replica_id: str
    address: str
    alive: bool
    draining: bool
    shards: int
    lease_left: float
    lease_age: float
    started_at: float
    workflows: Sequence[str]
    info: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as its database knows it. runs: status → number of runs not yet ended. shards_unowned: nobody holds
    them, or one whose lease is over."""

    runners: Sequence[RunnerView]
    shard_count: int
    shards_unowned: int
    lock_mode: str | None
    runs: Mapping[str, int]
    db_now: float
