"""The schema's version, and whether this code may work with the schema it finds (R16).

The tables are in each engine's folder: `schema.sql` is version 1 and frozen, `schema_2.sql` what version 2 adds. The
steps from one version to the next are in `migrations/`. What all processes of a cluster must agree on is in the table
`perdure_meta`, one key a row.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import resources

from perdure.storage.errors import SchemaError
from perdure.storage.model import Meta

SCHEMA_VERSION = 2
"""The schema this code was written for. It also works with the next version, while that is expanding only."""

MIN_CODE_VERSION = 1
"""What `perdure migrate` of this code writes: the oldest code (by its SCHEMA_VERSION) that may boot."""

HASH_NAME = "xxh3_64"
"""How a run id becomes a slot; stored, so that another hash refuses to boot."""


def statements(engine: str, version: int) -> list[str]:
    """What a version adds to the one before it, on an engine (its folder's name): one statement an item, ready to
    execute in order."""
    file = "schema.sql" if version == 1 else f"schema_{version}.sql"
    text = resources.files("perdure.storage").joinpath(engine, file).read_text("utf-8")
    return [part.strip() for part in text.split(";\n") if _code_of(part)]


def _code_of(text: str) -> str:
    return "".join(line for line in text.splitlines() if not line.lstrip().startswith("--")).strip()


def all_statements(engine: str) -> list[str]:
    """The DDL of a new database of this release."""
    versions = range(1, SCHEMA_VERSION + 1)
    return [statement for version in versions for statement in statements(engine, version)]


def initial_meta(created_at: float, version: int = SCHEMA_VERSION) -> dict[str, str]:
    """The rows of `perdure_meta` of a new cluster. Topology and lock mode are agreed on at the first boot."""
    return {
        "schema_version": str(version),
        "min_code_version": str(MIN_CODE_VERSION),
        "hash_name": HASH_NAME,
        "cluster_id": secrets.token_hex(8),
        "created_at": f"{created_at:.6f}",
    }


def read_meta(
    rows: Mapping[str, str | None] | None,
    *,
    database: str,
    schema: str | None = None,
    server_identity: str | None = None,
) -> Meta:
    """The agreed facts from the rows of `perdure_meta` (None: the table does not exist).

    database: its URL as people may see it, without a password. schema: if one was set. Raises `SchemaError`
    naming what to run if the schema is missing, older than this code or too new for it. `shard_count` is 0
    until a runner has booted.
    """
    remedy = f"perdure migrate --db {database}"
    if schema is not None:
        database, remedy = f"schema {schema!r} of {database}", f"{remedy} --schema {schema}"
    if not rows or rows.get("schema_version") is None:
        granted = "" if schema is None else ", and grant this role USAGE on the schema"
        raise SchemaError(f"{database} has no perdure tables; create them with: {remedy}{granted}")
    version = int(rows["schema_version"] or 0)
    needed = int(rows.get("min_code_version") or 1)
    if version < SCHEMA_VERSION:
        raise SchemaError(
            f"the schema of {database} is version {version}, this release needs {SCHEMA_VERSION}; "
            f"update it with: {remedy}"
        )
    if needed > SCHEMA_VERSION:
        raise SchemaError(
            f"the schema of {database} is version {version} and serves releases of schema {needed} and later, "
            f"this one is of {SCHEMA_VERSION}; install a newer perdure (it was updated by a newer "
            f"{remedy})"
        )
    hash_name = rows.get("hash_name") or HASH_NAME
    if hash_name != HASH_NAME:
        raise SchemaError(
            f"{database} places runs by {hash_name}, this release by {HASH_NAME}; install the release that "
            f"created it, or start with an empty database: {remedy}"
        )
    return Meta(
        schema_version=version,
        min_code_version=needed,
        shard_count=int(rows.get("shard_count") or 0),
        hash_name=hash_name,
        lock_mode=rows.get("lock_mode"),
        cluster_id=rows.get("cluster_id") or "",
        server_identity=server_identity,
        server=rows.get("server"),
        server_change=rows.get("server_change"),
    )
