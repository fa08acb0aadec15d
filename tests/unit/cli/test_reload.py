"""What counts as a change, and that one child has ended before the next one starts."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from perdure.runtime.cli.reload import stamps
from tests.harness.waiting import until_blocking

CHILD = """
    import os, signal, sys, time
    log = open("log", "a", buffering=1)
    log.write(f"start {os.getpid()}\\n")
    def stop(*_):
        log.write(f"stopping {os.getpid()}\\n")
        time.sleep(0.2)
        log.write(f"end {os.getpid()}\\n")
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
    while True:
        time.sleep(0.05)
"""
PARENT = """
    import sys
    from pathlib import Path
    from perdure.runtime.cli.reload import Reloader
    sys.exit(Reloader([sys.executable, "child.txt"], Path.cwd()).run())
"""


def test_sources_and_the_project_file_count_and_hidden_or_foreign_folders_do_not(tmp_path):
    for name in ("a.py", "deep/b.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in (
        "notes.txt",
        ".hidden/c.py",
        "__pycache__/d.py",
        "venv/lib/e.py",
        "node_modules/f.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    found = {str(path.relative_to(tmp_path)) for path in stamps(tmp_path)}
    assert found == {"a.py", "deep/b.py", "pyproject.toml"}


@pytest.mark.parametrize("change", ["edit", "add", "remove"])
def test_changes_are_seen(tmp_path, change):
    path = tmp_path / "a.py"
    path.write_text("x = 1\n")
    before = stamps(tmp_path)
    assert stamps(tmp_path) == before
    match change:
        case "edit":
            path.write_text("x = 22\n")
        case "add":
            (tmp_path / "b.py").touch()
        case "remove":
            path.unlink()
    assert stamps(tmp_path) != before


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "child.txt").write_text(textwrap.dedent(CHILD))
    (tmp_path / "app.py").write_text("x = 1\n")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=10)


def log_of(folder) -> list[str]:
    path = folder / "log"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_log(folder, expected: list[str]) -> None:
    until_blocking(lambda: log_of(folder) == expected, what=f"log {expected}", deadline=15)


def test_a_change_ends_the_child_before_the_next_one_starts(parent, tmp_path):
    wait_log(tmp_path, ["start"])
    (tmp_path / "app.py").write_text("x = 1_000\n")
    wait_log(tmp_path, ["start", "stopping", "end", "start"])
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=10)
    assert log_of(tmp_path)[-1] == "end"
    assert parent.returncode == 7
    assert f"changed: {tmp_path}/app.py" in said


def test_a_child_that_failed_is_started_again_at_the_next_change(parent, tmp_path):
    wait_log(tmp_path, ["start"])
    pid = int((tmp_path / "log").read_text().split()[1])
    os.kill(pid, signal.SIGKILL)
    assert parent.stderr is not None
    assert "ended with exit code -9; waiting for a change" in parent.stderr.readline()
    (tmp_path / "app.py").write_text("x = 1_000\n")
    wait_log(tmp_path, ["start", "start"])
    parent.terminate()
    wait_log(tmp_path, ["start", "start", "stopping", "end"])
