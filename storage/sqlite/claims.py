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
from perdure.storage.model import (
    FLOOR_MARGIN,
    ClaimedRun,
    ClaimRequest,
    Claims,
    RunStatus,
    ShardHold,
    StrayRequest,
)
from perdure.storage.sqlite.transaction import Row, Transaction, as_list

BEGINNING = -(1 << 63)


MANY = (1 << 31) - 1
AT_LEAST = 50
"""So many candidates are looked at, also when fewer runs are wanted: some may be strays."""


class Candidate(NamedTuple):
    """A run that may be taken: where it was found, the shard's epoch, and the fence's state before the claim.

    known: I know its workflow. suspect: it fell with a runner before and has written nothing since.
    """

    run_id: str
    bucket: int
    epoch: int
    status: str
    runner_id: int | None
    known: bool
    suspect: bool


def require_alive(tx: Transaction, runner_id: int) -> None:
    """Raises `RunnerDeclaredDead` unless my runner row is there and not dead."""
    row = tx.row("is_dead", {"runner_id": runner_id})
    if row is None or row[0]:
        state = "has no row any more" if row is None else "was declared dead"
        raise RunnerDeclaredDead(
            f"runner {runner_id} {state}: its runs belong to others; register under a new runner id"
        )


def claim_runs(tx: Transaction, request: ClaimRequest, randomness: Randomness) -> Claims:
    """Take due runs and, if asked, orphans; at most ``request.limit`` in all. Mark those I do not know as strays."""
    require_alive(tx, request.runner_id)
    buckets = _buckets(tx, request.runner_id, request.holds)
    horizon = tx.now + round(request.ahead * 1_000_000)
    most = max(request.limit, AT_LEAST)
    candidates = _candidates(tx, request, buckets, horizon, most + 1)
    chosen = _with_place(candidates, request.suspects)
    runs = _take(tx, request.runner_id, chosen[: request.limit], horizon, randomness)
    strays = _mark(tx, [run.run_id for run in candidates if not run.known])
    fullest = max(Counter(candidate.bucket for candidate in candidates).values(), default=0)
    full = len(candidates) > most or len(chosen) > request.limit or fullest >= request.per_shard
    return Claims(
        runs,
        from_micros(tx.now),
        more=full and bool(runs or strays),
        complete=not full,
        suspects_left=len(chosen) < sum(candidate.known for candidate in candidates),
        strays=strays,
    )


def strays_in_sight(tx: Transaction, request: StrayRequest) -> Claims | None:
    """None: there are some to claim. Otherwise the answer of a claim that takes nothing."""
    require_alive(tx, request.runner_id)
    if _stray_candidates(tx, request, 1):
        return None
    return Claims((), from_micros(tx.now), more=False)


def claim_strays(tx: Transaction, request: StrayRequest, randomness: Randomness) -> Claims:
    """Take strays of workflows I know, in any shard; where asked also what runs under me unknown to me."""
    require_alive(tx, request.runner_id)
    candidates = _stray_candidates(tx, request, request.limit + 1)
    chosen = _with_place(candidates, request.suspects)
    taken = chosen[: request.limit]
    return Claims(
        _take(tx, request.runner_id, taken, tx.now, randomness),
        from_micros(tx.now),
        more=len(chosen) > request.limit and bool(taken),
        suspects_left=len(chosen) < len(candidates),
    )


def _stray_candidates(tx: Transaction, request: StrayRequest, limit: int) -> list[Candidate]:
    values = {
        "workflows": as_list(request.workflows),
        "in_memory": as_list(request.in_memory),
        "runner_id": request.runner_id,
        "suspects": MANY if request.suspects is None else request.suspects,
        "from_slot": request.from_slot,
        "limit": limit,
    }
    found = tx.rows("claim.lost", values) if request.lost else []
    found += tx.rows("claim.strays", {**values, "limit": limit - len(found)})
    return [Candidate(*row) for row in found]


def _with_place(candidates: Sequence[Candidate], places: int | None) -> list[Candidate]:
    """Those I know, in their order; of suspects as many as have a place."""
    left = MANY if places is None else places
    chosen = []
    for candidate in candidates:
        if candidate.known and (left > 0 or not candidate.suspect):
            left -= candidate.suspect
            chosen.append(candidate)
    return chosen


def _mark(tx: Transaction, run_ids: Sequence[str]) -> tuple[str, ...]:
    """Mark runs as strays (R15); the workflows they are of."""
    if not run_ids:
        return ()
    rows = tx.rows("claim.mark", {"run_ids": as_list(run_ids), "now": tx.now})
    return tuple(sorted({row[0] for row in rows}))


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
    tx: Transaction, request: ClaimRequest, buckets: Sequence[Row], horizon: int, limit: int
) -> list[Candidate]:
    floor = BEGINNING
    if request.floor is not None:
        floor = min(to_micros(request.floor), tx.now - round(FLOOR_MARGIN * 1_000_000))
    values = {
        "buckets": as_list(buckets),
        "workflows": as_list(request.workflows),
        "in_memory": as_list(request.in_memory),
        "runner_id": request.runner_id,
        "horizon": horizon,
        "floor": floor,
        "per_shard": request.per_shard,
        "suspects": MANY if request.suspects is None else request.suspects,
        "wanted": request.limit,
        "limit": limit,
    }
    found = tx.rows("claim.orphans", values) if request.orphans else []
    found += tx.rows("claim.due", {**values, "limit": limit - len(found)})
    return [Candidate(*row) for row in found]


def _take(
    tx: Transaction, me: int, taken: Sequence[Candidate], horizon: int, randomness: Randomness
) -> tuple[ClaimedRun, ...]:
    if not taken:
        return ()
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
