"""What no simulated world may show: pure functions of its history, its executions and what its clients were told."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perdure.sharding.slots import shard_of, slot_of
from tests.harness.audit import AuditRow
from tests.harness.checkers import FINAL, check_history

from .workload import Execution

if TYPE_CHECKING:
    from .world import Fault, World

WINDOW = 12.0
"""Seconds that an execution's result may have waited for its commit before the fault that it was lost with."""


def check_world(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """All violations of a world that has come to its end."""
    return [
        *world.violations,
        *world.loop.errors,
        *check_history(rows),
        *check_holders(rows),
        *check_shards(world, rows),
        *check_timelines(world, rows),
        *check_executions(world, rows),
        *check_deaths(world, rows),
        *check_mail(rows),
        *check_cancels(rows),
        *check_results(world),
        *check_told(world, rows),
        *check_end(world),
    ]


def check_holders(rows: Sequence[AuditRow]) -> list[str]:
    """What a claim covers is written by the process that made the claim, and by no other."""
    maker: dict[tuple[str, int], int | None] = {}
    violations = []
    for row in rows:
        if row.table != "fences" or row.run_id is None:
            continue
        if row.claim_id is not None and row.claim_id != row.old_claim_id:
            maker[row.run_id, row.claim_id] = row.backend
        elif row.op in "UD" and row.old_claim_id is not None:
            made_by = maker.get((row.run_id, row.old_claim_id))
            if made_by != row.backend:
                violations.append(
                    f"run {row.run_id}: process {row.backend} wrote (line {row.id}) under claim "
                    f"{row.old_claim_id} of process {made_by}"
                )
    return violations


def check_shards(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """A run is claimed by the runner that holds its shard at that moment; by another only if the holder may not know
    its workflow (lent), or if it had the run before and had lost sight of it."""
    holder: dict[int, int | None] = {}
    violations = []
    for row in rows:
        if row.table == "shards" and row.shard_id is not None:
            holder[row.shard_id] = row.runner_id
        elif row.table == "fences" and row.run_id:
            held_by = holder.get(shard_of(slot_of(row.run_id), world.figures.shards))
            if row.claim_id in (None, row.old_claim_id):
                if row.old_runner_id not in (None, held_by):
                    world.seen["written by other than the holder"] += 1
            elif held_by != row.runner_id:
                lent = world.figures.partial and world.accounts.workflows.get(row.run_id) == "rare"
                if lent:
                    world.seen["lent"] += 1
                elif row.old_runner_id == row.runner_id:
                    world.seen["own orphan re-claimed"] += 1
                else:
                    violations.append(
                        f"run {row.run_id} was claimed (line {row.id}) by runner {row.runner_id}, "
                        f"its shard was held by {held_by}"
                    )
    return violations


def check_timelines(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """No claim that was lost by a fail-over is ever written under again."""
    lost = {
        row.claim_id
        for each in world.server.lost
        for row in each.rows
        if row.table == "fences" and row.claim_id != row.old_claim_id and row.claim_id is not None
    }
    return [
        f"run {row.run_id}: claim {row.claim_id} was lost by the fail-over and is in use again (line {row.id})"
        for row in rows
        if row.table == "fences" and row.claim_id in lost
    ]


# ---- executions ---------------------------------------------------------------------------------


def check_executions(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """A step's function runs once, but for its retries and for what a fault explains."""
    cancelled = {row.run_id for row in rows if row.table == "messages" and row.kind == "cancel"}
    cancelled |= _deleted(rows)  # the same id started again is another run
    recorded: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row.table == "steps" and row.op == "I" and row.kind in ("step", "attempt"):
            recorded[row.run_id or "", row.step_key or ""] += 1
    places: dict[tuple[str, str], list[Execution]] = defaultdict(list)
    for execution in world.executions:
        places[execution.run, execution.key].append(execution)
    violations = []
    explaining = [*world.faults, *_lost_commits(world)]
    for (run_id, key), mine in places.items():
        lives = _lives(mine)
        unexplained = len(lives) - 1 - _most_explained(lives[:-1], explaining)
        if unexplained > 0 and run_id not in cancelled:
            told = "; ".join(
                f"process {e.process} attempt {e.attempt} {e.started - 1000:.3f} to "
                f"{'—' if e.ended is None else f'{e.ended - 1000:.3f}'} {e.how}"
                for e in mine
            )
            violations.append(
                f"run {run_id}: {key} was executed by {len(lives)} lives, {unexplained} too many: {told}"
            )
    for (run_id, key), count in recorded.items():
        if not places.get((run_id, key)):
            violations.append(f"run {run_id}: {key} has {count} entries and was never executed")
    return violations


def _deleted(rows: Sequence[AuditRow]) -> set[str | None]:
    return {row.run_id for row in rows if row.table == "runs" and row.op == "D"}


def _lives(executions: Sequence[Execution]) -> list[list[Execution]]:
    """Executions of one step, cut where the attempt number did not grow: the run had lost what it knew."""
    lives: list[list[Execution]] = []
    for execution in executions:
        if not lives or execution.attempt <= lives[-1][-1].attempt:
            lives.append([])
        lives[-1].append(execution)
    return lives


def _lost_commits(world: World) -> Iterator[Fault]:
    from .world import Fault

    for each in world.server.lost:
        yield Fault("commits lost", each.copied_at, each.restored_at)


def _explains(fault: Fault, life: Sequence[Execution]) -> bool:
    if fault.process is not None and all(fault.process != each.process for each in life):
        return False
    last = life[-1]
    over = last.started if last.ended is None else last.ended
    lasted = fault.until + WINDOW
    return life[0].started <= lasted and (last.ended is None or over >= fault.at - WINDOW)


def _most_explained(lives: Sequence[Sequence[Execution]], faults: Sequence[Fault]) -> int:
    """How many lives can be explained when no fault is used twice for one step (a maximum matching)."""
    taken: dict[int, int] = {}

    def place(index: int, tried: set[int]) -> bool:
        for number, fault in enumerate(faults):
            if number in tried or not _explains(fault, lives[index]):
                continue
            tried.add(number)
            if number not in taken or place(taken[number], tried):
                taken[number] = index
                return True
        return False

    return sum(place(index, set()) for index in range(len(lives)))


# ---- leases -------------------------------------------------------------------------------------


def check_deaths(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """Nobody is declared dead by others unless something was done to it, or to all."""
    process_of: dict[int, int] = {}
    violations = []
    patience = 3 * world.figures.lease
    for row in rows:
        if row.table != "runners" or row.runner_id is None:
            continue
        if row.op == "I":
            process_of[row.runner_id] = row.backend or 0
        if row.op != "U" or not row.dead or row.old_dead:
            continue
        process = process_of.get(row.runner_id)
        if process == row.backend:
            continue
        world.seen["declared dead"] += 1
        reasons = [
            fault
            for fault in world.faults
            if fault.kind != "block"
            and fault.process in (None, process)
            and fault.at <= row.at <= fault.until + (patience if fault.until > fault.at else 1e9)
        ]
        # A clock that was set and a renewal that failed explain it only together.
        unlucky = world.figures.noise > 0 and world.seen["database clock jumped"] > 0
        if not reasons and not unlucky and not world.server.lost:
            violations.append(
                f"runner {row.runner_id} of process {process} was declared dead by process {row.backend} "
                f"at {row.at - 1000:.3f} for no reason"
            )
    return violations


# ---- mail and cancels ---------------------------------------------------------------------------


def check_mail(rows: Sequence[AuditRow]) -> list[str]:
    """Signals of one name are taken in the order of their senders' bumps."""
    taken: dict[str, list[tuple[int, int]]] = defaultdict(list)
    deleted = _deleted(rows)
    for row in rows:
        if row.run_id in deleted:
            continue
        if (
            row.table == "messages"
            and row.op == "U"
            and row.consumed_seq is not None
            and row.kind == "signal"
        ):
            taken[row.run_id or ""].append((row.consumed_seq, row.wake_seq or 0))
    return [
        f"run {run_id}: its signals were taken out of order: {pairs}"
        for run_id, pairs in taken.items()
        if [wake for _, wake in sorted(pairs)] != sorted(wake for _, wake in pairs)
    ]


def check_cancels(rows: Sequence[AuditRow]) -> list[str]:
    """A run whose journal has a cancel ends cancelled."""
    cancelled = {row.run_id for row in rows if row.table == "steps" and row.kind == "cancel"}
    ended = {row.run_id: row.status for row in rows if row.table == "runs" and row.status in FINAL}
    return [
        f"run {run_id} was cancelled and ended {ended[run_id]}"
        for run_id in sorted(filter(None, cancelled - _deleted(rows)))
        if ended.get(run_id, "cancelled") != "cancelled"
    ]


def check_results(world: World) -> list[str]:
    """Each run ends as its plan says, or cancelled because somebody asked for that."""
    violations = []
    for run_id, status, result, error in world.server.query(
        "select run_id, status, result, error from perdure_runs where finished_at is not null order by run_id"
    ):
        plan = world.accounts.plans.get(run_id)
        if plan is None:  # a retry whose answer was lost
            continue
        fails = plan["ops"][-1][0] in ("fail", "poison")
        if status == "cancelled":
            fits = run_id in world.accounts.cancels
        elif status == "failed":
            fits = fails
        else:
            fits = not fails and result_fits(plan, json.loads(result))
        if not fits:
            violations.append(
                f"run {run_id} ended {status} with {result or error}, its plan is {plan}"
            )
    return violations


def result_fits(plan: dict[str, Any], result: list[str]) -> bool:
    """Whether this can be the result of that plan; no signal is heard twice."""
    heard = [text for texts in result for text in texts.split(", ") if text.startswith("heard ")]
    heard = [text for text in heard if text != "heard nothing"]
    ways = zip(plan["ops"], result, strict=False)
    return (
        len(heard) == len(set(heard))
        and len(result) == len(plan["ops"])
        and all(_fits(op, text) for op, text in ways)
    )


def _fits(op: list[Any], text: str) -> bool:
    kind = op[0]
    if kind == "together":
        parts = text.split(", ")
        return len(parts) == len(op[1]) and all(map(_fits, op[1], parts))
    if kind in ("sleep", "nap"):
        return text == "slept"
    if kind == "wait":
        return text.startswith("heard ") and (op[1] is not None or text != "heard nothing")
    if kind == "timed" and text == "failed: StepTimeoutError":
        return True  # also a short one, when its process stood still meanwhile
    fails = (kind == "timed" and op[1] > 0.5) or (kind in ("flaky", "stubborn") and op[1] >= 4)
    return text.startswith("failed: ") if fails else " did " in text


# ---- what people were told ----------------------------------------------------------------------


def check_told(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """What a client was told is so in the end, unless commits were lost since."""
    statuses: dict[str, str] = {}
    messages: set[tuple[str, str]] = set()
    for row in rows:
        if row.table == "runs" and row.run_id and row.status:
            statuses[row.run_id] = row.status
        elif row.table == "messages" and row.op == "I" and row.run_id and row.message_id:
            messages.add((row.run_id, row.message_id))
    violations, deleted = [], _deleted(rows)
    for told in world.accounts.told:
        if told.run_id in deleted or any(
            told.at - WINDOW <= each.restored_at for each in world.server.lost
        ):
            continue
        status = statuses.get(told.run_id)
        if status is None:
            violations.append(
                f"run {told.run_id}: a client was told {told.what}, and there is no such run"
            )
        elif told.what == "result" and told.detail.partition(" ")[0] != status:
            violations.append(f"run {told.run_id}: a client was told {told.detail}, it is {status}")
        elif told.what == "signalled" and (told.run_id, told.detail) not in messages:
            violations.append(f"run {told.run_id}: {told.detail} was accepted and is nowhere")
    return violations


def check_end(world: World) -> list[str]:
    """Everything has come to its end, and every shard has a living holder."""
    violations = [f"stuck: {each}" for each in world.unsettled()]
    held = world.server.query(
        "select s.shard_id, s.runner_id, r.dead from perdure_shards s "
        "left join perdure_runners r on r.runner_id = s.runner_id order by s.shard_id"
    )
    if violations:
        violations += [
            f"shard {shard} is held by {holder} (dead: {dead})"
            for shard, holder, dead in held
            if holder is None or dead is None or dead
        ]
    return violations
