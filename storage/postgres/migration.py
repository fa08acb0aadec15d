"""`perdure migrate` on PostgreSQL: over our own connection, so that settings and errors are the same as elsewhere."""

from __future__ import annotations

import asyncio
import secrets

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import CannotConnect, ConfigurationError
from perdure.storage.migrations.run import migrate_over
from perdure.storage.postgres.address import Address, address_of
from perdure.storage.postgres.failures import is_loss, reason_of
from perdure.storage.postgres.session import connect_plainly

LOCK = 0x7065_7264_7572_6500  # "perdure": the key of the advisory lock
LOCK_WAIT = "10min"
"""How long a second process waits for the one that migrates."""
TABLE_WAIT = "3s"
"""How long a table may be waited for. Whoever comes after us waits as long, less than any statement's deadline."""


def migrate(settings: DatabaseSettings) -> tuple[int, int]:
    """Blocking, without a running loop in this thread. Creates the schema of the settings if it does not exist."""
    return asyncio.run(_migrate(settings, address_of(settings.url)))


async def _migrate(settings: DatabaseSettings, address: Address) -> tuple[int, int]:
    async def open_connection() -> asyncpg.Connection:
        return await connect_plainly(address, statements=0)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=open_connection,
        poolclass=NullPool,
        # Behind a pooler the next process may get the session in which these were prepared.
        connect_args={"prepared_statement_name_func": lambda: f"perdure_{secrets.token_hex(8)}"},
    )
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(_in_transaction, settings.schema)
    except sa.exc.DBAPIError as error:
        cause = getattr(error.orig, "__cause__", None) or error.orig or error
        if isinstance(cause, asyncpg.LockNotAvailableError):
            raise ConfigurationError(
                f"cannot migrate {address.shown} now: a transaction has had one of its tables in use for longer than "
                f"{TABLE_WAIT} ({reason_of(cause)}); nothing was changed, and runners were held up no longer than "
                "that. Run it again when no backup and no long query is under way (pg_stat_activity shows them)"
            ) from error
        if is_loss(cause):
            raise CannotConnect(
                f"cannot migrate {address.shown}: the connection was lost ({reason_of(cause)}). Run it again: what was "
                "done already is not done twice"
            ) from error
        raise ConfigurationError(
            f"cannot migrate {address.shown}: {reason_of(cause)}; nothing was changed. "
            "Check that the role may create tables there"
        ) from error
    finally:
        await engine.dispose()


def _in_transaction(connection: sa.Connection, schema: str | None) -> tuple[int, int]:
    connection.exec_driver_sql("set local application_name = 'perdure migrate'")
    connection.exec_driver_sql(f"set local lock_timeout = '{LOCK_WAIT}'")
    # Until the end of the transaction: a second process waits here and then finds everything done.
    connection.execute(sa.text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})
    if schema is not None:
        name = connection.dialect.identifier_preparer.quote_identifier(schema)
        found = sa.text("select 1 from pg_namespace where nspname = :name")
        if connection.execute(found, {"name": schema}).scalar() is None:
            connection.exec_driver_sql(f"create schema {name}")
        connection.exec_driver_sql(f"set local search_path to {name}")
    connection.exec_driver_sql(f"set local lock_timeout = '{TABLE_WAIT}'")
    return migrate_over(connection)
