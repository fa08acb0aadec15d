"""What the second release adds, from each engine's `schema_2.sql`; runners of the first go on working (R16)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from perdure.storage import schema

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FOLDERS = {"postgresql": "postgres", "sqlite": "sqlite"}


def upgrade() -> None:
    connection = op.get_bind()
    for statement in schema.statements(FOLDERS[connection.dialect.name], 2):
        connection.exec_driver_sql(statement)
    meta = sa.table("perdure_meta", sa.column("key", sa.Text), sa.column("value", sa.Text))
    connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value="2"))
