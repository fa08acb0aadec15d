"""What no simulated world may show: pure functions of its history, its executions and what its clients were told."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perdure.sharding.patience import PERIODS
from perdure.sharding.slots import shard_of, slot_of
from tests.harness.audit import AuditRow
from tests.harness.checkers import FINAL, check_history

from .excuses import Excuses, runners_of
from .workload import Execution

if TYPE_CHECKING:
    from .world import World


def check_world(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """All violations of a world that has come to its end."""
    excuses = Excuses(world, rows)
    return [
        *world.violations,
        *world.loop.errors,
        *check_history(rows),
        *check_holders(rows),
        *check_shards(world, rows),
        *check_timelines(world, rows),
        *check_executions(world, rows, excuses),
        *check_deaths(world, rows),
        *check_mail(rows),
        *check_cancels(rows),
        *check_results(world),
        *check_told(world, rows, excuses),
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
    """A run is claimed under its shard's epoch by the runner that holds the shard at that moment; by another only if
    the holder may not know its workflow (lent), or if it had the run before and had lost sight of it. Whom it is lent
    to keeps it for life."""
    watch = _Shards(world)
    for row in rows:
        watch.see(row)
    return watch.violations


class _Shards:
    """Who holds which shard, under which epoch, and which claims were made by others than its holder."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holders: dict[int, tuple[int | None, int]] = {}
        self._dead: set[int | None] = set()
        self._lent: set[int | None] = set()
        self._found_again: set[int | None] = set()
        self.violations: list[str] = []

    def see(self, row: AuditRow) -> None:
        if row.table == "shards" and row.shard_id is not None:
            self._holders[row.shard_id] = (row.runner_id, row.epoch or 0)
        elif row.table == "runners" and row.dead:
            self._dead.add(row.runner_id)
        elif row.table == "fences" and row.run_id:
            shard = shard_of(slot_of(row.run_id), self._world.figures.shards)
            holder, epoch = self._holders.get(shard, (None, 0))
            if row.claim_id in (None, row.old_claim_id):
                self._written(row, holder)
            else:
                self._claimed(row, holder, epoch)

    def _written(self, row: AuditRow, holder: int | None) -> None:
        """Under the claim that was there."""
        if row.old_runner_id in (None, holder) or row.old_claim_id in self._found_again:
            return
        lent = row.old_claim_id in self._lent
        self._world.seen["lent run written" if lent else "pinned"] += 1

    def _claimed(self, row: AuditRow, holder: int | None, epoch: int) -> None:
        what = f"run {row.run_id} was claimed (line {row.id})"
        if row.epoch != epoch:
            self.violations.append(f"{what} under epoch {row.epoch}, its shard's was {epoch}")
        before = row.old_runner_id
        robbed = before not in (None, row.runner_id) and before not in self._dead
        if row.old_claim_id in self._lent and robbed:
            self.violations.append(
                f"{what} by runner {row.runner_id}, and was lent to runner {before}, which lives"
            )
        if holder == row.runner_id:
            return
        known = self._world.accounts.workflows.get(row.run_id or "")
        if self._world.figures.partial and known == "rare":
            self._world.seen["lent"] += 1
            self._lent.add(row.claim_id)
        elif before == row.runner_id:
            self._world.seen["own orphan re-claimed"] += 1
            self._found_again.add(row.claim_id)
        else:
            self.violations.append(
                f"{what} by runner {row.runner_id}, its shard was held by {holder}"
            )


