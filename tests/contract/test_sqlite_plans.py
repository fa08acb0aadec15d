"""The statements of the SQLite engine use their indexes (R12)."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.storage.sqlite.statements import statements

WHOLE_TABLE_ON_PURPOSE = {
    "claim.lost",  # seldom: the running runs, by the index that has them alone
    "count_runs",  # `cluster status`: live runs only
    "read_meta",
    "read_meta.present",
    "read_runs",  # never run without a condition added
    "topology.runners",
    "topology.shards",
    "declare_others_dead",
    "delete_dead_runners",
    "leave.shards",
    "take_shards",
}
ASKED_BY_HAND = ("void.", "examine.")
"""After a restore, and by the doctor."""
FEW_ROWS = ("SCAN perdure_runners", "SCAN x")
"""x is perdure_shards, in the statements that look for a slot's shard when arithmetic does not find it."""
BATCHES = (
    "holds",
    "buckets",
    "workflows",
    "in_memory",
    "claims",
    "seen",
    "run_ids",
    "batch",
    "shard_ids",
    "dead",
    "after",
)
NUMBERS = "with recursive n(x) as (values (1) union all select x + 1 from n where x < 20000)"
ROWS = {
    "perdure_runs (run_id, slot, workflow, seed, created_at, payload, start_token, status, finished_at)": (
        "'r' || x, x, 'w', x, x, '', x, 'succeeded', x"
    ),
    "perdure_fences (run_id, slot, workflow)": "'r' || x, x, 'w'",
    "perdure_wakes (run_id, slot, wake_at)": "'r' || x, x, x",
    "perdure_steps (run_id, seq, step_key, kind, status, claim_id, at, finished_at)": (
        "'r' || x, 1, 'k', 'step', 'ok', 1, 1, 1"
    ),
    "perdure_messages (run_id, message_id, wake_seq, kind, sent_at)": "'r' || x, 'm', 1, 'signal', x",
}


@pytest.fixture(params=["empty", "filled", "analysed"])
def tables(
    request: pytest.FixtureRequest, migrated_file: Path, tmp_path: Path
) -> Iterator[sqlite3.Connection]:
    """Tables without rows; with 20,000 rows nobody has analysed; with statistics from before and from after them."""
    path = tmp_path / "plans.db"
    shutil.copy(migrated_file, path)
    connection = sqlite3.connect(path, isolation_level=None)
    if request.param != "empty":
        for target, values in ROWS.items():
            connection.execute(f"insert into {target} {NUMBERS} select {values} from n")
    if request.param == "analysed":
        connection.execute("analyze")
    yield connection
    connection.close()


def plan(connection: sqlite3.Connection, text: str) -> list[str]:
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    named = {name: "[]" if name in BATCHES else 1 for name in re.findall(r":(\w+)", code)}
    values = named or [1] * code.count("?")
    return [row[3] for row in connection.execute(f"explain query plan {code}", values)]


def whole_tables(steps: list[str]) -> list[str]:
    """Steps that read a table from end to end; the batches of json_each and subqueries are meant to be read so."""
    found = [step for step in steps if re.match(r"SCAN (perdure_\w+|[a-z]+)\b", step)]
    harmless = ("VIRTUAL TABLE", "json_each", "CONSTANT ROW", "SUBQUERY", "UNION")
    return [step for step in found if not any(word in step for word in harmless)]


def test_no_looping_statement_reads_a_whole_table(tables: sqlite3.Connection) -> None:
    looked_at = 0
    for name, text in statements().items():
        if name in WHOLE_TABLE_ON_PURPOSE or name.startswith(ASKED_BY_HAND) or "pragma" in text:
            continue
        looked_at += 1
        steps = plan(tables, text)
        found = [step for step in whole_tables(steps) if step not in FEW_ROWS]
        assert found == [], f"{name}: {steps}"
    assert looked_at > 35


def test_a_whole_table_would_be_noticed(tables: sqlite3.Connection) -> None:
    assert whole_tables(plan(tables, "select f.run_id from perdure_fences f where f.epoch = 3"))
    assert whole_tables(plan(tables, "select * from perdure_steps where step_key = 'a'"))


def test_due_runs_are_found_by_bucket_and_time(tables: sqlite3.Connection) -> None:
    steps = plan(tables, statements()["claim.due"])
    wanted = "SEARCH d USING INDEX perdure_wakes_due (<expr>=? AND wake_at>? AND wake_at<?)"
    assert wanted in steps, steps
    assert not any("TEMP B-TREE FOR ORDER BY" in step for step in steps), steps


def test_orphans_are_found_among_the_running(tables: sqlite3.Connection) -> None:
    steps = plan(tables, statements()["claim.orphans"])
    assert "SEARCH f USING INDEX perdure_fences_running (slot>? AND slot<?)" in steps, steps


def test_every_statement_carries_its_name() -> None:
    for name, text in statements().items():
        assert text.startswith(f"-- name: {name}\n")
        assert text.count("-- name: ") == 1
