"""What became of a run's write, judged from the rows read afterwards (R1, R9). Pure; the same on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.storage.errors import DataRefused, DisagreementError
from perdure.storage.model import Finish, Park, RunWrite, Verdict


@dataclass(frozen=True, slots=True)
class FenceSeen:
    """A run's fence as it was read."""

    claim_id: int | None
    revision: int
    last_batch: int | None
    next_seq: int


def judge(write: RunWrite, batch_id: int, fence: FenceSeen | None, ended_by: int | None) -> Verdict:
    """The verdict on a member of a batch. fence: None if there is no such row. ended_by: `runs.last_batch`.

    AGAIN is certain only if the transaction that may have carried the write is over.
    """
    if fence is None:
        mine = isinstance(write.outcome, Finish) and ended_by == batch_id
        return Verdict.COMMITTED if mine else Verdict.FENCED
    held = fence.claim_id == write.claim_id
    if fence.last_batch == batch_id:
        return _durable(write, held=held)
    if not held:
        return Verdict.FENCED
    expected = fence.revision == write.revision
    if expected and write.entries and write.entries[0].seq != fence.next_seq:
        return Verdict.RELOAD  # the journal is not what the body believes it is
    return Verdict.AGAIN if expected else Verdict.RELOAD


def _durable(write: RunWrite, *, held: bool) -> Verdict:
    """A committed park clears the claim, so a claim that is still mine says that the park was refused."""
    if isinstance(write.outcome, Park):
        return Verdict.PARK_REFUSED if held else Verdict.PARKED
    return Verdict.COMMITTED if held else Verdict.FENCED


def still_alive(
    database: str, lock_mode: str, live: Sequence[tuple[str, str]]
) -> DisagreementError:
    """Why the lock mode cannot be changed now. live: replica id and address of each runner that is alive."""
    named = ", ".join(f"{replica!r} at {address}" for replica, address in live[:5])
    return DisagreementError(
        f"the lock mode of the cluster in {database} cannot become {lock_mode!r} while runners are alive "
        f"({len(live)}: {named}): stop all pods, wait until their leases are over, then start one with "
        f"PERDURE_SHARD_LOCK={lock_mode}; or leave PERDURE_SHARD_LOCK at auto"
    )


def check_batch(writes: Sequence[RunWrite]) -> None:
    """Raises `DataRefused` for what no engine may be asked to write: two writes of one run, a gap in a journal."""
    if len({write.run_id for write in writes}) != len(writes):
        raise DataRefused("a batch holds two writes of one run: merge them before sending")
    for write in writes:
        for expected, entry in enumerate(
            write.entries, start=write.entries[0].seq if write.entries else 1
        ):
            if entry.seq != expected:
                raise DataRefused(
                    f"run {write.run_id!r}: entry {entry.seq} stands where {expected} comes next"
                )
