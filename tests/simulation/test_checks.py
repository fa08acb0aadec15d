"""What the simulation's checkers let pass, and for how long: each excuse beside what is like it and is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.audit import AuditRow

from .checks import check_deaths, check_executions, check_shards
from .database import Lost
from .excuses import Excuses
from .workload import Execution
from .world import Fault, World

pytestmark = pytest.mark.req("CL4", "CL11")

MINE, OTHER = 7, 8
RUNNER = 70


@pytest.fixture
def world() -> Iterator[World]:
    """One in which nothing has happened: a lease of 3 s, calls of 10 ms at most, no noise."""
    made = World(0)
    made.figures = replace(made.figures, lease=3.0, latency=0.005, noise=0.0, runs=8, partial=0)
    made.registered.add(RUNNER)
    yield made
    made.close()


# ---- executions -----------------------------------------------------------------------------------


def twice(world: World, *faults: Fault) -> int:
    """A step was executed from 1001.0 to 1001.1 and again later: how many executions are too many."""
    world.faults = list(faults)
    world.executions = [
        Execution("run-1", "0/work#0", 1, MINE, 1001.0, 1001.1, "returned"),
        Execution("run-1", "0/work#0", 1, OTHER, 1015.0, 1015.1, "returned"),
    ]
    return len(check_executions(world, [], Excuses(world, [])))


@pytest.mark.parametrize("kind", ["pause", "block", "cut", "outage", "stop"])
def test_nothing_is_executed_twice_for_what_costs_no_runner(world: World, kind: str) -> None:
    assert twice(world, Fault(kind, 1000.9, 1009.0, None if kind == "outage" else MINE)) == 1


@pytest.mark.parametrize("kind", ["crash", "gave up", "grace over", "void"])
def test_a_lost_process_costs_what_it_was_doing(world: World, kind: str) -> None:
    assert twice(world, Fault(kind, 1001.05, 1001.05, MINE)) == 0
    assert twice(world, Fault(kind, 1001.05, 1001.05, OTHER)) == 1


@pytest.mark.parametrize("at", [990.0, 1005.0])
def test_a_process_lost_before_or_long_after_costs_nothing(world: World, at: float) -> None:
    assert twice(world, Fault("crash", at, at, MINE)) == 1


def test_a_result_waits_as_long_as_its_process_stands_still(world: World) -> None:
    cut = Fault("cut", 1001.05, 1005.0, MINE)
    assert twice(world, cut, Fault("crash", 1004.0, 1004.0, MINE)) == 0
    assert twice(world, cut, Fault("crash", 1009.0, 1009.0, MINE)) == 1


def test_lost_commits_cost_what_was_written_in_between(world: World) -> None:
    world.server.lost = [Lost(1001.0, 1002.0, [])]
    assert twice(world) == 0
    world.server.lost = [Lost(1004.0, 1006.0, [])]
    assert twice(world) == 1


def test_one_fault_excuses_one_execution(world: World) -> None:
    world.faults = [Fault("crash", 1001.05, 1001.05, MINE)]
    world.executions = [
        Execution("run-1", "0/work#0", 1, MINE, 1001.0 + n / 100, 1001.1, "returned")
        for n in range(3)
    ]
    [violation] = check_executions(world, [], Excuses(world, []))
    assert "3 lives, 1 too many" in violation


@pytest.mark.parametrize(("cancelled_at", "wrong"), [(1010.0, 0), (1020.0, 1)])
def test_a_cancelled_run_is_looked_at_up_to_its_cancel(
    world: World, cancelled_at: float, wrong: int
) -> None:
    rows = [
        AuditRow(1, "runs", "I", 1000.0, run_id="run-1"),
        AuditRow(2, "messages", "I", cancelled_at, run_id="run-1", kind="cancel"),
    ]
    assert twice(world) == 1
    assert len(check_executions(world, rows, Excuses(world, rows))) == wrong


def test_an_id_that_is_started_again_is_another_run(world: World) -> None:
    rows = [
        AuditRow(number, "runs", op, at, run_id="run-1")
        for number, (op, at) in enumerate((("I", 1000.0), ("D", 1010.0), ("I", 1012.0)))
    ]
    assert twice(world) == 1
    assert check_executions(world, rows, Excuses(world, rows)) == []


# ---- deaths ---------------------------------------------------------------------------------------


def death(world: World, at: float, *faults: Fault) -> int:
    """A runner that was registered at 1000.0 is declared dead by another: how often that was wrong."""
    world.faults = list(faults)
    rows = [
        AuditRow(1, "runners", "I", 1000.0, runner_id=RUNNER, dead=False, backend=MINE),
        AuditRow(2, "runners", "U", at, runner_id=RUNNER, dead=True, old_dead=False, backend=OTHER),
    ]
    return len(check_deaths(world, rows))


@pytest.mark.parametrize("kind", ["pause", "cut", "outage"])
def test_who_could_not_renew_may_be_declared_dead_not_much_later(world: World, kind: str) -> None:
    fault = Fault(kind, 1002.0, 1008.0, None if kind == "outage" else MINE)
    assert death(world, 1006.0, fault) == 0
    assert death(world, 1010.0, fault) == 0
    assert death(world, 1013.0, fault) == 1


def test_who_is_blocked_renews_all_the_same(world: World) -> None:
    assert death(world, 1006.0, Fault("block", 1002.0, 1008.0, MINE)) == 1


def test_who_is_no_more_may_be_declared_dead_whenever(world: World) -> None:
    assert death(world, 1100.0, Fault("crash", 1002.0, 1002.0, MINE)) == 0
    assert death(world, 1100.0, Fault("crash", 1002.0, 1002.0, OTHER)) == 1


def test_a_void_session_does_not_excuse_the_next_one(world: World) -> None:
    assert death(world, 1006.0, Fault("void", 999.0, 999.0, MINE)) == 1


def test_a_clock_that_was_set_excuses_a_lease_and_only_with_failures(world: World) -> None:
    world.jumps = [(1002.0, 30.0)]
    assert death(world, 1003.0) == 1
    world.figures = replace(world.figures, noise=0.02)
    assert death(world, 1003.0) == 0
    assert death(world, 1009.0) == 1
    world.jumps = [(1002.0, -30.0)]
    assert death(world, 1003.0) == 1


def test_lost_commits_excuse_a_lease(world: World) -> None:
    world.server.lost = [Lost(1002.0, 1003.0, [])]
    assert death(world, 1005.0) == 0
    assert death(world, 1010.0) == 1


# ---- shards ---------------------------------------------------------------------------------------


def claimed(world: World, *claims: tuple[int, int, int]) -> list[str]:
    """One after another, runners claim a run that is known to some: (runner, claim, epoch). Shards are held by 1
    under epoch 5."""
    world.figures = replace(world.figures, partial=1, shards=1)
    world.accounts.workflows["run-1"] = "rare"
    rows = [AuditRow(0, "shards", "U", 1000.0, shard_id=0, runner_id=1, epoch=5)]
    before: tuple[int | None, int | None] = (None, None)
    for runner, claim, epoch in claims:
        rows.append(
            AuditRow(
                len(rows),
                "fences",
                "U",
                1001.0,
                run_id="run-1",
                claim_id=claim,
                runner_id=runner,
                epoch=epoch,
                old_runner_id=before[0],
                old_claim_id=before[1],
            )
        )
        before = (runner, claim)
    return check_shards(world, rows)


def test_a_claim_bears_its_shards_epoch(world: World) -> None:
    assert claimed(world, (1, 100, 5)) == []
    [violation] = claimed(world, (1, 100, 4))
    assert "under epoch 4, its shard's was 5" in violation


def test_whom_a_run_is_lent_to_keeps_it_for_life(world: World) -> None:
    assert claimed(world, (2, 100, 5)) == []
    [violation] = claimed(world, (2, 100, 5), (1, 101, 5))
    assert "was lent to runner 2" in violation


def test_every_shard_must_have_a_holder_that_lives(world: World) -> None:
    world.server.connection.execute(
        "insert into perdure_shards (shard_id, slot_lo, slot_hi, runner_id) values (0, 0, 65535, 1)"
    )
    assert world.unheld() == ["shard 0 is held by 1, of no living process"]
