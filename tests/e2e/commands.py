"""Running ``perdure`` commands, in this process and as processes of their own, and pods of the orders example."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from perdure.runtime.cli.entry import run
from tests.harness.pods import Pods
from tests.harness.waiting import until_blocking

ROOT = Path(__file__).resolve().parents[2]
APP = "examples.orders.app:app"
ORDER = {"id": "A-1", "customer": "Ada", "cents": 1999}


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def ok(self) -> Finished:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self

    def refused(self, code: int = 2) -> str:
        """The one line of a refusal."""
        assert (self.code, self.out) == (code, ""), f"{self.code}\n{self.out}\n{self.err}"
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1, self.err
        return self.err


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """Commands configure logging; put it back."""
    root = logging.getLogger()
    kept = (root.handlers[:], root.level, logging.getLogger("perdure").level)
    try:
        yield
    finally:
        root.handlers[:], root.level = kept[0], kept[1]
        logging.getLogger("perdure").setLevel(kept[2])
        structlog.reset_defaults()


def environment(**added: str) -> dict[str, str]:
    """Ours without settings of the one who runs the tests."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PERDURE_", "POD_"))
    }
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return {**kept, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **added}


@dataclass(frozen=True)
class Commands:
    """``perdure`` with a database and a folder to run in."""

    url: str
    folder: Path

    def __call__(self, *arguments: str, text: str = "") -> Finished:
        """Run a command with ``--db`` in this process; ``text`` is its standard input."""
        return self.bare(*arguments, "--db", self.url, text=text)

    def bare(
        self, *arguments: str, text: str = "", env: Mapping[str, str] | None = None
    ) -> Finished:
        """The same without ``--db``."""
        out, err, finished = io.StringIO(), io.StringIO(), list[int]()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, environment(**(env or {})), clear=True),
            mock.patch.object(sys, "stdin", io.StringIO(text)),
            mock.patch.object(sys, "path", [*sys.path]),
            logging_kept(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            # In a thread, since the test's own event loop may be running in this one.
            thread = threading.Thread(target=lambda: finished.append(run(arguments)))
            thread.start()
            thread.join()
        assert finished, "the command raised; its traceback is on standard error of the test"
        return Finished(finished[0], out.getvalue(), err.getvalue())

    def process(self, *arguments: str, env: Mapping[str, str] | None = None) -> Finished:
        """Run a command as a process of its own, without ``--db``."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *arguments],
            cwd=self.folder,
            env=environment(**(env or {})),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def start(self, order: Mapping[str, Any] = ORDER, *options: str) -> str:
        """Start an order; its run id."""
        payload = json.dumps(order)
        command = ("workflows", "start", "orders.fulfil", "--app", APP, "--payload", payload)
        return self(*command, *options).ok().out.strip()

    def show(self, run_id: str) -> Any:
        return self("workflows", "show", run_id, "--format", "json").ok().json

    def wait_status(self, run_id: str, *statuses: str, deadline: float = 30.0) -> Any:
        """Ask until the run has one of these statuses; what ``show`` says then."""

        def look() -> Any:
            found = self.show(run_id)
            return found if found["status"] in statuses else None

        return until_blocking(
            look, what=f"run {run_id} {statuses}", deadline=deadline, interval=0.1
        )


def pods(commands: Commands, folder: Path, **settings: str) -> Pods:
    """Pods of the orders example on that database; leave it to end them."""
    env = {"PERDURE_RUNNER_STORAGE": "sql", "PERDURE_LEASE": "5"}
    env |= {f"PERDURE_{key.upper()}": value for key, value in settings.items()}
    return Pods(APP, commands.url, folder, env=env)
