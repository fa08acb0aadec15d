"""``perdure reshard`` and ``perdure after-restore``: changes of a whole cluster, while no pod runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated

import typer

from perdure.runtime.cli.options import Db, Format, Schema, check_format, client_settings
from perdure.runtime.cli.output import messages, plain, print_json, say
from perdure.runtime.settings import Settings
from perdure.sharding.file_lock import FileLock
from perdure.storage.clock import SystemClock
from perdure.storage.connect import database_file, redact
from perdure.storage.connect import upkeep as upkeep_of
from perdure.storage.errors import InUseError
from perdure.storage.model import RunnerRow
from perdure.storage.upkeep import Resharding, UpkeepStore, Voided, check_count, keeps_lease

LONGEST_WAIT = 60.0
"""Seconds to wait for the lease of a pod that is gone to run out."""
NAMED = 20
"""Runs that are named one by one."""


def reshard(
    shards: Annotated[
        int, typer.Argument(metavar="N", help="The new number of shards.", show_default=False)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    db: Db = None,
    schema: Schema = None,
) -> None:
    """Divide the work into another number of shards. All pods must be stopped; runs stay as they are.

    A pod that was killed counts as stopped once its lease has run out, which is waited for."""
    check_count(shards)
    settings = client_settings(db, schema)

    async def plan() -> tuple[Resharding, InUseError | None]:
        async with _upkeep(settings) as store:
            refusal = _in_use(settings) or await _while_running(store)
            return await store.reshard(shards, apply=False), refusal

    async def work() -> Resharding:
        async with _upkeep(settings) as store:
            await _until_silent(store)
            return await store.reshard(shards, apply=True)

    refusal = None
    if dry_run:
        done, refusal = asyncio.run(plan())
    else:
        with _alone(settings):
            done = asyncio.run(work())
    change = f"{len(done.before)} -> {len(done.after)} shards"
    highest = max(shard.epoch for shard in done.after)
    say(
        f"{redact(settings.require_db())}: {'would be' if dry_run else 'now'} {change}, epochs up to {highest}; "
        f"start the pods with PERDURE_SHARDS={len(done.after)}"
    )
    if refusal is not None:
        raise refusal


def after_restore(
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Even while pods run: they are declared dead and come back as new ones."
        ),
    ] = False,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """After a database was restored from a backup, and before pods are started: void every claim that is in it.

    Says what is executed again. Harmless when there is nothing to void."""
    as_json = check_format(format)
    settings = client_settings(db, schema)

    async def work() -> Voided:
        async with _upkeep(settings) as store:
            if not force:
                await _until_silent(store)
            return await store.void_claims(force=force)

    try:
        with nullcontext() if force else _alone(settings):
            done = asyncio.run(work())
    except InUseError as error:
        raise InUseError(
            f"{error}; or pass --force: they are declared dead, and come back"
        ) from error
    if as_json:
        print_json(_json(done))
        return
    for line in _words(done):
        say(line)


@asynccontextmanager
async def _upkeep(settings: Settings) -> AsyncIterator[UpkeepStore]:
    store = upkeep_of(settings.database("perdure upkeep"), clock=SystemClock())
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def _alone(settings: Settings) -> FileLock | nullcontext[None]:
    """Nobody else has the SQLite file open while this lasts. Raises `InUseError` naming who has."""
    file = database_file(settings.require_db())
    if file is None or not file.exists():
        return nullcontext()
    return FileLock(file, shared=False, remedy="stop all pods first")


def _in_use(settings: Settings) -> InUseError | None:
    """Why `_alone` would be refused now."""
    try:
        with _alone(settings):
            return None
    except InUseError as error:
        return error


async def _until_silent(store: UpkeepStore) -> None:
    """Wait until no lease is good any more. Raises `InUseError` naming the runners that renew theirs."""
    refusal = await _while_running(store)
    if refusal is not None:
        raise refusal


async def _while_running(store: UpkeepStore) -> InUseError | None:
    """Look until every runner with a good lease has renewed it or it has run out. Names all that have a good one."""
    renewals: dict[int, int] = {}
    running: set[int] = set()
    loop = asyncio.get_running_loop()
    give_up = loop.time() + LONGEST_WAIT
    with messages().status("") as status:
        while True:
            topology = await store.read_topology()
            living = [row for row in topology.runners if keeps_lease(row, topology.db_now)]
            for row in living:
                if row.renew_count != renewals.setdefault(row.runner_id, row.renew_count):
                    running.add(row.runner_id)
            unsure = [row for row in living if row.runner_id not in running]
            if not unsure or loop.time() >= give_up:
                return _refusal(living)
            rest = max(row.expires_at for row in unsure) - topology.db_now
            names = ", ".join(row.replica_id for row in unsure)
            status.update(f"waiting {rest:.0f} s for the lease of {names} to run out")
            await asyncio.sleep(0.2)


def _refusal(living: Collection[RunnerRow]) -> InUseError | None:
    if not living:
        return None
    names = ", ".join(sorted(f"{row.replica_id} at {row.address}" for row in living))
    return InUseError(
        f"this needs all pods stopped, and there is still: {names}; stop all pods first "
        "(perdure cluster status shows them)"
    )


def _words(done: Voided) -> list[str]:
    if done.cluster_id is None:
        return ["there was nothing to void: no runner is believed alive, no run is held by anybody"]
    names = ", ".join(runner.replica_id for runner in done.runners) or "none"
    again = "they are due, and the step each of them was in is executed again"
    lines = [
        f"runners declared dead: {names}; {done.shards} shards are free; the cluster's id is now {done.cluster_id}",
        f"runs that somebody had when the backup was made: {len(done.runs)}; {again}",
        *(f"  {run_id} ({workflow})" for run_id, workflow in done.runs[:NAMED]),
    ]
    if len(done.runs) > NAMED:
        lines.append(f"  … and {len(done.runs) - NAMED} more (--format json names all)")
    lines.append(
        "what happened after the backup is not in this database: runs started since are gone, and steps executed since "
        "are executed again. perdure serve may be started now"
    )
    return lines


def _json(done: Voided) -> dict[str, object]:
    return {
        "cluster_id": done.cluster_id,
        "runners": [
            {**plain(runner), "runner_id": str(runner.runner_id)} for runner in done.runners
        ],
        "runs": [{"run_id": run_id, "workflow": workflow} for run_id, workflow in done.runs],
        "shards": done.shards,
    }
