"""Real pods: child processes that run an application, and can be killed, frozen and stopped."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .networks import Host
from .postgres import free_port
from .sidelog import ENVIRONMENT as SIDE_LOG
from .sidelog import Fault
from .waiting import until

ROOT = Path(__file__).resolve().parents[2]


class PodEndedError(AssertionError):
    """A pod ended while something of it was awaited; the message ends with its log."""


class Pod:
    """One child process. ``faults`` collects what was done to it, for the side log's checker.

    name: of the pod, also its log file. port: of its runner port, at ``host``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        port: int,
        host: str = "127.0.0.1",
        cwd: Path = ROOT,
    ) -> None:
        self.name, self.command, self.port, self.log_path = name, list(command), port, log_path
        self.host = host
        self.faults: list[Fault] = []
        self._read_to = 0
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal is for the tests alone
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """All it has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # ---- waiting ------------------------------------------------------------------------------

    async def wait_log(
        self, pattern: str, *, deadline: float = 20.0, anew: bool = False
    ) -> re.Match[str]:
        """Wait for a line that matches the regular expression.

        ``anew``: look only at what comes after the end of the last match found this way.
        """
        compiled = re.compile(pattern, re.MULTILINE)

        def look() -> re.Match[str] | None:
            found = compiled.search(self.log, self._read_to if anew else 0)
            if found is None:
                self._must_live(f"waiting for {pattern!r} in its log")
            return found

        match = await until(
            look, what=f"{pattern!r} in the log of pod {self.name}", deadline=deadline
        )
        assert match is not None
        self._read_to = match.end()
        return match

    async def wait_http(
        self, path: str = "/readyz", *, status: int = 200, deadline: float = 20.0
    ) -> str:
        """Wait until a request to the runner port is answered with this status; its text."""

        async def look() -> tuple[str] | None:
            answer = await self.http(path)
            if answer is None:
                self._must_live(f"waiting for {path}")
            return (answer[1],) if answer is not None and answer[0] == status else None

        what = f"{path} of pod {self.name} answering {status}"
        found = await until(look, what=what, deadline=deadline, interval=0.03)
        assert found is not None
        return found[0]

    async def http(self, path: str, *, timeout: float = 2.0) -> tuple[int, str] | None:
        """One request to the runner port: status and text; None when nobody answers in time."""

        def get() -> tuple[int, str] | None:
            url = f"http://{self.host}:{self.port}{path}"
            try:
                with urllib.request.urlopen(url, timeout=timeout) as response:
                    return int(response.status), response.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return None

        return await asyncio.to_thread(get)

    async def status(self) -> Any:
        """The decoded JSON of ``/status``."""
        return json.loads(await self.wait_http("/status", deadline=5.0))

    async def wait_end(self, *, deadline: float = 40.0) -> int:
        """Wait for the end of the process; its exit code, negative for a signal."""
        what = f"end of pod {self.name}"
        await until(lambda: not self.alive, what=what, deadline=deadline)
        return int(self.process.returncode)

    def _must_live(self, doing: str) -> None:
        if not self.alive:
            code = self.process.returncode
            raise PodEndedError(
                f"pod {self.name} ended with {code} while {doing}:\n{self.log[-4000:]}"
            )

    # ---- what can be done to it ---------------------------------------------------------------

    def kill(self) -> Fault:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.wait(timeout=20)
        return self._note(Fault("kill", at=time.monotonic(), pid=self.pid))

    def freeze(self) -> Fault:
        """SIGSTOP: the process stays, and does nothing until :meth:`thaw`."""
        fault = Fault("freeze", at=time.monotonic(), pid=self.pid, until=float("inf"))
        self.process.send_signal(signal.SIGSTOP)
        return self._note(fault)

    def thaw(self) -> Fault:
        """SIGCONT: the process goes on where it was."""
        self.process.send_signal(signal.SIGCONT)
        fault = replace(self.faults.pop(), until=time.monotonic())
        return self._note(fault)

    def terminate(self) -> None:
        """SIGTERM: ask for a clean stop; wait for it with :meth:`wait_end`."""
        self.process.terminate()

    def _note(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault


class Pods:
    """Starts pods of one application on one database, and ends all of them when it is left.

        with Pods("tests.apps.orders:app", url, tmp_path, env={"PERDURE_LEASE": "2"}) as pods:
            first = await pods.ready()

    ``command`` replaces ``python -m perdure serve APP --db URL``. ``env`` is added to the
    environment of every pod, of which other ``PERDURE_…`` variables are left out. Each pod gets a
    runner port of its own, a ``POD_NAME``, and, with ``side_log``, that file's name.
    """

    def __init__(
        self,
        app: str,
        url: str,
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        command: Sequence[str] | None = None,
        side_log: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        serve = [python, "-m", "perdure", "serve", app, "--db", url]
        self._command = [*(serve if command is None else command), *arguments]
        self._folder, self._env, self._side_log = folder, dict(env or {}), side_log
        self.all: list[Pod] = []
        atexit.register(self.end_all)

    def __enter__(self) -> Pods:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    def start(
        self,
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        on: Host | None = None,
    ) -> Pod:
        """Start one more pod and return at once. ``env`` is for this pod alone. ``on``: a host other than this one."""
        name = name or f"pod-{len(self.all) + 1}"
        port = free_port()
        pod = Pod(
            name,
            [*(on.prefix if on is not None else ()), *self._command],
            env=self._environment(name, port)
            | ({} if on is None else {"PERDURE_RUNNER_HOST": on.address})
            | dict(env or {}),
            host="127.0.0.1" if on is None else on.address,
            log_path=self._folder / f"{name}.log",
            port=port,
        )
        self.all.append(pod)
        return pod

    async def ready(
        self,
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        deadline: float = 30.0,
    ) -> Pod:
        """Start one more pod and wait until its ``/readyz`` says 200."""
        pod = self.start(name, env=env)
        await pod.wait_http("/readyz", deadline=deadline)
        return pod

    @property
    def faults(self) -> list[Fault]:
        """What was done to all of them, for the side log's checker."""
        return [fault for pod in self.all for fault in pod.faults]

    def end_all(self) -> None:
        """SIGKILL what still runs. Safe to call twice."""
        atexit.unregister(self.end_all)
        for pod in self.all:
            if pod.alive:
                with contextlib.suppress(ProcessLookupError):
                    pod.process.kill()
                pod.process.wait(timeout=20)

    def _environment(self, name: str, port: int) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
        paths = [str(ROOT / "src"), str(ROOT), inherited.get("PYTHONPATH", "")]
        own = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "POD_NAME": name,
            "PERDURE_RUNNER_PORT": str(port),
        }
        if self._side_log is not None:
            own[SIDE_LOG] = str(self._side_log)
        return inherited | own | self._env
