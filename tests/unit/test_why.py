"""What `why` says of a run that nobody executes, from made-up rows."""

from __future__ import annotations

from dataclasses import replace

from perdure.runtime.inspection import explain
from perdure.storage.model import RunnerRow, RunRecord, RunStatus, ShardRow, Topology

DEAD = RunnerRow(
    runner_id=1,
    replica_id="pod-1",
    address="10.0.0.1:34000",
    started_at=0.0,
    expires_at=50.0,
    renew_count=3,
    dead=True,
    workflows=("shop.pay",),
)
LIVE = replace(DEAD, runner_id=2, replica_id="pod-2", expires_at=110.0, dead=False)
RECORD = RunRecord(
    run_id="r1",
    workflow="shop.pay",
    version=1,
    status=RunStatus.RUNNING,
    slot=0,
    source="",
    created_at=1.0,
    payload="{}",
    payload_format=1,
    runner_id=1,
    claim_id=7,
)


def said(*others: RunnerRow, owner: int | None = None) -> str:
    topology = Topology((DEAD, *others), (ShardRow(0, 0, 65_535, owner, 4),), 100.0)
    return explain(RECORD, topology, 1).summary


def test_a_run_whose_runner_died_waits_for_what_can_execute_it():
    assert "start one with perdure serve" in said()
    assert "knows the workflow 'shop.pay'" in said(replace(LIVE, workflows=("other",)), owner=2)
    assert "no live holder" in said(LIVE)
    assert "free slot of pod-2" in said(LIVE, owner=2)
    assert said(LIVE, owner=2).startswith("its runner is dead; ")
