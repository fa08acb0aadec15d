"""Rules of the house that no linter knows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("cdc", "cron", "runtime", "sharding", "storage")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
TEXTS = [*SOURCES, *sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.sql"))]

# Time and randomness are injected; this file is where they come from. Keys (`secrets`) are another matter.
# A migration is carried out once, by hand or at boot, outside anything that is simulated.
CLOCK = ROOT / "storage" / "clock.py"
MIGRATIONS = ROOT / "storage" / "migrations"
AMBIENT = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "clock_gettime"},
    "datetime": {"now", "utcnow", "today"},
    "random": {"random", "randrange", "randint", "uniform", "choice", "getrandbits"},
    "uuid": {"uuid1", "uuid4"},
    "os": {"urandom"},
}
LONGEST_FILE = 700
REASON = "One file because"  # a longer file gives its reason in its docstring, in a sentence that begins so
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FLOORS)


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_source_file(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    assert docstring or not text.strip(), "says at its top what it owns"
    assert path.stem not in EMPTY_NAMES, "is named for what it holds"
    short = text.count("\n") <= LONGEST_FILE
    assert short or REASON in docstring, f"has at most {LONGEST_FILE} lines, or says why not"
    if path != CLOCK and not path.is_relative_to(MIGRATIONS):
        assert not list(ambient_calls(tree)), "takes clock and randomness as arguments"


def ambient_calls(tree: ast.Module):
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.attr in AMBIENT.get(node.value.id, ()):
            yield f"line {node.lineno}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", TEXTS, ids=label)
def test_no_verdict_the_database_may_fake(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"insert\s+(or\s+)?ignore", text, re.IGNORECASE), "R9"
    assert not re.search(r"\.rowcount\b", text), "R9: affected-row counts decide nothing"


def test_only_storage_holds_statements():
    statement = re.compile(
        r"""["']\s*(select\s.+\sfrom|insert\s+into|update\s+\w+\s+set|delete\s+from|with\s+\w+\s+as)\s""",
        re.IGNORECASE,
    )
    outside = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "storage"]
    found = [label(path) for path in outside if statement.search(path.read_text(encoding="utf-8"))]
    assert not found
