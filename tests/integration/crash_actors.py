"""Processes that act and die, forked from one that has everything imported."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tests.harness.pods import ROOT
from tests.harness.sidelog import Fault
from tests.harness.waiting import until
from tests.integration.apps.crash_actor import Order


@dataclass(slots=True)
class Actor:
    """One process that carries out an order."""

    actors: Actors
    number: int
    pid: int = 0

    async def kill(self, *_: object) -> None:
        """SIGKILL; returns when the process is gone, and its connections with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await self.actors.told("ended", self.number)

    async def killed(self) -> Fault:
        """Wait for the end of the process, which has to be a SIGKILL."""
        code = await self.actors.told("ended", self.number)
        assert code == "-9", self.actors.text[-4000:]
        return Fault("kill", at=time.monotonic(), pid=self.pid)


class Actors:
    """The process of `apps.crash_actor`."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "actors.log"
        self._orders = 0
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.apps.crash_actor"],
                cwd=ROOT,
                env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one signal ends it with all that came of it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=20)
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def act(self, order: Order) -> Actor:
        """Have an order carried out; a pod is running when this returns."""
        assert self._process.stdin is not None
        self._orders += 1
        actor = Actor(self, self._orders)
        self._process.stdin.write(replace(order, number=actor.number).text().encode())
        self._process.stdin.flush()
        actor.pid = int(await self.told("began", actor.number))
        if order.act in ("pod", "birth"):
            await self.told("running", actor.number)
        return actor

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    async def told(self, word: str, number: int) -> str:
        """What is said behind the word about this order."""
        line = re.compile(rf"^{word} {number}\b ?(.*)\n", re.MULTILINE)

        def look() -> re.Match[str] | None:
            assert self._process.poll() is None, self.text[-4000:]
            return line.search(self.text)

        found = await until(look, what=f"actor {number} having {word}", deadline=30.0)
        assert found is not None
        return found[1]