def check_timelines(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """No claim that was lost by a fail-over is ever written under again. (A start that nobody was told of may be sent
    again, with the birth it had.)"""
    fences = [row for each in world.server.lost for row in each.rows if row.table == "fences"]
    used = {row.claim_id for row in fences if row.op == "U"}
    births = {row.claim_id: row.runner_id for row in fences if row.op == "I"}
    lost = {row.claim_id for row in fences if row.claim_id not in (None, row.old_claim_id)}
    return [
        f"run {row.run_id}: claim {row.claim_id} was lost by the fail-over and is in use again (line {row.id})"
        for row in rows
        if row.table == "fences"
        and row.claim_id in lost
        and (row.claim_id in used or births.get(row.claim_id) != row.runner_id)
    ]


# ---- executions ---------------------------------------------------------------------------------


def check_executions(world: World, rows: Sequence[AuditRow], excuses: Excuses) -> list[str]:
    """A step's function runs once, but for its retries and for what a lost process, a lost runner or lost commits
    explain; after a cancel it may be cut short and begun anew."""
    recorded: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row.table == "steps" and row.op == "I" and row.kind in ("step", "attempt"):
            recorded[row.run_id or "", row.step_key or ""] += 1
    executed = {(execution.run, execution.key) for execution in world.executions}
    violations = [
        f"run {run_id}: {key} has {count} entries and was never executed"
        for (run_id, key), count in recorded.items()
        if (run_id, key) not in executed
    ]
    forgotten = [row for lost in world.server.lost for row in lost.rows if row.table == "runs"]
    for (run_id, key, _), mine in _places(world.executions, rows, forgotten).items():
        lives = _lives(mine)
        unexplained = len(lives) - 1 - excuses.most_explained(lives[:-1])
        if unexplained > 0:
            told = "; ".join(
                f"process {e.process} attempt {e.attempt} {e.started - 1000:.3f} to "
                f"{'—' if e.ended is None else f'{e.ended - 1000:.3f}'} {e.how}"
                for e in mine
            )
            violations.append(
                f"run {run_id}: {key} was executed by {len(lives)} lives, {unexplained} too many: {told}"
            )
    return violations


def _places(
    executions: Sequence[Execution], rows: Sequence[AuditRow], lost: Sequence[AuditRow]
) -> dict[tuple[str, str, int], list[Execution]]:
    """Executions by run, step and how often the run's id had been started by then; those before its cancel. lost:
    starts and ends of runs that fail-overs took back."""
    births: dict[str | None, list[float]] = defaultdict(list)
    cancels: dict[tuple[str | None, int], float] = {}
    for row in sorted([*rows, *lost], key=lambda row: row.at):
        if row.table == "runs" and row.op == "I":
            births[row.run_id].append(row.at)
        elif row.table == "messages" and row.op == "I" and row.kind == "cancel":
            cancels.setdefault((row.run_id, len(births[row.run_id])), row.at)
    places: dict[tuple[str, str, int], list[Execution]] = defaultdict(list)
    for execution in executions:
        life = max(1, bisect_right(births[execution.run], execution.started))
        if execution.started < cancels.get((execution.run, life), float("inf")):
            places[execution.run, execution.key, life].append(execution)
    return places


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


# ---- leases -------------------------------------------------------------------------------------


def check_deaths(world: World, rows: Sequence[AuditRow]) -> list[str]:
    """Nobody is declared dead by others unless something was done to it, or to all, and not long ago."""
    processes = runners_of(rows)
    violations = []
    for row in rows:
        if row.table != "runners" or row.op != "U" or not row.dead or row.old_dead:
            continue
        if row.runner_id not in world.registered:
            continue
        process, registered = processes.get(row.runner_id, (None, 0.0))
        if process == row.backend:
            continue
        world.seen["declared dead"] += 1
        if not any(first <= row.at <= last for first, last in _reasons(world, process, registered)):
            violations.append(
                f"runner {row.runner_id} of process {process} was declared dead by process {row.backend} "
                f"at {row.at - 1000:.3f} for no reason"
            )
    return violations


OVER = frozenset({"crash", "gave up", "grace over", "stop", "void"})
"""After these a runner is no more, whenever the others notice."""
SILENT = frozenset({"pause", "cut", "outage"})
"""Meanwhile a runner cannot renew. Not among them: a main loop that is blocked, since the keeper has its own."""


def _reasons(world: World, process: int | None, registered: float) -> Iterator[tuple[float, float]]:
    """From when to when a runner of that process, registered then, may be declared dead."""
    lease = world.figures.lease
    renewal = lease / 4
    silence = PERIODS * renewal + renewal  # and a look
    for fault in world.faults:
        if fault.process not in (None, process):
            continue
        if fault.kind in OVER and registered <= fault.at:
            yield fault.at, float("inf")
        elif fault.kind in SILENT and registered <= fault.until:
            # It renews as soon as it can; a call that was on its way may last a renewal, and so may the next.
            yield fault.at, fault.until + 2 * renewal + silence
    for lost in world.server.lost:
        # Its last renewals may be among what was lost, and it may go before it can say so.
        yield lost.copied_at, lost.restored_at + lease + silence
    if world.figures.noise > 0:
        for at, by in world.jumps:
            # All leases are over by that clock until they are renewed, which may fail.
            if by > 0:
                yield at, at + lease + silence


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


def check_told(world: World, rows: Sequence[AuditRow], excuses: Excuses) -> list[str]:
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
        if told.run_id in deleted or excuses.lost(told.at):
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
    return [*(f"stuck: {each}" for each in world.unsettled()), *world.unheld()]
