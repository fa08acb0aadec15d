"""Claims, and the upkeep of runs in memory.

Writers come one at a time here, so no row is ever locked by somebody else and nothing is skipped; the predicates
are those of the engines where rows are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from perdure.storage.clock import Randomness, from_micros, to_micros
from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import ClaimedRun, ClaimRequest, Claims, RunStatus, ShardHold
from perdure.storage.sqlite.transaction import Row, Transaction, as_list

BEGINNING = -(1 << 63)


class Candidate(NamedTuple):
    """A run that may be taken: where it was found, the shard's epoch, and the fence's state before the claim."""

    run_id: str
    bucket: int
    epoch: int
    status: str
    runner_id: int | None


def require_alive(tx: Transaction, runner_id: int) -> None:
    """Raises `RunnerDeclaredDead` unless my runner row is there and not dead."""
    row = tx.row("is_dead", {"runner_id": runner_id})
    if row is None or row[0]:
        state = "has no row any more" if row is None else "was declared dead"
        raise RunnerDeclaredDead(
            f"runner {runner_id} {state}: its runs belong to others; register under a new runner id"
        )


def claim_runs(tx: Transaction, request: ClaimRequest, randomness: Randomness) -> Claims:
    """Take due runs and, if asked, orphans; at most ``request.limit`` in all."""
    require_alive(tx, request.runner_id)
    now = from_micros(tx.now)
    buckets = _buckets(tx, request.runner_id, request.holds)
    horizon = tx.now + round(request.ahead * 1_000_000)
    taken, more = _candidates(tx, request, buckets, horizon)
    if not taken:
        return Claims((), now, more=more)
    return Claims(_take(tx, request.runner_id, taken, horizon, randomness), now, more=more)


def _buckets(tx: Transaction, runner_id: int, holds: Sequence[ShardHold]) -> list[Row]:
    """(shard_id, epoch, slot_lo, slot_hi): the shards that are mine, in the order given, cut into the 256 buckets
    of the due index."""
    if not holds:
        return []
    pairs = as_list([hold.shard_id, hold.epoch] for hold in holds)
    shards = tx.rows("claim.shards", {"holds": pairs, "runner_id": runner_id})
    return [
        (shard_id, epoch, max(lo, bucket << 8), min(hi, (bucket << 8) + 255))
        for shard_id, epoch, lo, hi in shards
        for bucket in range(lo >> 8, (hi >> 8) + 1)
    ]


def _candidates(
    tx: Transaction, request: ClaimRequest, buckets: Sequence[Row], horizon: int
) -> tuple[list[Candidate], bool]:
    """Whom to take, and whether there is more: one above the limit was found, or a bucket's limit was reached."""
    values = {
        "buckets": as_list(buckets),
        "workflows": as_list(request.workflows),
        "in_memory": as_list(request.in_memory),
        "runner_id": request.runner_id,
        "horizon": horizon,
        "floor": BEGINNING if request.floor is None else to_micros(request.floor),
        "per_shard": request.per_shard,
        "limit": request.limit + 1,
    }
    found = tx.rows("claim.orphans", values) if request.orphans else []
    found += tx.rows("claim.due", {**values, "limit": request.limit + 1 - len(found)})
    candidates = [Candidate(*row) for row in found]
    fullest = max(Counter(candidate.bucket for candidate in candidates).values(), default=0)
    more = len(candidates) > request.limit or fullest >= request.per_shard
    return candidates[: request.limit], more


def _take(
    tx: Transaction, me: int, taken: Sequence[Candidate], horizon: int, randomness: Randomness
) -> tuple[ClaimedRun, ...]:
    before = {candidate.run_id: candidate for candidate in taken}
    rows = [
        [run.run_id, randomness.bits63(), run.epoch, int(_lost_its_runner(run, me))]
        for run in sorted(before.values())
    ]
    values = {"claims": as_list(rows), "runner_id": me, "now": tx.now, "horizon": horizon}
    tx.run("claim.fence", values)
    tx.run("claim.wake", values)
    return tuple(
        _claimed(row, _lost_its_runner(before[row[0]], me)) for row in tx.rows("claim.read", values)
    )


def _lost_its_runner(candidate: Candidate, me: int) -> bool:
    return candidate.status == RunStatus.RUNNING and candidate.runner_id != me


def _claimed(row: Row, taken_over: bool) -> ClaimedRun:
    (
        run_id,
        slot,
        claim_id,
        epoch,
        revision,
        next_seq,
        entered_at,
        reclaim_count,
        wake_seq,
        *cold,
    ) = row
    workflow, version, payload, payload_format, seed, created_at, source, parent_id, *who = cold
    trace, tenant, last_batch = who
    return ClaimedRun(
        run_id=run_id,
        slot=slot,
        claim_id=claim_id,
        epoch=epoch,
        revision=revision,
        next_seq=next_seq,
        entered_at=from_micros(entered_at),
        reclaim_count=reclaim_count,
        wake_seq=wake_seq,
        workflow=workflow,
        version=version,
        payload=payload,
        payload_format=payload_format,
        seed=seed,
        created_at=from_micros(created_at),
        source=source,
        parent_id=parent_id,
        trace=trace,
        taken_over=taken_over,
        tenant=tenant,
        last_batch=last_batch,
    )


def look_in_memory(tx: Transaction, seen: Mapping[str, int]) -> tuple[list[str], dict[str, int]]:
    """(runs with new mail, those whose wake row is due without any): the second need a write."""
    values = {"seen": as_list(seen.items()), "now": tx.now}
    news: list[str] = []
    stale: dict[str, int] = {}
    for run_id, has_news in tx.rows("due_in_memory.look", values):
        if has_news:
            news.append(run_id)
        else:
            stale[run_id] = seen[run_id]
    return sorted(news), stale


def clear_due(tx: Transaction, seen: Mapping[str, int]) -> None:
    """The look again, now under the write lock: mail may have come in between."""
    tx.run("due_in_memory.clear", {"seen": as_list(seen.items()), "now": tx.now})


def upcoming(
    tx: Transaction, runner_id: int, holds: Sequence[ShardHold], until: float, limit: int
) -> list[tuple[str, int, float]]:
    buckets = _buckets(tx, runner_id, holds)
    ranges = as_list([slot_lo, slot_hi] for _, _, slot_lo, slot_hi in buckets)
    values = {"buckets": ranges, "now": tx.now, "until": to_micros(until), "limit": limit}
    return [(run_id, slot, from_micros(due)) for run_id, slot, due in tx.rows("upcoming", values)]
