"""The side log is written whole by many processes, and unexplained executions are found."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pods import ROOT
from tests.harness.sidelog import Execution, Fault, SideLog, check_executions

WRITER = """
import sys
from pathlib import Path
from tests.harness.sidelog import SideLog
log = SideLog(Path(sys.argv[1]), runner=sys.argv[2])
for n in range(200):
    with log.execution(f"run-{n}", "/s#0", input="x" * 500):
        pass
"""


def test_lines_of_many_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "side.log"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=ROOT)
        for name in ("a", "b")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = SideLog(path).executions()
    assert len(found) == 400
    assert {execution.pid for execution in found} == {writer.pid for writer in writers}
    assert all(execution.how == "returned" and execution.ended for execution in found)
    assert all(len(execution.input) == 200 for execution in found)
    assert [e.started for e in found] == sorted(e.started for e in found)


async def test_how_an_execution_ended_is_told(tmp_path: Path) -> None:
    log = SideLog(tmp_path / "side.log")
    assert log.executions() == []

    async def cancelled() -> None:
        with log.execution("r", "/cancelled#0"):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(cancelled())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ZeroDivisionError), log.execution("r", "/raised#0", attempt=3):
        raise ZeroDivisionError
    assert [(e.key, e.attempt, e.how) for e in log.executions()] == [
        ("/cancelled#0", 1, "cancelled"),
        ("/raised#0", 3, "raised"),
    ]


def test_the_environment_has_to_name_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDE_LOG_FILE", raising=False)
    with pytest.raises(LookupError, match="SIDE_LOG_FILE is not set"):
        SideLog.from_environment()


def ran(pid: int, started: float, ended: float | None = None) -> Execution:
    return Execution("r", "/s#0", 1, "1", pid, "", started, ended, "returned" if ended else "")


KILL = Fault("kill", at=10.0, pid=1)
OUTAGE = Fault("restart", at=10.0, until=12.0)
CASES = {
    "once, recorded once": ([ran(1, 5, 6)], 1, [], 0),
    "twice, recorded twice": ([ran(1, 5, 6), ran(1, 7, 8)], 2, [], 0),
    "twice, no fault": ([ran(1, 5, 6), ran(2, 11, 12)], 1, [], 1),
    "killed in it": ([ran(1, 9), ran(2, 11, 12)], 1, [KILL], 0),
    "killed just after it": ([ran(1, 8, 9.5), ran(2, 11, 12)], 1, [KILL], 0),
    "ended long before the kill": ([ran(1, 1, 2), ran(2, 11, 12)], 1, [KILL], 1),
    "another process was killed": ([ran(3, 9), ran(2, 11, 12)], 1, [KILL], 1),
    "begun after the kill": ([ran(2, 5, 6), ran(1, 10.5, 11)], 1, [KILL], 1),
    "one kill, two beyond": ([ran(1, 9), ran(1, 9.1), ran(2, 11, 12)], 1, [KILL], 1),
    "two faults, two beyond": ([ran(1, 9), ran(2, 11), ran(3, 13, 14)], 1, [KILL, OUTAGE], 0),
    "the matching is a maximum": ([ran(1, 9), ran(2, 9), ran(3, 13, 14)], 1, [OUTAGE, KILL], 0),
    "in the outage": ([ran(4, 11, 11.5), ran(4, 13, 14)], 1, [OUTAGE], 0),
    "after the outage": ([ran(4, 12.5, 13), ran(4, 13, 14)], 1, [OUTAGE], 1),
    "never recorded": ([ran(1, 5, 6)], 0, [], 1),
    "recorded, not executed": ([ran(1, 5, 6)], 2, [], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_executions_beyond_the_journal_need_a_fault(case: str) -> None:
    executions, known, faults, violations = CASES[case]
    found = check_executions(executions, {("r", "/s#0"): known}, faults)
    assert len(found) == violations, found


def test_excused_executions_count_for_nothing() -> None:
    assert check_executions([ran(1, 5, 6)], {}, excused=lambda e: e.key == "/s#0") == []
