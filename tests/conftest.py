"""Accounting for the whole suite: requirement marks, tiers and skips. Fixtures are in the harness.

Skips. A test may skip only for something this machine lacks, and says what. With ``CI`` set to
``true``, a skip whose reason names a database engine that the suite has to cover becomes a failure:
a green run must never mean that nobody looked. So does one for a program that is not installed, where
apt could have installed it (``.ci/setup`` does), and one for want of history in a clone. A test that
makes no sense on an engine, whatever the machine, begins its reason with ``not applicable:`` and stays
a skip.
"""

import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.requirements_report import RequirementError, load, unknown_ids

pytest_plugins = ("tests.harness.fixtures",)

REQUIRED_CAPABILITIES = re.compile(r"postgres|\bpg_ctl\b|\binitdb\b|sqlite", re.IGNORECASE)
INSTALLABLE = re.compile(r"\b(pgbouncer|faketime|libfaketime|ip|iptables)\b.* not installed")
HISTORY = re.compile(r"needs the repository's history")
NOT_APPLICABLE = "not applicable:"
TIERS = ("default", "slow")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse ``req`` marks that name no row of ``requirements.toml``."""
    try:
        rows = load()
    except RequirementError as error:
        raise pytest.UsageError(str(error)) from error
    wrong = [
        f"{item.nodeid}: req mark names {row_id!r}, which is no row of tests/requirements.toml"
        for item in items
        for mark in item.iter_markers("req")
        for row_id in unknown_ids(mark.args, rows)
    ]
    if wrong:
        raise pytest.UsageError("\n".join(wrong))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and not report.skipped:
        tier = "slow" if item.get_closest_marker("slow") else "default"
        report.user_properties.append(("tier", tier))
    return _fail_if_hiding(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _fail_if_hiding(report)


def _fail_if_hiding(report: Report) -> Report:
    """Turn the skip of what this machine has to have into a failure where ``CI=true``."""
    if os.environ.get("CI", "").lower() != "true":
        return report
    reason = _skip_reason(report)
    if not reason or reason.startswith(NOT_APPLICABLE):
        return report
    if REQUIRED_CAPABILITIES.search(reason):
        remedy = (
            "A required engine was not tested: skipped with {reason!r}.\n"
            "Make the engine available (make setup), or begin the reason with {na!r} if the test has no meaning there."
        )
    elif INSTALLABLE.search(reason) and os.geteuid() == 0 and shutil.which("apt-get"):
        remedy = (
            "Not tested: skipped with {reason!r}, and apt could have installed it (make setup)."
        )
    elif HISTORY.search(reason) and (Path(__file__).parents[1] / ".git").exists():
        remedy = (
            "Not tested: skipped with {reason!r}. Fetch the whole history (git fetch --unshallow)."
        )
    else:
        return report
    report.outcome = "failed"
    report.longrepr = remedy.format(reason=reason, na=NOT_APPLICABLE)
    return report


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """The reason of a real skip, without pytest's prefix; None for anything else, xfail too."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tiers ran, so that a quick run is not taken for the whole suite."""
    ran = dict.fromkeys(TIERS, 0)
    for reports in terminalreporter.stats.values():
        for report in reports:
            tier = dict(getattr(report, "user_properties", ())).get("tier")
            if tier in ran:
                ran[tier] += 1
    left_out = len(terminalreporter.stats.get("deselected", []))
    terminalreporter.write_line(
        f"tiers run: default {ran['default']}, slow {ran['slow']}; left out by selection: {left_out}"
    )
