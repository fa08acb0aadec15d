"""What is wrong with a cluster: from facts to findings, by pure functions. Nothing is recorded, nobody is called.

Every check says something: that it is well, what it found, or by name why it could not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.runtime.inspection import unowned
from perdure.storage.examination import RunFacts, ServerFacts
from perdure.storage.model import Meta, RunnerRow, Topology
from perdure.storage.schema import SCHEMA_VERSION

CLOCK_LIMIT = 1.0
"""Seconds a clock may differ from the database's."""
OPEN_LIMIT = 60.0
"""Seconds a transaction may be open: as long as it lasts, nobody's old row versions can be removed."""
IDLE_LIMIT = 10.0
"""Seconds a transaction may be open and do nothing."""
DEAD_LIMIT = 100_000
"""Dead rows of a hot table, above which, if they are also ten times the living, it is not being cleaned up."""
STUCK_AFTER = 1_800.0
NAMED = 20
"""Runs named at most by one check."""


class Verdict(StrEnum):
    WELL = "well"
    FOUND = "found"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """check: its name, stable for scripts. what: in words; of something found, also what to do."""

    check: str
    verdict: Verdict
    what: str


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """A runner as its row says, and what it answered to a question after its status; None: nothing in time."""

    row: RunnerRow
    status: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was looked at.

    clock_offset: the database's clock − this machine's, and by how much that may be wrong. believed: runners by whose
    rows they live. connections: most that a pod with these settings opens. stuck_after: seconds.
    """

    meta: Meta
    topology: Topology
    server: ServerFacts
    runs: RunFacts
    clock_offset: tuple[float, float]
    believed: Sequence[RunnerFacts]
    connections: int
    stuck_after: float = STUCK_AFTER


Check = Callable[[Facts], Iterator[Finding]]


def diagnose(facts: Facts) -> list[Finding]:
    """Every check in turn; one that found nothing says so."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        found = list(check(facts))
        findings += found or [Finding(name, Verdict.WELL, WELL[name])]
    return findings


def _found(check: str, what: str) -> Finding:
    return Finding(check, Verdict.FOUND, what)


def _skipped(check: str, why: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, why)


# -- the database


def check_schema(facts: Facts) -> Iterator[Finding]:
    meta = facts.meta
    if meta.schema_version != SCHEMA_VERSION:
        yield _found(
            "schema",
            f"it is version {meta.schema_version}, this release was written for {SCHEMA_VERSION}: the pods should soon "
            "be of the release that migrated it",
        )


NOT_KEPT = "a crash of the server loses commits that perdure was told of"


def check_durability(facts: Facts) -> Iterator[Finding]:
    settings = facts.server.settings
    for name in ("fsync", "full_page_writes"):
        if settings.get(name, "on") == "off":
            yield _found("durability", f"{name} is off: {NOT_KEPT}; set it to on")
    if settings.get("synchronous_commit") == "off":
        yield _found(
            "durability",
            f"synchronous_commit is off for this role or database: {NOT_KEPT}; set it to on",
        )
    if not facts.server.server and settings.get("synchronous") not in ("2", "3"):
        yield _found(
            "durability",
            f"SQLite's synchronous is {settings.get('synchronous')}, not 2 (full): {NOT_KEPT}",
        )


def check_server(facts: Facts) -> Iterator[Finding]:
    meta = facts.meta
    if meta.server_change is not None:
        yield _found(
            "server",
            f"{meta.server_change}: commits may be missing; see what ran twice, and after a restore run: "
            "perdure after-restore",
        )
    elif facts.server.server and meta.server is None:
        yield _skipped("server", "no runner has written down yet which server this is")
    elif not facts.server.server:
        yield _skipped("server", "a SQLite file has no server")


def check_pooler(facts: Facts) -> Iterator[Finding]:
    if not facts.server.server:
        yield _skipped("pooler", "a SQLite file has no sessions")
    elif facts.server.rotated is not None:
        yield _found(
            "pooler",
            f"a pooler rotates server connections ({facts.server.rotated}): no session locks, no pushed hints, more "
            "round trips; connect directly, or in session mode",
        )


