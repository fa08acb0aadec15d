"""The parent of several pods, without the pods."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure.runtime.cli import processes
from perdure.runtime.cli.processes import Processes
from perdure.runtime.cli.stop_signals import CUT_SHORT
from perdure.runtime.settings import Settings
from perdure.storage.clock import SystemClock

DESCRIPTORS = Path("/proc/self/fd")


@pytest.mark.req("CL1")
def test_a_child_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No memory or process is left for a moment: the other children go on, and so does the parent."""
    monkeypatch.setattr(processes, "FIRST_PAUSE", 0.01)
    refusals, started = 3, list[int]()
    popen = subprocess.Popen

    def scarce(command: Any, **options: Any) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        child = popen(["sleep", "60"], **options)
        started.append(child.pid)
        if len(started) == 2:
            threading.Timer(0.4, os.kill, (os.getpid(), 15)).start()
        return child

    monkeypatch.setattr(subprocess, "Popen", scarce)
    before = len(list(DESCRIPTORS.iterdir()))
    parent = Processes(
        ["unused"], Settings(db="postgresql://h/d", processes=2, runner_port=0), SystemClock()
    )
    assert parent.run() == 0  # of `sleep`, which SIGTERM kills as it does a pod that has not begun
    assert len(started) == 2
    assert len(list(DESCRIPTORS.iterdir())) <= before


@pytest.mark.req("CL5")
def test_a_child_that_is_killed_while_it_stops_was_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    popen, started = subprocess.Popen, list[int]()

    def deaf(command: Any, **options: Any) -> Any:
        child = popen(["sh", "-c", "trap '' TERM; echo; exec sleep 60"], stdout=-1, **options)
        assert child.stdout is not None
        child.stdout.readline()
        started.append(child.pid)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            for pid in started:
                threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        return child

    monkeypatch.setattr(subprocess, "Popen", deaf)
    parent = Processes(
        ["unused"], Settings(db="postgresql://h/d", processes=2, runner_port=0), SystemClock()
    )
    assert parent.run() == CUT_SHORT
