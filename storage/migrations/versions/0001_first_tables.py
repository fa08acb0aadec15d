"""The tables of the first release, from each engine's `schema.sql`."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

from perdure.storage import schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FOLDERS = {"postgresql": "postgres", "sqlite": "sqlite"}


def upgrade() -> None:
    connection = op.get_bind()
    for statement in schema.statements(FOLDERS[connection.dialect.name], 1):
        connection.exec_driver_sql(statement)
    meta = sa.table("perdure_meta", sa.column("key", sa.Text), sa.column("value", sa.Text))
    rows = schema.initial_meta(time.time(), version=1)
    connection.execute(
        sa.insert(meta), [{"key": key, "value": value} for key, value in rows.items()]
    )
