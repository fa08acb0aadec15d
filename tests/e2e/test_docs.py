"""The README and the pages of `docs/` do what they say: every example in them is executed."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
EXECUTED_PAGES = (
    README,
    DOCS / "workflows.md",
    DOCS / "operations.md",
    DOCS / "observability.md",
)
SETTINGS_HEAD = "| key | default | allowed | meaning |"
MIB, KIB = 1024 * 1024, 1024
LEVELS = ("debug", "info", "warning", "error", "exception")

slow_machine = pytest.mark.timeout(300)
"""A page starts a dozen processes: the usual limit is for an idle machine."""


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Runners in the tests' process log nothing of what the examples provoke."""
    kept = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=kept)
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def pages(
    quiet: None,
    postgres: PrivatePostgres,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Future[Page]]]:
    """The pages that are asked for, all under way, since a page mostly waits for processes to start."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    named = {f"test_{path.stem.lower()}": path for path in EXECUTED_PAGES}
    wanted = {name: path for name, path in named.items() if name in asked}
    made = {
        name: page_of(
            path, tmp_path_factory.mktemp(path.stem), postgres.url(postgres.create_database())
        )
        for name, path in wanted.items()
    }
    with ThreadPoolExecutor(len(made)) as threads:
        yield {name: threads.submit(executed, page) for name, page in made.items()}
    for page in made.values():
        postgres.drop_database(page.database.rpartition("/")[2])
    for role in ("perdure_pods", "perdure_owner"):  # the server's, not the database's
        postgres.run_sql(f"drop role if exists {role}")


def page_of(path: Path, folder: Path, database: str) -> Page:
    """Its URLs mean this database, and its ports are free ones."""
    address = database.rpartition("@")[2]
    port = str(free_port())
    (folder / "examples").symlink_to(ROOT / "examples")
    return Page(
        path,
        folder,
        deeds=all_deeds(),
        replaced={
            "user@host/name": f"postgres@{address}",
            "@host/name": f"@{address}",
            "127.0.0.1:34000": f"127.0.0.1:{port}",
        },
        env={"PERDURE_RUNNER_PORT": port, "ORDERS_SIDE_LOG": str(folder / "side.log")},
        database=database,
    )


def executed(page: Page) -> Page:
    asyncio.run(page.execute())
    return page


@slow_machine
@pytest.mark.req("OP4")
def test_readme(pages: Mapping[str, Future[Page]]) -> None:
    page = pages["test_readme"].result()
    assert page.executed == number_of_examples(page.path)


@slow_machine
@pytest.mark.req("WF1", "WF2", "WF8", "WF12", "ST7", "ST13", "SL2", "SL5")
def test_workflows(pages: Mapping[str, Future[Page]]) -> None:
    page = pages["test_workflows"].result()
    assert page.executed == number_of_examples(page.path)


@slow_machine
@pytest.mark.req("OP3", "CL8", "CL12", "DB1")
def test_operations(pages: Mapping[str, Future[Page]]) -> None:
    page = pages["test_operations"].result()
    assert page.executed == number_of_examples(page.path)


@slow_machine
@pytest.mark.req("DB7", "CL8", "WF15")
def test_observability(pages: Mapping[str, Future[Page]]) -> None:
    page = pages["test_observability"].result()
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


def test_log_events_have_one_form_and_are_all_listed() -> None:
    said = {
        event
        for floor in ("cron", "cdc", "runtime", "sharding", "storage")
        for event in events_of(ROOT / floor)
    }
    assert len(said) > 40
    assert [
        event for event in said if not re.fullmatch(r"[a-z]+(\.[a-z]+(-[a-z]+)*)+", event)
    ] == []
    listed = re.findall(r"`([a-z.-]+)`", table_of("observability.md", "| event | level |"))
    assert sorted(listed) == sorted(said)
    watched = re.findall(r"`([a-z.-]+)`", table_of("operations.md", "| event | meaning |"))
    assert len(watched) > 5
    assert set(watched) <= said


def table_of(page: str, head: str) -> str:
    """The first cells of a table's rows."""
    rows = (DOCS / page).read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    return "\n".join(row.split("|")[1] for row in rows)


def events_of(folder: Path) -> Iterator[str]:
    """The names given to `log.info` and its kin. A body's own loop writes sentences, for whoever wrote the body."""
    for path in folder.rglob("*.py"):
        if path.parent.name == "body":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            ):
                continue
            logger = node.func.value
            if node.func.attr in LEVELS and isinstance(logger, ast.Name) and logger.id == "log":
                name = node.args[0]
                for each in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
                    assert isinstance(each, ast.Constant), f"{path}:{node.lineno}"
                    yield str(each.value)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_with_examples_is_executed(path: Path) -> None:
    examples = [item for item in items(path) if item.kind in EXECUTED]
    assert path in EXECUTED_PAGES or not examples
