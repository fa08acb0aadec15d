"""Alembic's entry: upgrade over the connection and inside the transaction that `run.migrate_over` has opened."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="perdure_alembic_version",
    transactional_ddl=True,
)
context.run_migrations()
