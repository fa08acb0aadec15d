"""The triggers write down what was committed, and every checker finds what was planted for it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace

import asyncpg
import pytest

from perdure.storage import schema
from tests.harness.audit import AuditRow, install_audit_now, read_history
from tests.harness.checkers import (
    accounted_executions,
    check_history,
    claim_chains,
    final_statuses,
)
from tests.harness.postgres import PrivatePostgres, in_own_loop

World = Callable[[str], None]
"""Runs a portable script as one transaction; ``NOW`` is the instant in the engine's own form."""


class Audited:
    """A database with perdure's tables and the witness."""

    def __init__(self, url: str, run: World) -> None:
        self.url, self.run = url, run
        self.engine = url.partition(":")[0]

    def tell(self, *scripts: str) -> None:
        for script in scripts:
            self.run(script)

    async def violations(self) -> list[str]:
        return check_history(await read_history(self.url))


def _postgres(url: str) -> World:
    async def execute(script: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(script)
        await connection.close()

    return lambda script: in_own_loop(execute(script.replace("NOW", "now()")))


def _sqlite(url: str) -> World:
    def execute(script: str) -> None:
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        connection.executescript(f"begin; {script.replace('NOW', '1700000000000000')}; commit;")
        connection.close()

    return execute


@pytest.fixture
def audited(db_url: str) -> Audited:
    sqlite = db_url.startswith("sqlite")
    run = _sqlite(db_url) if sqlite else _postgres(db_url)
    run(";\n".join(schema.all_statements("sqlite" if sqlite else "postgres")))
    install_audit_now(db_url)
    return Audited(db_url, run)


# ---- a small history in SQL -------------------------------------------------------------------

RUNNER = (
    "insert into perdure_runners (runner_id, replica_id, address, started_at, expires_at)"
    " values ({0}, 'pod', 'here', NOW, NOW)"
)
DEAD = "update perdure_runners set dead = true where runner_id = {0}"
START = (
    "insert into perdure_runs (run_id, slot, workflow, seed, payload, start_token, created_at)"
    " values ('r', 0, 'w', 1, '{}', 1, NOW);"
    "insert into perdure_fences (run_id, slot, workflow) values ('r', 0, 'w');"
    "insert into perdure_wakes (run_id, slot, wake_at) values ('r', 0, NOW)"
)
CLAIM = (
    "update perdure_fences set status = 'running', claim_id = {0}, runner_id = {1}, epoch = {2},"
    " revision = revision + 1 where run_id = 'r';"
    "update perdure_wakes set wake_at = null where run_id = 'r'"
)
ENTRY = (
    "insert into perdure_steps (run_id, seq, step_key, kind, status, claim_id, at, finished_at)"
    " values ('r', {1}, '/s{1}', 'step', 'ok', {0}, NOW, NOW)"
)
STEP = (
    "update perdure_fences set revision = revision + 1, next_seq = {1} + 1"
    " where run_id = 'r' and claim_id = {0};" + ENTRY
)
PARK = (
    "update perdure_fences set revision = revision + 1, status = 'suspended', claim_id = null,"
    " runner_id = null where run_id = 'r' and claim_id = {0}"
)
MESSAGE = (
    "insert into perdure_messages (run_id, message_id, kind, wake_seq, sent_at)"
    " select run_id, '{0}', 'signal', wake_seq, NOW from perdure_wakes"
)
SIGNAL = "update perdure_wakes set wake_seq = wake_seq + 1, wake_at = NOW;" + MESSAGE
CONSUME = "update perdure_messages set consumed_seq = {1} where message_id = '{0}'"
FINISH = (
    "update perdure_runs set status = '{1}', last_claim = {0}, finished_at = NOW;"
    "delete from perdure_fences; delete from perdure_wakes; delete from perdure_messages"
)
FIRST_LIFE = (
    RUNNER.format(1),
    RUNNER.format(2),
    START,
    CLAIM.format(11, 1, 1),
    STEP.format(11, 1),
    PARK.format(11),
    SIGNAL.format("m1"),
)
SECOND_LIFE = (
    CLAIM.format(12, 1, 1),
    STEP.format(12, 2) + ";" + CONSUME.format("m1", 2),
    DEAD.format(1),
    CLAIM.format(13, 2, 2),
    STEP.format(13, 3),
)
END = ENTRY.format(13, 4) + ";" + FINISH.format(13, "succeeded")


async def test_a_correct_history_has_no_violation(audited: Audited) -> None:
    audited.tell(*FIRST_LIFE, *SECOND_LIFE, END)
    rows = await read_history(audited.url)
    assert check_history(rows) == []
    assert claim_chains(rows) == {"r": [(11, 1), (12, 1), (13, 2)]}
    assert final_statuses(rows) == {"r": "succeeded"}
    assert accounted_executions(rows) == {("r", f"/s{n}"): 1 for n in (1, 2, 3, 4)}
    fences = [row for row in rows if row.table == "fences"]
    assert [row.revision for row in fences] == [0, 1, 2, 3, 4, 5, 6, 7, None]
    assert [row.old_claim_id for row in fences] == [None, None, 11, 11, None, 12, 12, 13, 13]
    assert rows == sorted(rows, key=lambda row: row.id)
    assert all(abs(row.at - rows[0].at) < 60 for row in rows)
    assert await read_history(audited.url, after=rows[3].id) == rows[4:]


async def test_an_aborted_write_leaves_no_line(audited: Audited) -> None:
    audited.tell(*FIRST_LIFE)
    before = await read_history(audited.url)
    with pytest.raises((asyncpg.PostgresError, sqlite3.Error)):
        audited.tell(STEP.format(11, 7) + "; insert into nothing values (1)")
    assert await read_history(audited.url) == before


PLANTS: dict[str, tuple[Sequence[str], str]] = {
    "claim comes back": (
        (CLAIM.format(12, 1, 1), PARK.format(12), CLAIM.format(11, 1, 1)),
        "claim 11 came back",
    ),
    "epoch goes down": ((CLAIM.format(12, 1, 0),), "epoch went down from 1 to 0"),
    "revision skips": (
        ("update perdure_fences set claim_id = 12, runner_id = 2, revision = revision + 2",),
        "revision went from 3 to 5",
    ),
    "write without a new revision": (
        (
            CLAIM.format(12, 1, 1),
            STEP.format(12, 2).replace("revision + 1", "revision, last_batch = 77"),
        ),
        "revision went from 4 to 4",
    ),
    "claim without a new revision": (
        ("update perdure_fences set claim_id = 12, runner_id = 1, status = 'running'",),
        "revision went from 3 to 3",
    ),
    "taken from a living runner": (
        (CLAIM.format(12, 1, 1), CLAIM.format(13, 2, 2)),
        "runner 2 took claim 12 from runner 1, which had not been declared dead",
    ),
    "declared dead too late": (
        (CLAIM.format(12, 1, 1), CLAIM.format(13, 2, 2), DEAD.format(1)),
        "had not been declared dead",
    ),
    "entry without a fence write": (
        (CLAIM.format(12, 1, 1), ENTRY.format(12, 2)),
        "entry 2 (line",
    ),
    "entry of a replaced claim": (
        (CLAIM.format(12, 1, 1), STEP.format(12, 2).replace("'ok', 12", "'ok', 11")),
        "of claim 11 was not written by a fence write of that claim",
    ),
    "gap in the numbers": (
        (CLAIM.format(12, 1, 1), STEP.format(12, 3)),
        "entries are numbered [1, 3]",
    ),
    "entry rewritten": (
        ("update perdure_steps set output = 'other' where seq = 1",),
        "entry 1 was rewritten",
    ),
    "final status changes": (
        (
            CLAIM.format(12, 1, 1),
            FINISH.format(12, "succeeded"),
            "update perdure_runs set status = 'cancelled'",
        ),
        "final status succeeded became cancelled",
    ),
    "fence after the end": (
        (
            CLAIM.format(12, 1, 1),
            FINISH.format(12, "failed"),
            "insert into perdure_fences (run_id, slot, workflow) values ('r', 0, 'w')",
        ),
        "fences written (line",
    ),
    "lost wake-up": (
        ("update perdure_wakes set wake_at = null",),
        "suspended without wake_at or hold, with unread messages ['m1']",
    ),
    "dead runner writes": (
        (CLAIM.format(12, 1, 1), DEAD.format(1), STEP.format(12, 2)),
        "runner 1 wrote fences of r",
    ),
    "dead runner renews": (
        (DEAD.format(1), "update perdure_runners set renew_count = 9 where runner_id = 1"),
        "runner 1 wrote runners of itself",
    ),
    "shard taken without a new epoch": (
        (
            "insert into perdure_shards (shard_id, slot_lo, slot_hi, epoch) values (7, 0, 9, 4)",
            "update perdure_shards set runner_id = 1 where shard_id = 7",
        ),
        "shard 7: epoch 4 → 4",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
async def test_a_planted_fault_is_found(audited: Audited, plant: str) -> None:
    scripts, expected = PLANTS[plant]
    audited.tell(*FIRST_LIFE)
    assert await audited.violations() == []
    audited.tell(*scripts)
    found = await audited.violations()
    assert any(expected in violation for violation in found), found


async def test_messages_held_or_unawaited_are_no_lost_wake_up(audited: Audited) -> None:
    audited.tell(*FIRST_LIFE, "update perdure_wakes set wake_at = null, hold = 'operator'")
    assert await audited.violations() == []
    audited.tell("update perdure_wakes set hold = null")
    rows = await read_history(audited.url)
    assert len(check_history(rows)) == 1
    assert check_history(rows, unawaited=lambda row: row.message_id == "m1") == []


async def test_a_run_retried_by_an_operator_may_leave_its_final_status(audited: Audited) -> None:
    audited.tell(*FIRST_LIFE, CLAIM.format(12, 1, 1), FINISH.format(12, "failed"))
    audited.tell("update perdure_runs set status = 'open'")
    rows = await read_history(audited.url)
    assert check_history(rows, reopened={"r"}) == []
    assert "final status failed became open" in check_history(rows)[0]


async def test_a_run_deleted_and_started_anew_is_another_run(audited: Audited) -> None:
    whole = (*FIRST_LIFE[2:], CLAIM.format(12, 1, 1), FINISH.format(12, "succeeded"))
    forget = "delete from perdure_steps; delete from perdure_runs"
    audited.tell(*FIRST_LIFE[:2], *whole, forget, *whole)
    assert await audited.violations() == []


async def test_a_statement_begun_before_the_dead_mark_is_no_violation(
    postgres: PrivatePostgres, postgres_url: str
) -> None:
    """The mark commits while a commit of the runner is under way: its snapshot cannot see it."""
    run = _postgres(postgres_url)
    run(";\n".join(schema.all_statements("postgres")))
    install_audit_now(postgres_url)
    Audited(postgres_url, run).tell(*FIRST_LIFE, CLAIM.format(12, 1, 1))
    slow = await asyncpg.connect(postgres_url)
    observer = await asyncpg.connect(postgres_url)
    async with slow.transaction(isolation="repeatable_read"):
        await slow.fetchval("select 1")  # takes the snapshot
        await observer.execute(DEAD.format(1))
        await slow.execute(STEP.format(12, 2).replace("NOW", "now()"))
    assert check_history(await read_history(postgres_url)) == []
    await slow.execute(STEP.format(12, 3).replace("NOW", "now()"))
    found = check_history(await read_history(postgres_url))
    assert len(found) == 1
    assert "runner 1 wrote fences of r" in found[0]
    await slow.close()
    await observer.close()


def test_snapshots_tell_running_transactions_from_ended_ones() -> None:
    mark = AuditRow(id=1, table="runners", op="U", at=0, runner_id=1, dead=True, old_dead=False)
    write = AuditRow(id=2, table="fences", op="U", at=0, run_id="r", revision=1, old_revision=0)
    write = replace(write, old_claim_id=5, claim_id=5, old_runner_id=1, runner_id=1, txid=200)
    for snapshot, violations in {
        "90:95:": 0,  # the mark began after the snapshot
        "100:101:100": 0,  # the mark was still running
        "100:102:101": 1,  # the mark had committed, its neighbour runs
        "101:101:": 1,
    }.items():
        rows = [replace(mark, txid=100), replace(write, snapshot=snapshot)]
        found = [text for text in check_history(rows) if "already dead" in text]
        assert len(found) == violations, snapshot
