"""Arrays as PostgreSQL writes them, sent as one text each.

The driver looks at every element of an array, which takes longer than all the rest of it (0.6 µs, of a null as well).
Columns that may hold much text go as arrays all the same: there the text is not copied once more.
"""

from __future__ import annotations

from collections.abc import Sequence

EMPTY = "{}"


def numbers(values: Sequence[float | None], usual: object = None) -> str:
    """Numbers and nulls; empty if all are the usual one, which the statement fills in."""
    if values.count(usual) == len(values):
        return EMPTY
    if None not in values:  # nearly always
        return "{" + ",".join(map(repr, values)) + "}"
    return "{" + ",".join(["NULL" if value is None else repr(value) for value in values]) + "}"


def texts(values: Sequence[str | None], usual: object = None) -> str:
    """Short texts and nulls; the same."""
    if values.count(usual) == len(values):
        return EMPTY
    if None not in values:
        joined = '","'.join(values)  # type: ignore[arg-type]
        if "\\" not in joined and joined.count('"') == 2 * (
            len(values) - 1
        ):  # none needs an escape
            return '{"' + joined + '"}'
    return "{" + ",".join([_quoted(value) for value in values]) + "}"


def _quoted(value: str | None) -> str:
    if value is None:
        return "NULL"
    if '"' in value or "\\" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'
