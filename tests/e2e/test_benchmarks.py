"""The benchmark and the soak, in small: they run to their end and say what they found."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from benchmarks.rounds import empty_table
from tests.e2e.commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def run_module(*words: str) -> tuple[int, list[str]]:
    """Exit code and lines of standard output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *words),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode().splitlines()


async def test_the_benchmark_has_a_line_for_each_figure_and_fails_only_when_asked_to() -> None:
    small = ("--rounds", "1", "--runs", "200", "--seconds", "1")
    code, said = await run_module("benchmarks", *small, "--strict")
    *figures, machine, goals = map(json.loads, said)
    found = {(line["bench"], line["metric"]): line for line in figures}
    assert found.keys() == empty_table().keys()
    assert machine["bench"] == "machine"
    missed = {f"{line['bench']}: {line['metric']}" for line in figures if line.get("met") is False}
    assert set(goals["missed"]) == missed
    assert code == (1 if missed else 0)


async def test_a_short_soak_ends_well() -> None:
    code, said = await run_module("benchmarks.soak", "--minutes", "0.5")
    assert said[-1].startswith("verdict: all well; "), "\n".join(said)
    assert code == 0
