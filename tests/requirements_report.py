"""Which requirement rows a test names: reads ``requirements.toml`` and the ``req`` marks.

Marks are read from the syntax tree of ``tests/**/*.py``, so a report needs neither an import nor a
database. ``python tests/requirements_report.py`` prints the released rows that no test names and the
number of planned rows; ``--check`` turns a missing row into exit code 1. A mark that names no row,
or an unknown one, is exit code 2 either way.
"""

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PLANNED = "planned"


class RequirementError(Exception):
    """The file of rows or a mark is wrong; the message names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row: its id (``"CL4"``), the release it holds from or ``"planned"``, and its one line."""

    id: str
    since: str
    text: str

    @property
    def released(self) -> bool:
        return self.since != PLANNED


@dataclass(frozen=True, slots=True)
class Mark:
    """One id named by a ``req`` mark, with the place of the mark."""

    id: str
    path: Path
    line: int


def load(path: Path = TESTS / "requirements.toml") -> dict[str, Requirement]:
    """All rows by id, in file order. Raises ``RequirementError`` for a malformed row."""
    rows: dict[str, Requirement] = {}
    for letters, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for row_id, row in table.items():
            if not (row_id.startswith(letters) and row_id.removeprefix(letters).isdigit()):
                raise RequirementError(
                    f"{path.name}: row {row_id!r} under [{letters}] must be {letters}<number>"
                )
            if set(row) != {"since", "text"} or not row["since"] or not row["text"].strip():
                raise RequirementError(
                    f"{path.name}: row {row_id} needs exactly `since` and `text`"
                )
            rows[row_id] = Requirement(id=row_id, since=row["since"], text=row["text"])
    return rows


def unknown_ids(ids: tuple[object, ...], rows: dict[str, Requirement]) -> list[object]:
    """The ids of one mark that are not rows; a mark without any id is wrong as a whole."""
    if not ids:
        return ["(no id at all)"]
    return [row_id for row_id in ids if row_id not in rows]


def marks(root: Path = TESTS) -> Iterator[Mark]:
    """Every id in a ``…mark.req("ID", …)`` call of the Python files under ``root``."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            if isinstance(node, ast.Call) and _is_req(node.func):
                yield from _ids(node, path)


def _is_req(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "req"
        and (
            (isinstance(function.value, ast.Attribute) and function.value.attr == "mark")
            or (isinstance(function.value, ast.Name) and function.value.id == "mark")
        )
    )


def _ids(call: ast.Call, path: Path) -> Iterator[Mark]:
    if not call.args:
        raise RequirementError(f"{path}:{call.lineno}: a req mark names at least one row")
    for argument in call.args:
        if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
            raise RequirementError(
                f"{path}:{call.lineno}: write the ids of a req mark as plain strings, so that they "
                "can be read without importing the test"
            )
        yield Mark(id=argument.value, path=path, line=call.lineno)


def report(rows: dict[str, Requirement], named: dict[str, list[Mark]]) -> tuple[list[str], int]:
    """The lines to print and how many released rows no test names."""
    released = [row for row in rows.values() if row.released]
    missing = [row for row in released if row.id not in named]
    ahead = [row.id for row in rows.values() if not row.released and row.id in named]
    lines = [f"{row.id:5} since {row.since}  {row.text}" for row in missing]
    if missing:
        lines.insert(0, "Released rows that no test names:")
    lines.append(
        f"{len(released) - len(missing)} of {len(released)} released rows are named by a test."
    )
    lines.append(f"{len(rows) - len(released)} rows are planned.")
    if ahead:
        lines.append("Planned rows that a test names already: " + " ".join(ahead))
    return lines, len(missing)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Requirement rows and the tests that name them.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a released row has no test")
    options = parser.parse_args(arguments)
    try:
        rows = load()
        named: dict[str, list[Mark]] = defaultdict(list)
        for mark in marks():
            if mark.id not in rows:
                raise RequirementError(f"{mark.path}:{mark.line}: no requirement row {mark.id!r}")
            named[mark.id].append(mark)
    except RequirementError as error:
        print(error, file=sys.stderr)
        return 2
    lines, missing = report(rows, named)
    print("\n".join(lines))
    return 1 if missing and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
