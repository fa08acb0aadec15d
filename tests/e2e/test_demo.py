"""The demo passes on each engine, and its judge cannot be talked into passing."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from examples.orders.audit import Line, judge
from examples.orders.sidelog import Execution
from tests.e2e.commands import ROOT, environment
from tests.harness.postgres import MISSING, find_binaries


@pytest.mark.req("CL5", "CL8", "OP4", "ST1", "WF6")
@pytest.mark.parametrize("db", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_three_pods_one_killed_every_order_done(db):
    if db == "postgres" and find_binaries() is None:
        pytest.skip(MISSING)
    done = subprocess.run(
        [sys.executable, "-m", "examples.orders.demo", "--db", db],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert said.rstrip().endswith("PASSED: all orders done, every execution explained")
    assert len(re.findall(r"\$ perdure cluster status", said)) == 3
    assert "killed pod-2 (SIGKILL" in said
    assert re.search(r"^pod-2 +dead ", said, re.MULTILINE)
    assert "all 36 orders are done" in said
    assert "0 are not explained" in said
    assert re.search(r"runs taken over from pod-2: [1-9]", said)


VICTIM, OTHER = 100, 200
PIDS = {1: VICTIM, 2: OTHER}
CLAIMS = [
    Line("claim", "r", 11, 1, None, None),
    Line("claim", "r", 22, 2, None, None),
]


def commit(key: str, claim_id: int, attempt: int = 1) -> Line:
    return Line("commit", "r", claim_id, None, key, attempt)


def execution(key: str, pid: int, attempt: int = 1) -> Execution:
    return Execution("r", key, attempt, pid, 0.0)


def verdict(commits, executions):
    return judge([*CLAIMS, *commits], executions, PIDS, VICTIM)


class TestJudge:
    def test_what_the_kill_cut_short_is_explained_by_it(self):
        found = verdict(
            [commit("a", 11), commit("b", 22, attempt=2)],
            [
                execution("a", VICTIM),
                execution("b", VICTIM),
                execution("b", OTHER),
                execution("b", OTHER, attempt=2),
            ],
        )
        assert found.faults == []
        assert (found.executions, found.commits) == (4, 2)
        assert (found.tried_again, found.cut_by_kill, found.taken_over) == (1, 1, 1)

    @pytest.mark.parametrize(
        ("commits", "executions"),
        [
            # executed twice by the process that committed it
            ([commit("a", 22)], [execution("a", OTHER), execution("a", OTHER)]),
            # committed by the killed process and executed again all the same
            ([commit("a", 11)], [execution("a", VICTIM), execution("a", OTHER)]),
            # committed twice
            ([commit("a", 11), commit("a", 22)], [execution("a", VICTIM), execution("a", OTHER)]),
            # executed and never committed
            ([], [execution("a", OTHER)]),
            # committed and executed by nobody
            ([commit("a", 22)], []),
            # an attempt nobody counted
            ([commit("a", 22)], [execution("a", OTHER), execution("a", OTHER, attempt=2)]),
            # a claim of a runner nobody has seen
            ([commit("a", 33)], [execution("a", OTHER)]),
        ],
    )
    def test_anything_else_is_a_fault(self, commits, executions):
        assert verdict(commits, executions).faults

    def test_a_run_nobody_claimed_anew_was_not_taken_over(self):
        lines = [CLAIMS[0], replace(CLAIMS[1], run_id="another"), commit("a", 11)]
        assert judge(lines, [execution("a", VICTIM)], PIDS, VICTIM).taken_over == 0
