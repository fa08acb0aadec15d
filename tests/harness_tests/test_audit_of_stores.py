"""The history that the real stores write is a correct one, and the witness sees all of it."""

from __future__ import annotations

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from perdure.storage.interface import ClusterStore, RunnerIdentity, RunStore
from perdure.storage.model import (
    ClaimedRun,
    ClaimRequest,
    Entry,
    EntryKind,
    Finish,
    Message,
    MessageKind,
    NewRun,
    Park,
    Reason,
    RunStatus,
    RunWrite,
    ShardHold,
    Verdict,
)
from tests.harness.audit import AuditRow, read_history
from tests.harness.checkers import (
    accounted_executions,
    check_history,
    claim_chains,
    final_statuses,
)

ME, OTHER, RUN = 101, 102, "run-1"


class Holder:
    """One runner that plays a run's life by hand."""

    def __init__(self, runner_id: int, runs: RunStore, cluster: ClusterStore) -> None:
        self.runner_id, self.runs, self.cluster = runner_id, runs, cluster
        self.holds: list[ShardHold] = []
        self.run: ClaimedRun | None = None
        self.revision = self.next_seq = 0

    async def join(self, dead: list[int]) -> None:
        me = RunnerIdentity(self.runner_id, f"pod-{self.runner_id}", "here", ["w"], {})
        await self.cluster.register(me, 0.001)
        self.holds = list(await self.cluster.take_shards(self.runner_id, [0], dead))

    async def claim(self) -> None:
        asked = ClaimRequest(self.runner_id, self.holds, ["w"], [], 10, orphans=True)
        (self.run,) = (await self.runs.claim_runs(asked)).runs
        self.revision, self.next_seq = self.run.revision, self.run.next_seq

    async def write(
        self, *kinds: EntryKind, took: str | None = None, outcome: Park | Finish | None = None
    ) -> Verdict:
        assert self.run is not None
        entries = [
            Entry(self.next_seq + n, kind, f"/s{self.next_seq + n}#0", at=1.0, output="1")
            for n, kind in enumerate(kinds)
        ]
        consumed = [(took, self.next_seq)] if took else []
        write = RunWrite(RUN, self.run.claim_id, self.revision, entries, consumed, (), outcome)
        batch_id = self.runner_id * 1_000 + self.revision
        verdicts = await self.runs.commit_writes(self.runner_id, batch_id, [write])
        self.revision += 1
        self.next_seq += len(entries)
        return verdicts[RUN]


async def test_a_run_parked_woken_taken_over_and_finished(audited_url: str) -> None:
    database = connect(DatabaseSettings(audited_url), clock=SystemClock())
    runs, cluster = database.runs(), database.cluster()
    await cluster.open()
    await cluster.agree(shard_count=1, lock_mode="row")
    await runs.open()
    await runs.start_runs([NewRun(RUN, 7, "w", 1, "{}", seed=1)])
    first, second = (Holder(runner, runs, cluster) for runner in (ME, OTHER))
    await first.join([])
    await first.claim()
    assert await first.write(EntryKind.STEP) is Verdict.COMMITTED
    park = Park(None, 0, Reason.SIGNAL)
    assert await first.write(outcome=park) is Verdict.PARKED
    signal = Message(RUN, "m1", MessageKind.SIGNAL, "go", "1", sent_at=1.0)
    await runs.send_message(signal, mailbox_limit=10)
    await first.claim()
    assert await first.write(EntryKind.SIGNAL, took="m1") is Verdict.COMMITTED
    assert await cluster.declare_dead(ME, 0)
    await second.join([ME])
    await second.claim()
    finish = Finish(RunStatus.SUCCEEDED, "1")
    assert await second.write(EntryKind.STEP, outcome=finish) is Verdict.COMMITTED
    await runs.close()
    await cluster.close()

    rows = await read_history(audited_url)
    assert check_history(rows) == []
    assert [runner for _, runner in claim_chains(rows)[RUN]] == [ME, ME, OTHER]
    assert final_statuses(rows) == {RUN: "succeeded"}
    assert accounted_executions(rows) == {(RUN, "/s1#0"): 1, (RUN, "/s3#0"): 1}
    assert lines(rows, "wakes") >= 4  # born, claimed, signalled, claimed, ended
    assert lines(rows, "messages") == 3  # sent, taken, gone with the run
    assert lines(rows, "steps") == 3
    assert lines(rows, "fences") >= 8  # more where one write takes several updates
    assert lines(rows, "shards") >= 2


def lines(rows: list[AuditRow], table: str) -> int:
    return sum(row.table == table for row in rows)
