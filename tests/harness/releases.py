"""Earlier releases, from this repository's own history: to run beside today's code on one schema (R16)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import asyncpg
import pytest

from perdure.sharding.slots import slot_of
from perdure.storage import schema
from perdure.storage.connect import in_own_thread

from .pods import ROOT

FIRST = "70f474470100a279c45afb1bcaf91f4a3e0b8952"
"""The commit at which the first release was finished: schema version 1."""


def need_commit(commit: str) -> None:
    """Skip the test where the clone lacks this commit."""
    if not _has(commit):
        pytest.skip(f"commit {commit} is not in this clone: it needs the repository's history")


@cache
def _has(commit: str) -> bool:
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    return found.returncode == 0


def source_of(commit: str, folder: Path) -> Path:
    """The package's source as of a commit, unpacked below ``folder``; what to put into PYTHONPATH."""
    need_commit(commit)
    folder.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def make_version_1(url: str) -> None:
    """The tables as the first release left them, in an empty PostgreSQL database."""

    async def make() -> None:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                for statement in schema.statements("postgres", 1):
                    await connection.execute(statement)
                await connection.executemany(
                    "insert into perdure_meta (key, value) values ($1, $2)",
                    list(schema.initial_meta(time.time(), version=1).items()),
                )
                await connection.execute(
                    "create table perdure_alembic_version (version_num varchar(32) primary key);"
                    "insert into perdure_alembic_version values ('0001')"
                )
        finally:
            await connection.close()

    in_own_thread(lambda: asyncio.run(make()))


_INPUT = "unnest($1::text[], $2::int[], $3::text[]) as u(run_id, slot, payload), (select $4::text as workflow) w"
_RUNS = "run_id, slot, payload, workflow, seed, start_token"
STARTS = (
    f"insert into perdure_runs ({_RUNS}) select run_id, slot, payload, workflow, slot, slot from {_INPUT}",
    f"insert into perdure_fences (run_id, slot, workflow) select run_id, slot, workflow from {_INPUT}",
    f"insert into perdure_wakes (run_id, slot, wake_at) select run_id, slot, now() from {_INPUT}",
)


async def start_by_hand(url: str, runs: dict[str, str], workflow: str) -> None:
    """Pending runs (run id → payload text) in tables of any version, as a client of the first release writes them."""
    ids = sorted(runs)
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            for statement in STARTS:
                await connection.execute(
                    statement,
                    ids,
                    [slot_of(run_id) for run_id in ids],
                    [runs[run_id] for run_id in ids],
                    workflow,
                )
    finally:
        await connection.close()


def wheel_of(commit: str, folder: Path) -> Path:
    """A release as its users have it: the wheel built from a commit, installed below ``folder``; for PYTHONPATH."""
    source = source_of(commit, folder / "source").parent
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, installed = folder / "wheels", folder / "installed"
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=180)
    (wheel,) = wheels.glob("perdure-*.whl")
    unpack = [*pip, "install", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(unpack, check=True, capture_output=True, timeout=180)
    return folder / "installed"