def check_connections(facts: Facts) -> Iterator[Finding]:
    server = facts.server
    if not server.server:
        yield _skipped("connections", "a SQLite file has no limit of connections")
        return
    pods = len(facts.believed)
    needed = pods * facts.connections
    if needed > server.connections_most:
        yield _found(
            "connections",
            f"{pods} pods may open {facts.connections} connections each, {needed} in all, and the server allows "
            f"{server.connections_most}: lower db_pool or raise max_connections",
        )
    elif server.connections >= 0.9 * server.connections_most:
        yield _found(
            "connections",
            f"{server.connections} of {server.connections_most} connections are in use: raise max_connections, or see "
            "who opens them (pg_stat_activity)",
        )


def check_transactions(facts: Facts) -> Iterator[Finding]:
    server = facts.server
    if not server.server:
        yield _skipped(
            "transactions", "a SQLite file says nothing of other processes' transactions"
        )
        return
    for session in server.sessions:
        name = f"{session.application!r} of {session.user} (pid {session.pid})"
        if session.state == "prepared":
            name = f"the prepared transaction {session.application!r} of {session.user}"
        yield _found(
            "transactions",
            f"{name} has had a transaction open for {session.seconds:,.0f} s ({session.state}): meanwhile no old row "
            "version can be removed and every step gets slower; end it, or set idle_in_transaction_session_timeout",
        )
    if server.hidden:
        yield _skipped(
            "transactions",
            f"this role may not see into {server.hidden} sessions of other roles: grant it pg_read_all_stats",
        )


def check_vacuum(facts: Facts) -> Iterator[Finding]:
    server = facts.server
    if not server.server:
        yield _skipped("vacuum", "SQLite keeps no dead rows")
        return
    if server.settings.get("autovacuum") == "off":
        yield _found(
            "vacuum",
            "autovacuum is off: dead rows pile up and every claim gets slower; turn it on",
        )
    for table in server.tables:
        if not table.autovacuum:
            yield _found(
                "vacuum", f"autovacuum is off for {table.name}: reset (autovacuum_enabled)"
            )
        if table.dead > DEAD_LIMIT and table.dead > 10 * table.live:
            yield _found(
                "vacuum",
                f"{table.name} has {table.dead:,} dead rows and {table.live:,} living: something keeps them (see "
                f"transactions), or autovacuum cannot keep up; run: vacuum {table.name}",
            )


def check_clock(facts: Facts) -> Iterator[Finding]:
    offset, error = facts.clock_offset
    if abs(offset) - error > CLOCK_LIMIT:
        yield _found(
            "clock",
            f"this machine's clock is {_off(-offset)} the database's: see to its time service",
        )


def check_clocks_of_runners(facts: Facts) -> Iterator[Finding]:
    if not facts.believed:
        yield _skipped("runner clocks", "no runner is alive to tell its clock")
    for runner in facts.believed:
        offset = None if runner.status is None else runner.status.get("clock_offset")
        if not isinstance(offset, int | float):
            yield _skipped("runner clocks", f"{runner.row.replica_id} did not tell its clock")
        elif abs(offset) > CLOCK_LIMIT:
            yield _found(
                "runner clocks",
                f"the clock of {runner.row.replica_id} is {_off(-offset)} the database's: see to its time service",
            )


