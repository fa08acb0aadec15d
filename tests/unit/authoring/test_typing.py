"""What people write is typed through, as mypy sees it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SAMPLE = Path(__file__).with_name("typed_sample.py")


def mypy(path: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        str(path),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    return run.stdout + run.stderr


@pytest.mark.req("WF1")
def test_results_and_arguments_of_steps_are_typed():
    assert "Success" in mypy(SAMPLE)


@pytest.mark.req("WF1")
def test_wrong_arguments_are_errors(tmp_path):
    """Guards the sample itself: without its ignores, exactly the ignored lines are errors."""
    lines = SAMPLE.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# type: ignore" in line}
    bare = tmp_path / "sample_without_ignores.py"
    bare.write_text("\n".join(line.split("  # type: ignore")[0] for line in lines) + "\n")
    found = {int(n) for n in re.findall(r"sample_without_ignores\.py:(\d+): error", mypy(bare))}
    assert found == wrong
    assert len(wrong) >= 6
