"""What the commands write: results to standard output, everything else to standard error."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perdure.runtime.settings_rules import hide_credentials

LAST_COLUMN = 24
"""Columns of the screen that the last column of a table gets in any case, if it needs them."""

PADDING = re.compile(r" +((?:\x1b\[0m)?)$", re.MULTILINE)
"""Blanks at the end of a line, also of one that is bold."""


class CommandFailed(Exception):
    """A command could not do what it was asked; the message is shown as it is, exit code 1."""


def console() -> Console:
    """For results. Wide enough for whole ids when the output is no terminal."""
    plain = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    return plain if plain.is_terminal else Console(file=sys.stdout, highlight=False, width=240)


def messages() -> Console:
    """For progress and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def say_error(message: str) -> None:
    """One line on standard error, without a password."""
    line = " ".join(hide_credentials(message).split())
    messages().print(f"[bold red]error:[/] {escape(line)}")


def say(message: str) -> None:
    """One line about progress."""
    messages().print(escape(hide_credentials(message)))


def print_json(value: object) -> None:
    """The value as one JSON document; dataclasses become objects, instants stay Unix seconds."""
    sys.stdout.write(json.dumps(plain(value), indent=2, ensure_ascii=False, default=str) + "\n")


def plain(value: object) -> Any:
    """Dataclasses and containers as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return value


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    fold: bool = True,
) -> Table:
    """A table of plain text; None is an empty cell. fold: the last column may take several lines."""
    made = Table(
        title=escape(title) if title else None,
        title_justify="left",
        header_style="bold",
        show_header=any(headings),
        box=None,
        pad_edge=False,
    )
    for heading in headings[:-1]:
        made.add_column(heading, no_wrap=True)
    made.add_column(headings[-1], overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    for row in rows:
        made.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    return made


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Print a table whose cells are plain text; None is an empty cell.

    Only the last column is folded to fit: half an id or half an instant helps nobody. A terminal too narrow
    for the others gets longer lines. No line ends with blanks."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    made = table(headings, cells, title=title)
    widths = [max(map(cell_len, column)) for column in zip(headings, *cells, strict=True)]
    needed = sum(width + 2 for width in widths[:-1]) + min(widths[-1], LAST_COLUMN)
    out = console()
    out = Console(file=sys.stdout, highlight=False, width=max(out.width, needed))
    with out.capture() as printed:
        out.print(made)
    sys.stdout.write(PADDING.sub(r"\1", printed.get()))


def instant(at: float | None) -> str:
    """An instant as ISO 8601 in UTC, to the millisecond; "" for None."""
    if at is None:
        return ""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def span(seconds: float | None) -> str:
    """A length of time as people say it: 12.3 s, 4 min 5 s, 2 h 3 min, 5 d 1 h; "" for None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def short(text: str | None, limit: int = 60) -> str:
    """The first characters of a text, on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
