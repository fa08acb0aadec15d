"""``perdure migrate``: bring the schema up to this release."""

from __future__ import annotations

from perdure.runtime.cli.options import Db, Schema, client_settings
from perdure.runtime.cli.output import messages, say
from perdure.runtime.settings import Settings
from perdure.storage.connect import migrate as migrate_database
from perdure.storage.connect import redact


def migrate(db: Db = None, schema: Schema = None) -> None:
    """Create or update perdure's tables. Safe while pods run, and when several do it at once."""
    migrate_now(client_settings(db, schema))


def migrate_now(settings: Settings, *, quiet: bool = False) -> None:
    """Migrate and say what was done; ``quiet``: nothing if nothing was."""
    url = settings.require_db()
    with messages().status(f"migrating {redact(url)}"):
        before, after = migrate_database(settings.database("perdure migrate"))
    if before == after and not quiet:
        say(f"{redact(url)}: schema version {after}, nothing to do")
    elif before != after:
        say(f"{redact(url)}: schema version {before or 'none'} -> {after}")
