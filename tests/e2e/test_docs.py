"""The README and the pages of `docs/` do what they say: every example in them is executed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import structlog

from perdure.runtime.settings import Settings
from perdure.runtime.settings_rules import RULES, Number
from tests.e2e.commands import ROOT
from tests.e2e.deeds import all_deeds
from tests.e2e.pages import EXECUTED, Page, items
from tests.harness.postgres import PrivatePostgres, free_port
from tests.requirements_report import load, unknown_ids

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
EXECUTED_PAGES = ("README.md", "workflows.md", "operations.md")
SETTINGS_HEAD = "| key | default | allowed | meaning |"
MIB, KIB = 1024 * 1024, 1024

slow_machine = pytest.mark.timeout(300)
"""A page starts a dozen processes: the usual limit is for an idle machine."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runners in the test's process log nothing of what the examples provoke."""
    kept = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=kept)
    yield
    structlog.reset_defaults()


@pytest.fixture
def roles(postgres: PrivatePostgres) -> Iterator[None]:
    """Roles are the server's, not a database's: those that a page makes are dropped."""
    yield
    for role in ("perdure_pods", "perdure_owner"):
        postgres.run_sql(f"drop role if exists {role}")


@pytest.fixture
def page_of(roles: None, tmp_path: Path, postgres_url: str):
    """Makes a page whose URLs mean a database of its own, and whose ports are free."""

    def make(path: Path) -> Page:
        address = postgres_url.rpartition("@")[2]
        port = str(free_port())
        (tmp_path / "examples").symlink_to(ROOT / "examples")
        return Page(
            path,
            tmp_path,
            deeds=all_deeds(),
            replaced={
                "user@host/name": f"postgres@{address}",
                "@host/name": f"@{address}",
                "127.0.0.1:34000": f"127.0.0.1:{port}",
            },
            env={"PERDURE_RUNNER_PORT": port, "ORDERS_SIDE_LOG": str(tmp_path / "side.log")},
            database=postgres_url,
        )

    return make


@slow_machine
@pytest.mark.req("OP4")
async def test_readme(page_of) -> None:
    page = page_of(ROOT / "README.md")
    await page.execute()
    assert page.executed == number_of_examples(page.path)


@slow_machine
@pytest.mark.req("WF1", "WF2", "WF8", "WF12", "ST7", "ST13", "SL2", "SL5")
async def test_workflows(page_of) -> None:
    page = page_of(DOCS / "workflows.md")
    await page.execute()
    assert page.executed == number_of_examples(page.path)


@slow_machine
@pytest.mark.req("OP3", "CL8", "CL12", "DB1")
async def test_operations(page_of) -> None:
    page = page_of(DOCS / "operations.md")
    await page.execute()
    assert page.executed == number_of_examples(page.path)


def number_of_examples(path: Path) -> int:
    found = sum(item.kind in EXECUTED for item in items(path))
    assert found > 5
    return found


# ---- what is not executed ---------------------------------------------------------------------


def test_the_settings_are_listed_with_their_defaults_and_what_is_allowed() -> None:
    listed = []
    lines = (DOCS / "operations.md").read_text().split("\n")
    for line in lines[lines.index(SETTINGS_HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        *facts, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
        assert meaning
        listed.append(tuple(facts))
    assert listed == [
        (f"`{each.name}`", shown_default(each.name, each.default), RULES[each.name].allowed)
        for each in fields(Settings)
        if each.name != "origins"
    ]


def shown_default(key: str, value: object) -> str:
    if value in (None, ""):
        return ""
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    rule = RULES[key]
    if isinstance(value, int) and isinstance(rule, Number) and rule.sizes:
        return f"`{value // MIB} MiB`" if value >= MIB else f"`{value // KIB} KiB`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


ORIGIN = re.compile(r"^\*((?:[A-Z]{2}\d+|R\d+|`tests/|[,·\s])[^*]+)\*$", re.MULTILINE)
"""The line of a guarantee that names requirements, rules and tests."""


def test_each_guarantee_names_requirements_rules_and_the_tests_that_prove_it() -> None:
    rows = load()
    rules = set(re.findall(r"\*\*(R\d+)", (ROOT / "ARCHITECTURE.md").read_text()))
    named = ORIGIN.findall((DOCS / "guarantees.md").read_text())
    assert len(named) >= 15
    for text in named:
        ids = set(re.findall(r"\b[A-Z]{2}\d+\b", text))
        assert ids, text
        assert unknown_ids(tuple(sorted(ids)), rows) == []
        assert set(re.findall(r"\bR\d+\b", text)) <= rules
        files = re.findall(r"`(tests/[^`]+)`", text)
        assert files, text
        proven: set[str] = set()
        for file in files:
            marks = " ".join(re.findall(r"\.req\(([^)]*)\)", (ROOT / file).read_text()))
            marked = ids & set(re.findall(r"[A-Z]{2}\d+", marks))
            assert marked, f"{file} proves none of {sorted(ids)}"
            proven |= marked
        assert proven == ids, f"no test of {files} carries {sorted(ids - proven)}"


def test_links_lead_somewhere() -> None:
    links = [(path, link) for path in PAGES for link in links_of(path)]
    assert len(links) > 40
    for path, link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_file(), (path.name, link)
        assert not anchor or anchor in anchors(target), (path.name, link)


def links_of(path: Path) -> list[str]:
    """Links of a page to other pages and places of this checkout."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not link.startswith("https://")]


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as they are made where the project is shown."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_named_log_events_exist() -> None:
    sources = "".join(
        path.read_text()
        for floor in ("runtime", "sharding")
        for path in (ROOT / floor).rglob("*.py")
    )
    section = (DOCS / "operations.md").read_text().split("What to watch for:")[1].split("\n\n")[1]
    events = re.findall(r"`([^`]+)`", section)
    assert len(events) == 8
    assert [event for event in events if f'"{event}' not in sources] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_with_examples_is_executed(path: Path) -> None:
    examples = [item for item in items(path) if item.kind in EXECUTED]
    assert path.name in EXECUTED_PAGES or not examples
