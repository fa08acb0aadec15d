"""The suite's own accounting: marks that name nothing, and skips that hide an engine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import requirements_report

TESTS = Path(__file__).parents[1]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A checkout of nothing but this suite's configuration and harness, for tests of its own."""
    shutil.copytree(TESTS / "harness", tmp_path / "tests" / "harness")
    for name in ("conftest.py", "requirements_report.py", "requirements.toml", "__init__.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    return tmp_path


def run(suite: Path, text: str, *, ci: bool = False) -> subprocess.CompletedProcess[str]:
    (suite / "tests" / "test_probe.py").write_text("import pytest\n" + text, encoding="utf-8")
    environment = {**os.environ, "CI": "true" if ci else ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_unknown_row_fails_the_collection(suite):
    result = run(suite, '@pytest.mark.req("CL4", "CL99")\ndef test_x(): pass\n')
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_x: req mark names 'CL99'" in result.stderr


def test_a_mark_without_a_row_fails_the_collection(suite):
    result = run(suite, "@pytest.mark.req\ndef test_x(): pass\n")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no id at all" in result.stderr


HIDING = """
def test_in_the_call(): pytest.skip("PostgreSQL binaries not found")

@pytest.mark.skipif(True, reason="no SQLite here")
def test_by_mark(): pass

@pytest.fixture
def server(): pytest.skip("initdb is missing")

def test_in_a_fixture(server): pass

def test_nothing_hidden(): pass
"""


def test_hiding_a_required_engine_is_a_failure_in_ci(suite):
    result = run(suite, HIDING, ci=True)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 2 errors" in result.stdout
    assert result.stdout.count("A required engine was not tested") >= 3


def test_hiding_a_whole_module_is_a_failure_in_ci(suite):
    result = run(suite, 'pytest.skip("PostgreSQL is absent", allow_module_level=True)', ci=True)
    assert result.returncode == pytest.ExitCode.INTERRUPTED
    assert "A required engine was not tested" in result.stdout


def test_elsewhere_it_is_a_skip(suite):
    result = run(suite, HIDING)
    assert result.returncode == pytest.ExitCode.OK
    assert "1 passed, 3 skipped" in result.stdout


RARE = """
def test_a_program(): pytest.skip("pgbouncer is not installed")

def test_a_library(): pytest.skip("libfaketime is not installed")

def test_networks(): pytest.skip("for network namespaces ip and iptables not installed")
"""


@pytest.mark.parametrize("apt", [True, False])
def test_what_apt_could_have_installed_is_a_failure_in_ci(suite, monkeypatch, apt):
    """For root only, who the tests may or may not be."""
    programs = suite / "programs"
    programs.mkdir()
    if apt:
        (programs / "apt-get").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs))
    result = run(suite, RARE, ci=True)
    if apt and os.geteuid() == 0:
        assert result.returncode == pytest.ExitCode.TESTS_FAILED
        assert "3 failed" in result.stdout
        assert result.stdout.count("apt could have installed it") >= 3
    else:
        assert "3 skipped" in result.stdout


def test_a_clone_without_history_is_a_failure_in_ci_and_a_folder_without_git_is_not(suite):
    text = 'def test_x(): pytest.skip("commit 1 is not in this clone: it needs the repository\'s history")'
    assert "1 skipped" in run(suite, text, ci=True).stdout
    (suite / ".git").mkdir()
    result = run(suite, text, ci=True)
    assert "1 failed" in result.stdout
    assert "git fetch --unshallow" in result.stdout


HARMLESS = """
def test_missing_python(): pytest.skip("Python 3.12 not present")

def test_no_meaning(): pytest.skip("not applicable: SQLite has no channels")

@pytest.mark.xfail(reason="PostgreSQL says otherwise")
def test_expected(): assert False

@pytest.mark.slow
def test_second_tier(): pass
"""


def test_other_skips_stay_skips_in_ci(suite):
    result = run(suite, HARMLESS, ci=True)
    assert result.returncode == pytest.ExitCode.OK
    assert "2 skipped, 1 deselected, 1 xfailed" in result.stdout
    assert "left out by selection: 1" in result.stdout


def test_the_report_lists_released_rows_without_a_test():
    rows = requirements_report.load()
    named: dict[str, list[requirements_report.Mark]] = {
        row_id: [] for row_id in rows if row_id != "CL4"
    }
    lines, missing = requirements_report.report(rows, named)
    assert missing == 1
    assert lines[1].startswith("CL4 ")


def test_marks_are_found_wherever_they_stand(tmp_path):
    (tmp_path / "test_a.py").write_text(
        'import pytest\npytestmark = pytest.mark.req("WF1")\n'
        '@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.req("ST1", "ST2"))])\n'
        "def test_x(a): pass\n",
        encoding="utf-8",
    )
    found = {mark.id: mark.line for mark in requirements_report.marks(tmp_path)}
    assert found == {"WF1": 2, "ST1": 3, "ST2": 3}


def test_ids_that_cannot_be_read_statically_are_refused(tmp_path):
    (tmp_path / "test_a.py").write_text("pytest.mark.req(*IDS)\n", encoding="utf-8")
    with pytest.raises(requirements_report.RequirementError, match="plain strings"):
        list(requirements_report.marks(tmp_path))
