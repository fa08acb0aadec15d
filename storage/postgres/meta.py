"""What the cluster agreed on, as a session finds it."""

from __future__ import annotations

from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import SchemaError
from perdure.storage.interface import Capabilities
from perdure.storage.model import Meta
from perdure.storage.postgres import queries
from perdure.storage.postgres.address import Address
from perdure.storage.postgres.session import Session
from perdure.storage.schema import read_meta


def capabilities_of(session: Session | None) -> Capabilities:
    """What PostgreSQL can do; the server's version is known once a session is open."""
    return Capabilities(
        dialect="postgresql",
        server_version=session.server_version if session is not None else "",
        shared=True,
        multi_host=True,
        pushes_hints=session is None or not session.rotated,
        returning=True,
        session_locks=True,
    )


async def read_agreed(session: Session, settings: DatabaseSettings, address: Address) -> Meta:
    """Read `perdure_meta` and check the schema. Raises `SchemaError` naming the command to run."""
    try:
        found = await session.fetch(queries.READ_META, writes=False, deadline=settings.deadline)
        rows = {row["key"]: row["value"] for row in found}
    except SchemaError:
        rows = {}
    return read_meta(
        rows,
        database=address.shown,
        schema=settings.schema,
        server_identity=None if session.position.system == "unknown" else session.position.system,
    )