def _off(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"


# -- the cluster


def check_runners(facts: Facts) -> Iterator[Finding]:
    for runner in facts.believed:
        if runner.status is None:
            yield _found(
                "runners",
                f"{runner.row.replica_id} at {runner.row.address} keeps its lease and does not answer on its port: it "
                "cannot be probed; see that the address can be reached (PERDURE_RUNNER_HOST, POD_IP)",
            )
    if not facts.believed and facts.runs.workflows:
        yield _found(
            "runners",
            f"no runner is alive and {sum(facts.runs.workflows.values())} runs have not ended: start one with "
            "perdure serve",
        )


def check_shards(facts: Facts) -> Iterator[Finding]:
    if not facts.believed:
        yield _skipped("shards", "no runner is alive to hold them")
        return
    free = unowned(facts.topology)
    if free:
        yield _found(
            "shards",
            f"{free} of {len(facts.topology.shards)} shards are held by nobody who lives though pods live: look again "
            "in a moment, then at the pods' logs",
        )


def check_lock_mode(facts: Facts) -> Iterator[Finding]:
    if not facts.believed:
        yield _skipped("lock mode", "no runner is alive to use one")
    agreed = facts.meta.lock_mode
    for runner in facts.believed:
        mode = runner.row.info.get("shard_lock")
        if mode not in (None, "none", agreed):
            yield _found(
                "lock mode",
                f"{runner.row.replica_id} holds shards by {mode!r}, the cluster agreed on {agreed!r}: restart it",
            )


# -- runs


WHY = {
    "due": "it is due and nobody has taken it",
    "running": "it is running and recorded nothing",
    "timer": "it waits for an instant that is not set",
}


def check_stuck(facts: Facts) -> Iterator[Finding]:
    for run in facts.runs.stuck:
        yield _found(
            "stuck runs",
            f"{run.run_id} ({run.workflow}): {WHY.get(run.why, run.why)} for {run.idle:,.0f} s; see: perdure workflows "
            f"why {run.run_id}",
        )


def check_workflows(facts: Facts) -> Iterator[Finding]:
    if not facts.believed:
        yield _skipped("workflows", "no runner is alive to tell what it knows")
        return
    known = {name for runner in facts.believed for name in runner.row.workflows}
    for workflow, count in facts.runs.workflows.items():
        if workflow not in known:
            yield _found(
                "workflows",
                f"{count} runs of {workflow!r} wait, and no live runner knows it: deploy code that has it, or cancel "
                "them",
            )


def check_held(facts: Facts) -> Iterator[Finding]:
    for run in facts.runs.held:
        yield _found(
            "held runs",
            f"{run.run_id} ({run.workflow}) is on hold ({run.hold}) until somebody acts: perdure workflows why "
            f"{run.run_id}",
        )
    if facts.runs.held_count > len(facts.runs.held):
        yield _found(
            "held runs", f"and {facts.runs.held_count - len(facts.runs.held)} more are on hold"
        )


def check_access(facts: Facts) -> Iterator[Finding]:
    yield _skipped("undeclared access", "not in this release")


CHECKS: Mapping[str, Check] = {
    "schema": check_schema,
    "durability": check_durability,
    "server": check_server,
    "pooler": check_pooler,
    "connections": check_connections,
    "transactions": check_transactions,
    "vacuum": check_vacuum,
    "clock": check_clock,
    "runner clocks": check_clocks_of_runners,
    "runners": check_runners,
    "shards": check_shards,
    "lock mode": check_lock_mode,
    "workflows": check_workflows,
    "stuck runs": check_stuck,
    "held runs": check_held,
    "undeclared access": check_access,
}

WELL: Mapping[str, str] = {
    "schema": "it is the version this release was written for",
    "durability": "what is committed is on disk",
    "server": "it is the server the cluster was always on",
    "pooler": "nothing between us and the server rotates sessions",
    "connections": "the server allows what the pods may open",
    "transactions": "none is open for long",
    "vacuum": "dead rows are cleaned up",
    "clock": "this machine's clock agrees with the database's",
    "runner clocks": "the runners' clocks agree with the database's",
    "runners": "each runner that keeps its lease answers",
    "shards": "each is held",
    "lock mode": "all runners use the one agreed on",
    "workflows": "live runners know the workflows of all runs",
    "stuck runs": "none",
    "held runs": "none",
    "undeclared access": "",
}
