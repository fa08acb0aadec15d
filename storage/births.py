"""Runs that are born claimed: what their runner is told, the same on every engine."""

from __future__ import annotations

from perdure.storage.model import ClaimedRun, NewRun, RunStatus, StartOutcome

FIRST_REVISION = 1
"""Of a run that is born claimed: what a first claim makes of a fence that was born pending."""


def created(run: NewRun, *, born_at: float | None) -> StartOutcome:
    """What came of a start that made its run. born_at: the database's time, if the run was born claimed."""
    if born_at is None:
        return StartOutcome(run.run_id, True, run.workflow, RunStatus.PENDING)
    claimed = _claimed(run, created_at=born_at, entered_at=born_at, wake_seq=0)
    return StartOutcome(run.run_id, True, run.workflow, RunStatus.RUNNING, claimed)


def found(
    run: NewRun,
    *,
    workflow: str,
    status: str,
    start_token: int,
    claim_id: int | None,
    revision: int | None,
    created_at: float,
    entered_at: float | None,
    wake_seq: int | None,
) -> StartOutcome:
    """What already has the id of a start: another's run, or this start's own, whose answer was lost (R9).

    Own and under the claim it was born with: nobody has had it since, so the runner that asked for it adopts it.
    """
    mine = start_token == run.start_token
    claimed = None
    birth = run.birth
    if mine and birth is not None and (claim_id, revision) == (birth.claim_id, FIRST_REVISION):
        assert entered_at is not None, "a claim says when the run was entered"
        assert wake_seq is not None, "a live run has a wake row"
        claimed = _claimed(run, created_at=created_at, entered_at=entered_at, wake_seq=wake_seq)
    return StartOutcome(run.run_id, mine, workflow, RunStatus(status), claimed)


def _claimed(run: NewRun, *, created_at: float, entered_at: float, wake_seq: int) -> ClaimedRun:
    birth = run.birth
    assert birth is not None, "only a run with a birth is born claimed"
    return ClaimedRun(
        run_id=run.run_id,
        slot=run.slot,
        claim_id=birth.claim_id,
        epoch=birth.hold.epoch,
        revision=FIRST_REVISION,
        next_seq=1,
        entered_at=entered_at,
        reclaim_count=0,
        wake_seq=wake_seq,
        workflow=run.workflow,
        version=run.version,
        payload=run.payload,
        payload_format=run.format,
        seed=run.seed,
        created_at=created_at,
        source=run.source,
        parent_id=run.parent_id,
        trace=run.trace,
        taken_over=False,
        tenant=run.tenant,
    )
