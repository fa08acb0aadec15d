"""``perdure doctor``: looks at the database, the runners and the runs, and says what is wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

import typer
from rich.markup import escape

from perdure.runtime.cli.cluster import ask_runners
from perdure.runtime.cli.options import Db, Format, Schema, check_format, client_settings
from perdure.runtime.cli.output import console, messages, print_json, print_table
from perdure.runtime.doctor import (
    IDLE_LIMIT,
    NAMED,
    OPEN_LIMIT,
    STUCK_AFTER,
    Facts,
    Finding,
    RunnerFacts,
    Verdict,
    diagnose,
)
from perdure.runtime.inspection import cluster_status, lives
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock
from perdure.storage.connect import upkeep as upkeep_of
from perdure.storage.errors import SchemaError
from perdure.storage.model import Topology
from perdure.storage.upkeep import UpkeepStore

FOUND = 1
"""Exit code when something is wrong."""


def doctor(
    stuck_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1.0, help="A run nothing happened to for so long is stuck."
        ),
    ] = STUCK_AFTER,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """What is wrong: settings that lose commits, clocks, connections, long transactions, stuck and held runs, and more.

    Only reads. Each check is well, found something, or says why it was skipped; exit code 1 if anything was found."""
    as_json = check_format(format)
    settings = client_settings(db, schema)
    with messages().status("looking"):
        try:
            findings = diagnose(asyncio.run(gather(settings, stuck_after)))
        except SchemaError as error:
            findings = [Finding("schema", Verdict.FOUND, str(error))]
    if as_json:
        print_json(findings)
    else:
        print_table(("check", "", "what"), [_row(finding) for finding in findings])
        counts = Counter(finding.verdict for finding in findings)
        said = " · ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        console().print(escape(said), soft_wrap=True)
    if any(finding.verdict is Verdict.FOUND for finding in findings):
        raise typer.Exit(FOUND)


async def gather(settings: Settings, stuck_after: float) -> Facts:
    """Everything the checks look at."""
    store = upkeep_of(settings.database("perdure doctor"), clock=SystemClock())
    try:
        meta = await store.open()
        topology, offset = await _topology(store)
        server = await store.server_facts(open_for=OPEN_LIMIT, idle_for=IDLE_LIMIT)
        runs = await store.run_facts(idle=stuck_after, limit=NAMED)
    finally:
        await store.close()
    alive = {row.runner_id: row for row in topology.runners if lives(row, topology.db_now)}
    views = [view for view in cluster_status(topology, meta, {}).runners if view.runner_id in alive]
    answers = await ask_runners(views)
    return Facts(
        meta=meta,
        topology=topology,
        server=server,
        runs=runs,
        clock_offset=offset,
        # One alone on its file keeps no lease: only its answer tells that it lives.
        believed=[
            RunnerFacts(alive[each.runner.runner_id], each.live)
            for each in answers
            if each.live is not None or not each.leaseless
        ],
        connections=settings.connections,
        stuck_after=stuck_after,
    )


async def _topology(store: UpkeepStore) -> tuple[Topology, tuple[float, float]]:
    """With the database's clock against ours, and half the time the answer took: so much it may be wrong."""
    clock = SystemClock()
    sent = clock.now()
    topology = await store.read_topology()
    answered = clock.now()
    return topology, (topology.db_now - (sent + answered) / 2, (answered - sent) / 2)


def _row(finding: Finding) -> tuple[str, str, str]:
    return finding.check, finding.verdict.value, finding.what
