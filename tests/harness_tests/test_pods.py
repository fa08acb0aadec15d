"""Pods are real processes: they are waited for by condition, and none outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pods import ROOT, Pod, PodEndedError, Pods
from tests.harness.sidelog import SideLog, check_executions
from tests.harness.waiting import DeadlineExceededError, until

COMMAND = [sys.executable, "-m", "tests.harness_tests.small_pod"]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    env = {"PERDURE_LEASE": "2"}
    with Pods("app:app", "sqlite:///x", tmp_path, env=env, command=COMMAND) as started:
        yield started
    assert not any(pod.alive for pod in started.all)


def state(pod: Pod) -> str:
    return Path(f"/proc/{pod.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_pod_is_ready_when_its_port_says_so(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_SLOTS", "1")  # of the one who runs the tests, not of the pods
    pod = await pods.ready(env={"PERDURE_GRACE": "3"})
    told = await pod.status()
    assert told["name"] == pod.name == "pod-1"
    assert told["env"] == {
        "PERDURE_LEASE": "2",
        "PERDURE_GRACE": "3",
        "PERDURE_RUNNER_PORT": str(pod.port),
    }
    assert "asked: GET /readyz" in pod.log
    other = await pods.ready("second")
    assert other.port != pod.port
    pod.terminate()
    assert await pod.wait_end() == 0
    assert (await pod.http("/readyz")) is None
    assert pod.faults == []


async def test_log_lines_are_awaited_in_order(pods: Pods) -> None:
    pod = await pods.ready()
    assert (await pod.wait_log(r"asked: GET (\S+)", anew=True)).group(1) == "/readyz"
    assert (await pod.wait_log(r"asked: GET (\S+)", anew=True)).group(1) == "/readyz"
    await pod.http("/other")
    assert (await pod.wait_log(r"asked: GET (\S+)", anew=True)).group(1) == "/other"
    with pytest.raises(DeadlineExceededError, match="log of pod pod-1"):
        await pod.wait_log("never said", deadline=0.1)


async def test_a_pod_that_ends_while_awaited_shows_its_log(pods: Pods) -> None:
    pod = pods.start()
    pod.kill()
    with pytest.raises(PodEndedError, match="ended with -9"):
        await pod.wait_log("listening")
    broken = Pods("a:b", "u", pods.all[0].log_path.parent, command=[*COMMAND, "--broken"])
    with broken, pytest.raises(PodEndedError, match="cannot start: broken as asked for"):
        await broken.ready("broken")


async def test_freeze_and_thaw_stop_and_resume_the_process(pods: Pods) -> None:
    pod = await pods.ready()
    pod.freeze()
    await until(lambda: state(pod) == "T", what="the stop")
    assert await pod.http("/status", timeout=0.2) is None
    fault = pod.thaw()
    assert await pod.wait_http("/status")
    assert pods.faults == [fault]
    assert fault.until is not None
    assert 0.2 <= fault.until - fault.at < 10
    pod.freeze()  # and a frozen pod can still be ended


async def test_kill_is_the_fault_that_explains_an_execution(tmp_path: Path) -> None:
    side_log = SideLog(tmp_path / "side.log")
    with Pods("a:b", "u", tmp_path, command=COMMAND, side_log=side_log.path) as pods:
        first = pods.start()
        await first.wait_log("in the second step")
        first.kill()
        (tmp_path / "side.log.go").touch()
        await pods.ready()
    executions = side_log.executions()
    second = [execution for execution in executions if execution.key == "/second#0"]
    assert [execution.how for execution in second] == ["", "returned"]
    assert [execution.runner for execution in second] == ["pod-1", "pod-2"]
    journal = {("run-1", "/first#0"): 2, ("run-1", "/second#0"): 1}
    assert check_executions(executions, journal, pods.faults) == []
    assert len(check_executions(executions, journal, [])) == 1


OWNER = """
import pathlib, sys
from tests.harness.pods import Pods
pods = Pods("a:b", "u", pathlib.Path(sys.argv[1]), command=sys.argv[2:])
print(pods.start().pid, flush=True)
raise RuntimeError("the tests broke")
"""


def test_pods_end_with_their_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), *COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), signal.SIGCONT)
