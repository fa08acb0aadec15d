"""Each finding of `perdure doctor`, from made-up facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.runtime.doctor import CHECKS, WELL, Facts, RunnerFacts, Verdict, diagnose
from perdure.storage.examination import (
    HeldRun,
    RunFacts,
    ServerFacts,
    SessionFacts,
    StuckRun,
    TableFacts,
)
from perdure.storage.model import Meta, RunnerRow, ShardRow, Topology
from perdure.storage.schema import SCHEMA_VERSION

pytestmark = pytest.mark.req("DB11")

ROW = RunnerRow(
    runner_id=1,
    replica_id="pod-1",
    address="10.0.0.1:34000",
    started_at=0.0,
    expires_at=110.0,
    renew_count=3,
    dead=False,
    workflows=("shop.pay",),
    info={"shard_lock": "advisory"},
)
SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "autovacuum": "on",
}
SERVER = ServerFacts(
    settings=SETTINGS,
    server=True,
    connections=12,
    connections_most=97,
    tables=[TableFacts("perdure_fences", live=10, dead=200_000 // 10, autovacuum=True)],
)
META = Meta(
    schema_version=SCHEMA_VERSION,
    min_code_version=1,
    shard_count=2,
    hash_name="xxh3_64",
    lock_mode="advisory",
    cluster_id="c",
    server="1/1",
)
HEALTHY = Facts(
    meta=META,
    topology=Topology([ROW], [ShardRow(0, 0, 1, 1, 1), ShardRow(1, 2, 3, 1, 1)], 100.0),
    server=SERVER,
    runs=RunFacts({"shop.pay": 3}, (), (), 0),
    clock_offset=(0.2, 0.01),
    believed=[RunnerFacts(ROW, {"clock_offset": 0.01})],
    connections=14,
)
FILE = replace(
    HEALTHY,
    server=ServerFacts({"synchronous": "2", "journal_mode": "wal"}, server=False),
    meta=replace(META, server=None, lock_mode="row"),
    believed=[],
    runs=RunFacts({}, (), (), 0),
)


def told(facts: Facts, check: str) -> list[tuple[Verdict, str]]:
    return [(each.verdict, each.what) for each in diagnose(facts) if each.check == check]


def test_a_healthy_cluster_is_well_and_nothing_is_passed_in_silence() -> None:
    findings = diagnose(HEALTHY)
    assert [each.check for each in findings] == list(CHECKS) == list(WELL)
    verdicts = {each.check: each.verdict for each in findings}
    assert verdicts.pop("undeclared access") is Verdict.SKIPPED
    assert set(verdicts.values()) == {Verdict.WELL}


def test_on_a_file_what_has_no_meaning_is_skipped_by_name() -> None:
    verdicts = {each.check: each.verdict for each in diagnose(FILE)}
    skipped = {check for check, verdict in verdicts.items() if verdict is Verdict.SKIPPED}
    assert skipped == {
        "server", "pooler", "connections", "transactions", "vacuum", "undeclared access",
        "runner clocks", "shards", "lock mode", "workflows",  # no runner is alive there
    }  # fmt: skip
    assert Verdict.FOUND not in verdicts.values()


def server(**changes: Any) -> Facts:
    settings = changes.pop("settings", {})
    return replace(HEALTHY, server=replace(SERVER, settings={**SETTINGS, **settings}, **changes))


def believed(**changes: Any) -> Facts:
    status = changes.pop("status", {"clock_offset": 0.0})
    return replace(HEALTHY, believed=[RunnerFacts(replace(ROW, **changes), status)])


OPEN = SessionFacts(4711, "psql", "ada", "idle in transaction", 3_600.0)
GONE = SessionFacts(0, "gid-1", "ada", "prepared", 99.0)
CASES = {
    "schema older": ("schema", replace(HEALTHY, meta=replace(META, schema_version=99)), "version 99"),
    "fsync": ("durability", server(settings={"fsync": "off"}), "fsync is off"),
    "pages": ("durability", server(settings={"full_page_writes": "off"}), "full_page_writes"),
    "commit": ("durability", server(settings={"synchronous_commit": "off"}), "synchronous_commit"),
    "file": (
        "durability",
        replace(FILE, server=ServerFacts({"synchronous": "1"}, server=False)),
        "synchronous is 1",
    ),
    "moved": (
        "server",
        replace(HEALTHY, meta=replace(META, server_change="2026-01-01 another one")),
        "another one: commits may be missing",
    ),
    "pooler": ("pooler", server(rotated="backend 1 became 2"), "backend 1 became 2"),
    "too many pods": ("connections", replace(HEALTHY, connections=98), "98 in all"),
    "nearly full": ("connections", server(connections=90), "90 of 97"),
    "open": ("transactions", server(sessions=[OPEN]), "'psql' of ada (pid 4711)"),
    "prepared": ("transactions", server(sessions=[GONE]), "prepared transaction 'gid-1'"),
    "no vacuum": ("vacuum", server(settings={"autovacuum": "off"}), "autovacuum is off"),
    "no vacuum here": (
        "vacuum",
        server(tables=[TableFacts("perdure_wakes", 1, 0, autovacuum=False)]),
        "off for perdure_wakes",
    ),
    "dead rows": (
        "vacuum",
        server(tables=[TableFacts("perdure_wakes", 10_000, 100_001, autovacuum=True)]),
        "100,001 dead rows",
    ),
    "clock": ("clock", replace(HEALTHY, clock_offset=(-1.6, 0.5)), "1.6 s ahead of"),
    "its clock": ("runner clocks", believed(status={"clock_offset": 30.0}), "30.0 s behind"),
    "silent": ("runners", believed(status=None), "does not answer"),
    "nobody": ("runners", replace(HEALTHY, believed=[]), "no runner is alive and 3 runs"),
    "free shards": (
        "shards",
        replace(HEALTHY, topology=Topology([ROW], [ShardRow(0, 0, 1, None, 1)], 100.0)),
        "1 of 1 shards",
    ),
    "shards of the dead": (
        "shards",
        replace(
            HEALTHY,
            topology=Topology(
                [
                    ROW,
                    replace(ROW, runner_id=2, expires_at=99.0),
                    replace(ROW, runner_id=3, dead=True),
                ],
                [ShardRow(shard, shard, shard, holder, 1) for shard, holder in enumerate((1, 2, 3, 4))],
                100.0,
            ),
        ),
        "3 of 4 shards",
    ),
    "mode": ("lock mode", believed(info={"shard_lock": "row"}), "'row'"),
    "unknown": ("workflows", believed(workflows=("other",)), "3 runs of 'shop.pay'"),
    "stuck": (
        "stuck runs",
        replace(HEALTHY, runs=RunFacts({}, [StuckRun("r1", "w", "due", 2_000.0)], (), 0)),
        "r1 (w): it is due and nobody has taken it for 2,000 s",
    ),
    "held": (
        "held runs",
        replace(HEALTHY, runs=RunFacts({}, (), [HeldRun("r2", "w", "crash-loop")], 5)),
        "r2 (w) is on hold (crash-loop)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_finding(name: str) -> None:
    check, facts, words = CASES[name]
    found = [what for verdict, what in told(facts, check) if verdict is Verdict.FOUND]
    assert any(words in what for what in found), told(facts, check)


def test_every_check_but_the_one_of_a_later_release_can_find_something() -> None:
    assert {check for check, _, _ in CASES.values()} == {*CHECKS} - {"undeclared access"}


def test_close_to_a_limit_nothing_is_found() -> None:
    for facts, check in (
        (replace(HEALTHY, clock_offset=(1.4, 0.5)), "clock"),
        (believed(status={"clock_offset": -0.9}), "runner clocks"),
        (server(settings={"synchronous_commit": "remote_apply"}), "durability"),
        (server(tables=[TableFacts("x", 50_000, 200_000, autovacuum=True)]), "vacuum"),
    ):
        assert [verdict for verdict, _ in told(facts, check)] == [Verdict.WELL], check


def test_what_cannot_be_seen_is_a_named_skip() -> None:
    assert told(server(hidden=3), "transactions")[0][0] is Verdict.SKIPPED
    assert told(believed(status=None), "runner clocks")[0][0] is Verdict.SKIPPED
    assert told(replace(HEALTHY, meta=replace(META, server=None)), "server")[0] == (
        Verdict.SKIPPED,
        "no runner has written down yet which server this is",
    )


@pytest.mark.parametrize("check", ["shards", "workflows", "runner clocks", "lock mode"])
@pytest.mark.parametrize("runs", [{}, {"shop.pay": 3}])
def test_where_no_runner_is_alive_nothing_is_said_of_runners(
    check: str, runs: dict[str, int]
) -> None:
    nobody = replace(HEALTHY, believed=[], runs=RunFacts(runs, (), (), 0))
    ((verdict, why),) = told(nobody, check)
    assert verdict is Verdict.SKIPPED
    assert why.startswith("no runner is alive")


def test_more_held_runs_than_are_named_are_counted() -> None:
    facts = replace(HEALTHY, runs=RunFacts({}, (), [HeldRun("r2", "w", "operator")], 5))
    assert told(facts, "held runs")[-1] == (Verdict.FOUND, "and 4 more are on hold")
