"""The statements of this engine: complete SQL texts in ``sql/*.sql``, found by name.

A statement begins with the line ``-- name: <name>`` and ends before the next such line. The name is what the
method of the seam is called, and after a dot which part of it: one statement of an engine with writable CTEs
is several here, inside one ``begin immediate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

MARK = "-- name: "


@cache
def statements() -> Mapping[str, str]:
    """Every statement by its name; the text keeps its name line, so that it can be seen in a trace."""
    found: dict[str, str] = {}
    folder = resources.files(__package__) / "sql"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".sql"):
            continue
        for part in ("\n" + file.read_text(encoding="utf-8")).split("\n" + MARK)[1:]:
            name = part.partition("\n")[0].strip()
            if name in found:
                raise ValueError(
                    f"two statements are called {name!r}: rename the one in {file.name}"
                )
            found[name] = (MARK + part).strip()
    return found
