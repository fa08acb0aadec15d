"""A harness of other systems: what it measures is read, and what it cannot is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import PEERS, Harness

DBOS, RESTATE = PEERS

SCRIPT = """
name=$1; shift
[ "$name" = dbos ] || { echo "no $name here" >&2; exit 3; }
for workload in "$@"; do
    case $workload in
        w1) echo '{"peer": "dbos", "workload": "w1", "per_second": 250.5, "port": '$PEERS_PGPORT'}' ;;
        w2) echo '{"peer": "dbos", "workload": "w2", "failed": true}'
            echo "w2 fell over" >"$PEERS_DIR/err-dbos.log" ;;
    esac
done >>"$PEERS_OUT"
"""


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    (tmp_path / "run.sh").write_text(SCRIPT)
    return Harness(tmp_path, tmp_path, 5432)


async def test_what_cannot_be_prepared_is_left_out_with_its_reason(harness: Harness) -> None:
    assert await harness.prepare() == [DBOS]
    assert harness.left_out == {"restate": "exit code 3: no restate here"}


async def test_a_workload_that_fails_is_left_out_alone(harness: Harness) -> None:
    assert await harness.measure(DBOS) == {1: 250.5}
    assert harness.left_out == {"dbos w2": "it measured nothing: w2 fell over"}


async def test_a_system_that_fails_has_no_figures(harness: Harness) -> None:
    assert await harness.measure(RESTATE) == {}
    assert set(harness.left_out) == {"restate w1h", "restate w2h"}
