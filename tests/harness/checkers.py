"""What the audit history must never show. Pure functions: rows in, violations out.

Each checker returns one sentence per violation, naming the run and the lines of the history. An
empty list means that nothing is wrong; :func:`check_history` runs them all. A run that is deleted
and started anew under the same id counts as another run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .audit import AuditRow

FINAL = frozenset({"succeeded", "failed", "cancelled"})


def check_history(
    rows: Sequence[AuditRow],
    *,
    reopened: Collection[str] = (),
    unawaited: Callable[[AuditRow], bool] = lambda _: False,
) -> list[str]:
    """All checkers. ``reopened`` and ``unawaited``: see the checkers that take them."""
    return [
        *check_claims(rows),
        *check_journals(rows),
        *check_final_status(rows, reopened=reopened),
        *check_wake_ups(rows, unawaited=unawaited),
        *check_dead_writers(rows),
        *check_shard_epochs(rows),
    ]


def lives(rows: Iterable[AuditRow]) -> dict[tuple[str, int], list[AuditRow]]:
    """The lines of each run by (run_id, how often its id was started before)."""
    found: dict[tuple[str, int], list[AuditRow]] = defaultdict(list)
    births: Counter[str] = Counter()
    for row in rows:
        if row.run_id is None:
            continue
        if row.table == "runs" and row.op == "I":
            births[row.run_id] += 1
        found[row.run_id, max(births[row.run_id] - 1, 0)].append(row)
    return found


# ---- claims -----------------------------------------------------------------------------------


def check_claims(rows: Sequence[AuditRow]) -> list[str]:
    """Per run the claims form a chain.

    A claim is used from the write that sets it to the write that replaces it and never again;
    revision + 1 with every write of a holder; the epoch is never lower; a claim is taken from
    nobody but a runner declared dead, or the same runner.
    """
    violations = []
    dead = {row.runner_id: row.id for row in rows if _declares_dead(row)}
    for (run_id, _), mine in lives(rows).items():
        chain = _Chain(run_id, dead)
        for row in mine:
            if row.table == "fences":
                chain.add(row)
        violations += chain.violations
    return violations


def _declares_dead(row: AuditRow) -> bool:
    return row.table == "runners" and row.op == "U" and bool(row.dead) and not row.old_dead


@dataclass(slots=True)
class _Chain:
    run_id: str
    dead: dict[int | None, int]
    used: set[int] = field(default_factory=set)
    last: AuditRow | None = None
    violations: list[str] = field(default_factory=list)

    def add(self, row: AuditRow) -> None:
        before = self.last
        self.last = row
        if row.op == "I":
            if row.claim_id is not None:
                self.used.add(row.claim_id)
            return
        if before is not None and before.claim_id != row.old_claim_id:
            self._wrong(row, f"follows claim {before.claim_id} but replaces {row.old_claim_id}")
        if row.op == "U":
            self._update(row, before)

    def _update(self, row: AuditRow, before: AuditRow | None) -> None:
        held = row.old_claim_id is not None or row.claim_id is not None
        grows = 0 if _continues(row, before) else 1
        if held and row.revision != (row.old_revision or 0) + grows:
            self._wrong(row, f"revision went from {row.old_revision} to {row.revision}")
        if (row.epoch or 0) < (row.old_epoch or 0):
            self._wrong(row, f"epoch went down from {row.old_epoch} to {row.epoch}")
        if row.claim_id is not None and row.claim_id != row.old_claim_id:
            self._claim(row)

    def _claim(self, row: AuditRow) -> None:
        assert row.claim_id is not None
        if row.claim_id in self.used:
            self._wrong(row, f"claim {row.claim_id} came back after it had been replaced")
        self.used.add(row.claim_id)
        if row.old_claim_id is None or row.old_runner_id == row.runner_id:
            return
        if self.dead.get(row.old_runner_id, row.id) >= row.id:
            self._wrong(
                row,
                f"runner {row.runner_id} took claim {row.old_claim_id} from runner "
                f"{row.old_runner_id}, which had not been declared dead",
            )

    def _wrong(self, row: AuditRow, what: str) -> None:
        self.violations.append(f"run {self.run_id}: fence write (line {row.id}) {what}")


def _continues(row: AuditRow, before: AuditRow | None) -> bool:
    """Whether a line is the second update of one write, which some engines need several for."""
    if before is None or row.revision != row.old_revision:
        return False
    if row.txid is not None:
        return row.txid == before.txid
    new_claim = row.claim_id is not None and row.claim_id != row.old_claim_id
    return row.last_batch is not None and row.last_batch == before.last_batch and not new_claim


# ---- journals ---------------------------------------------------------------------------------


def check_journals(rows: Sequence[AuditRow]) -> list[str]:
    """Entries are numbered from 1 without a gap, never rewritten, and each was written by a fence
    write (or the fence's deletion at the finish) of the same claim that covers its number; where
    the engine tells transactions, in the very same one.
    """
    violations = []
    for (run_id, _), mine in lives(rows).items():
        fences = [row for row in mine if row.table == "fences" and row.op in "UD"]
        entries = [row for row in mine if row.table == "steps" and row.op == "I"]
        violations += [
            f"run {run_id}: entry {row.seq} was rewritten (line {row.id})"
            for row in mine
            if row.table == "steps" and row.op == "U"
        ]
        numbers = sorted(row.seq or 0 for row in entries)
        if numbers != list(range(1, len(numbers) + 1)):
            violations.append(f"run {run_id}: entries are numbered {numbers}, not 1, 2, 3 …")
        violations += [
            f"run {run_id}: entry {row.seq} (line {row.id}) of claim {row.claim_id} "
            "was not written by a fence write of that claim"
            for row in entries
            if not any(_covers(fence, row) for fence in fences)
        ]
    return violations


def _covers(fence: AuditRow, entry: AuditRow) -> bool:
    if fence.old_claim_id != entry.claim_id or fence.txid != entry.txid:
        return False
    first, seq = fence.old_next_seq or 0, entry.seq or 0
    return seq >= first and (fence.op == "D" or seq < (fence.next_seq or 0))


# ---- statuses ---------------------------------------------------------------------------------


def check_final_status(rows: Sequence[AuditRow], *, reopened: Collection[str] = ()) -> list[str]:
    """A final status never changes, but for runs an operator ``reopened``; a run's fence and wake
    row end with it, and it has no entry or message from then on."""
    violations = []
    for (run_id, _), mine in lives(rows).items():
        ended: AuditRow | None = None
        for row in mine:
            if row.table == "runs" and row.op == "U":
                if row.old_status in FINAL and row.status != row.old_status:
                    if run_id not in reopened:
                        violations.append(
                            f"run {run_id}: final status {row.old_status} became {row.status} "
                            f"(line {row.id})"
                        )
                    ended = None
                if row.status in FINAL:
                    ended = ended or row
            elif ended is not None and row.op != "D" and not _part_of_the_end(row, ended):
                violations.append(
                    f"run {run_id}: {row.table} written (line {row.id}) "
                    f"after its end (line {ended.id})"
                )
    return violations


def _part_of_the_end(row: AuditRow, ended: AuditRow) -> bool:
    """Whether a line belongs to the transaction that ended the run, so far as can be told."""
    if row.txid is not None:
        return row.txid == ended.txid
    return row.table == "messages" or (row.table == "steps" and row.claim_id == ended.claim_id)


# ---- wake-ups ---------------------------------------------------------------------------------


def check_wake_ups(
    rows: Sequence[AuditRow], *, unawaited: Callable[[AuditRow], bool] = lambda _: False
) -> list[str]:
    """No run is suspended with an unread message while neither wake_at nor a hold is set.

    A message is unread until an entry has taken it. ``unawaited(row)`` tells messages that the
    body has seen and does not wait for. Checked after every transaction where the engine tells
    them, else for what the history ends with.
    """
    violations = []
    for (run_id, _), mine in lives(rows).items():
        state = _WakeState(unawaited)
        for transaction in _transactions(mine):
            for row in transaction:
                state.apply(row)
            if state.lost():
                violations.append(
                    f"run {run_id}: suspended without wake_at or hold, with unread messages "
                    f"{sorted(state.unread)} (after line {transaction[-1].id})"
                )
                break
    return violations


def _transactions(rows: Sequence[AuditRow]) -> Iterator[list[AuditRow]]:
    """The lines of one run grouped by transaction, in the order of the transactions' last lines."""
    groups: dict[int | None, list[AuditRow]] = defaultdict(list)
    for row in rows:
        groups[row.txid].append(row)
    yield from sorted(groups.values(), key=lambda group: group[-1].id)


@dataclass(slots=True)
class _WakeState:
    unawaited: Callable[[AuditRow], bool]
    status: str | None = None
    wake_at: float | None = None
    hold: str | None = None
    unread: set[str] = field(default_factory=set)

    def apply(self, row: AuditRow) -> None:
        if row.table == "fences":
            self.status = row.status
        elif row.table == "wakes":
            self.wake_at, self.hold = row.wake_at, row.hold
        elif row.table == "messages" and row.message_id is not None:
            if row.op == "D" or row.consumed_seq is not None or self.unawaited(row):
                self.unread.discard(row.message_id)
            else:
                self.unread.add(row.message_id)

    def lost(self) -> bool:
        waits_for_nothing = self.wake_at is None and self.hold is None
        return self.status == "suspended" and waits_for_nothing and bool(self.unread)


# ---- dead runners -----------------------------------------------------------------------------


def check_dead_writers(rows: Sequence[AuditRow]) -> list[str]:
    """Nothing was committed for a runner by a statement that could see its dead mark.

    On PostgreSQL by the statement's snapshot, on SQLite by the order of the commits.
    """
    marks = {row.runner_id: row for row in rows if _declares_dead(row)}
    violations = []
    for row in rows:
        writer = writer_of(row)
        mark = marks.get(writer) if writer is not None else None
        if mark is not None and row.id != mark.id and _sees(row, mark):
            violations.append(
                f"runner {writer} wrote {row.table} of {row.run_id or row.shard_id or 'itself'} "
                f"(line {row.id}) though it was already dead (line {mark.id})"
            )
    return violations


def writer_of(row: AuditRow) -> int | None:
    """The runner in whose name a line was written; None when it was a client or an operator."""
    if row.table == "fences":
        claimed = row.claim_id is not None and row.claim_id != row.old_claim_id
        if claimed:
            return row.runner_id
        return row.old_runner_id if row.old_claim_id is not None else None
    if row.table == "runners" and row.op == "U" and row.old_dead:
        return row.runner_id
    if row.table == "shards" and row.op == "U" and row.epoch != row.old_epoch:
        return row.runner_id
    return None


def _sees(row: AuditRow, mark: AuditRow) -> bool:
    if row.snapshot is None or mark.txid is None:
        return row.id > mark.id
    if row.txid == mark.txid:
        return False  # leaving: the mark and the last releases are one transaction
    xmin, xmax, running = row.snapshot.split(":")
    if mark.txid < int(xmin):
        return True
    return mark.txid < int(xmax) and str(mark.txid) not in running.split(",")


def check_shard_epochs(rows: Sequence[AuditRow]) -> list[str]:
    """A shard's epoch never goes down and grows with every new holder."""
    violations = []
    for row in rows:
        if row.table != "shards" or row.op != "U":
            continue
        epoch, before = row.epoch or 0, row.old_epoch or 0
        taken = row.runner_id is not None and row.runner_id != row.old_runner_id
        if epoch < before or (taken and epoch == before):
            violations.append(
                f"shard {row.shard_id}: epoch {before} → {epoch} while the holder went from "
                f"{row.old_runner_id} to {row.runner_id} (line {row.id})"
            )
    return violations


# ---- for other checkers -----------------------------------------------------------------------


def claim_chains(rows: Sequence[AuditRow]) -> dict[str, list[tuple[int, int]]]:
    """run_id → its (claim_id, runner_id) in the order of the claims."""
    chains: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.table == "fences" and row.run_id and row.claim_id and row.runner_id:
            pair = (row.claim_id, row.runner_id)
            if row.claim_id != row.old_claim_id:
                chains[row.run_id].append(pair)
    return chains


def final_statuses(rows: Sequence[AuditRow]) -> dict[str, str]:
    """run_id → the final status it has in the end."""
    found: dict[str, str] = {}
    for row in rows:
        if row.table == "runs" and row.run_id is not None:
            found.pop(row.run_id, None)
            if row.status in FINAL:
                found[row.run_id] = row.status
    return found


def accounted_executions(rows: Sequence[AuditRow]) -> Counter[tuple[str, str]]:
    """(run_id, step_key) → how many executions the journal accounts for: the highest attempt number
    among the entries of that step, whether it failed or succeeded. For the side log's checker."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.table == "steps" and row.op == "I" and row.kind in ("step", "attempt"):
            place = (row.run_id or "", row.step_key or "")
            found[place] = max(found[place], row.attempt or 1)
    return found
