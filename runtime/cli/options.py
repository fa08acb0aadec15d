"""Options that several commands share, and the settings made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.runtime.logs import configure_logs
from perdure.runtime.settings import Settings, load_settings
from perdure.storage.errors import ConfigurationError

DEV_FILE = Path(".perdure") / "dev.db"
"""Of `perdure dev`, in the current folder; other commands use it too when nothing else is configured."""

Db = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="Database URL or SQLite file [PERDURE_DB]."),
]
Schema = Annotated[
    str | None, typer.Option(metavar="NAME", help="PostgreSQL schema of the tables.")
]
Format = Annotated[str, typer.Option("--format", metavar="table|json", help="How to print.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting; may be given several times."
    ),
]


def client_settings(db: str | None, schema: str | None = None, **flags: Any) -> Settings:
    """For commands that only talk to the database. Raises ConfigurationError when none is configured."""
    dev_file = Path.cwd() / DEV_FILE
    defaults = {"db": f"sqlite:///{dev_file}"} if dev_file.exists() else {}
    settings = load_settings(flags={"db": db, "schema": schema, **flags}, defaults=defaults)
    settings.require_db()
    configure_logs(format=settings.log_format, level="warning")
    return settings


def assigned(pairs: Sequence[str] | None) -> dict[str, str]:
    """``--set`` options as key → value. Raises ConfigurationError for one that is no KEY=VALUE."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"--set {pair!r}: write KEY=VALUE, as in park_after=1")
        found[key.strip().replace("-", "_").lower()] = value
    return found


def check_format(value: str) -> bool:
    """True for json, False for table. Raises BadParameter for anything else."""
    if value not in ("table", "json"):
        raise typer.BadParameter(f"{value!r}: allowed is table or json", param_hint="--format")
    return value == "json"
