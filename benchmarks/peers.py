"""Other systems beside perdure in the same rounds, by a harness that is not part of this project.

A harness is a folder with a script that is called as ``run.sh SYSTEM WORKLOAD…``. It measures each workload once and
appends JSON lines to the file named by ``PEERS_OUT``, with ``peer``, ``workload`` and ``per_second`` (runs).
``PEERS_DIR`` is where it may keep what it installs, and leaves what went wrong in ``err-SYSTEM.log``. ``PEERS_PGPORT``
is the port of a PostgreSQL on 127.0.0.1 whose user ``postgres`` needs no password: the one that perdure is measured on.
A workload that it does not know prepares all and measures nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 900.0
"""Seconds for one call of the script, the installation included."""
NOTHING = "nothing"
TAIL = 500
OURS = ("PYTHONPATH", "VIRTUAL_ENV")
"""What other systems have not to see of this process."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A system of the harness.

    workloads: steps of a run → the name of the workload, with 50 runs in flight and from start to result.
    shares_server: it keeps its runs in the PostgreSQL that perdure uses, so that both have one limit."""

    name: str
    workloads: Mapping[int, str]
    shares_server: bool


PEERS: Sequence[Peer] = (
    Peer("dbos", {1: "w1", 10: "w2"}, shares_server=True),
    Peer("restate", {1: "w1h", 10: "w2h"}, shares_server=False),
)


class Harness:
    """left_out: why a system, or one of its workloads, has no figure."""

    def __init__(self, folder: Path, scratch: Path, port: int) -> None:
        self._folder, self._scratch, self._port = folder, scratch, port
        self.left_out: dict[str, str] = {}

    async def prepare(self) -> list[Peer]:
        """Install what is not there yet; the systems that can be measured."""
        ready = []
        for peer in PEERS:
            print(f"preparing {peer.name}", file=sys.stderr, flush=True)
            fault = await self._call(peer, [NOTHING], self._scratch / "prepared.jsonl")
            if fault is None:
                ready.append(peer)
            else:
                self._leave_out(peer.name, fault)
        return ready

    async def measure(self, peer: Peer) -> dict[int, float]:
        """Steps of a run → runs a second, once. What failed is not in it, but in ``left_out``."""
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl", dir=self._scratch) as out:
            fault = await self._call(peer, list(peer.workloads.values()), Path(out.name))
            lines = [json.loads(line) for line in out if line.strip()]
        rates = {}
        for steps, workload in peer.workloads.items():
            found = [line.get("per_second") for line in lines if line.get("workload") == workload]
            if found and found[-1]:
                rates[steps] = float(found[-1])
            else:
                why = fault or f"it measured nothing: {self._errors(peer)}"
                self._leave_out(f"{peer.name} {workload}", why)
        return rates

    def _errors(self, peer: Peer) -> str:
        log = self._scratch / f"err-{peer.name}.log"
        return (
            log.read_text(errors="replace").strip()[-TAIL:] if log.exists() else "it says nothing"
        )

    def _leave_out(self, what: str, why: str) -> None:
        self.left_out[what] = why
        print(f"{what} is left out: {why}", file=sys.stderr, flush=True)

    async def _call(self, peer: Peer, workloads: Sequence[str], out: Path) -> str | None:
        """What went wrong, if something did."""
        environment = {
            **{name: value for name, value in os.environ.items() if name not in OURS},
            "PEERS_OUT": str(out),
            "PEERS_DIR": str(self._scratch),
            "PEERS_PGPORT": str(self._port),
            "PEERS_RUNS": "1",
        }
        script = self._folder / "run.sh"
        with tempfile.TemporaryFile() as said:
            process = await asyncio.create_subprocess_exec(
                *("bash", str(script), peer.name, *workloads),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(PATIENCE):
                    code = await process.wait()
            except TimeoutError:
                return f"{script} took longer than {PATIENCE:.0f} s"
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
        return None if code == 0 else f"exit code {code}: {text[-TAIL:]}"
