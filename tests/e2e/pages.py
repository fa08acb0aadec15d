"""Reads a Markdown page and does what its examples say.

Fenced blocks are executed in order: ``python`` in one module for the page (``await`` works at top level), ``sh`` by
bash in one folder for the page (its variables live on), ``sql`` on the page's PostgreSQL database. Blocks in other
languages only show something, unless a comment above them says more. Comments, which readers do not see:

    <!-- file NAME -->        the next block is the content of this file
    <!-- start NAME -->       the next block is a pod that stays; the page goes on when it is ready
    <!-- again NAME -->       start that pod again, as it was
    <!-- stop NAME -->        Ctrl-C to that pod, and wait for its end; ``<!-- kill NAME -->``: SIGKILL
    <!-- output -->           the next block is what the last ``sh`` printed; "…" stands for anything
    <!-- sql USER -->         the next block is executed by this role
    <!-- do NAME -->          call this function of `deeds`: names an example takes for granted, checks of what it did
    <!-- elsewhere PATH -->   the next block is executed by that test
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from tests.e2e.commands import ROOT
from tests.harness.waiting import until

EXECUTED = ("python", "sh", "sql")
SHOWN = ("text", "toml", "yaml", "json")
ACTIONS = ("again", "stop", "kill", "do")
READY = "runner.ready"
PATIENCE = 60.0
"""Seconds for one block."""
_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"^<!-- (.*) -->\s*$")
_VARIABLES = ".variables"


class PageError(AssertionError):
    """A page that is not written as it has to be, or does not do what it says; names the line."""


@dataclass(frozen=True)
class Item:
    """A block or a comment. kind: a block's language, or ``comment``. line: where its text begins."""

    kind: str
    line: int
    text: str


@dataclass
class Page:
    """A page and what its execution needs.

    replaced: text of examples → what is executed in its place. env: of shell blocks. database: URL for ``sql``.
    deeds: what ``<!-- do NAME -->`` calls. module: in which the page's Python lives. executed: how many blocks were.
    """

    path: Path
    folder: Path
    deeds: Mapping[str, Callable[[Page], Awaitable[None]]] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    database: str = ""

    def __post_init__(self) -> None:
        self.module = types.ModuleType(f"page_{self.path.stem.lower().replace('-', '_')}")
        self.executed = 0
        self._lent: dict[str, types.ModuleType | None] = {}
        self._variables: dict[str, str] = {}
        self._pods: dict[str, Pod] = {}
        self.printed = ""
        """By the last ``sh`` block, for the comparison with what the page shows."""

    @property
    def names(self) -> dict[str, Any]:
        """What the page's Python has defined."""
        return vars(self.module)

    def lend(self, module: types.ModuleType) -> None:
        """Let the page's examples import it, until the end of the page; another test may have left one of that name."""
        self._lent[module.__name__] = sys.modules.get(module.__name__)
        sys.modules[module.__name__] = module

    async def execute(self) -> None:
        """Do all of it. Raises PageError, or what an example raised, with the page's own line in its traceback."""
        self.lend(self.module)
        orders: dict[str, str] = {}
        try:
            for item in items(self.path):
                if item.kind != "comment":
                    await self._block(item, orders)
                    orders = {}
                    continue
                word, _, rest = item.text.partition(" ")
                if word in ACTIONS:
                    await self._act(word, rest, item)
                else:
                    orders[word] = rest
            if orders:
                raise PageError(f"{self.path.name}: nothing follows the comment {orders}")
        finally:
            for name, before in self._lent.items():
                del sys.modules[name]
                if before is not None:
                    sys.modules[name] = before
            for pod in self._pods.values():
                await pod.end(signal.SIGKILL)

    async def _act(self, word: str, name: str, item: Item) -> None:
        if word == "do":
            if name not in self.deeds:
                raise self._wrong(item, f"there is no deed {name!r}")
            await self.deeds[name](self)
            return
        if name not in self._pods:
            raise self._wrong(item, f"no pod {name!r} was started")
        pod = self._pods[name]
        if word == "again":
            await pod.start()
        else:
            await pod.end(signal.SIGINT if word == "stop" else signal.SIGKILL)

    async def _block(self, item: Item, orders: Mapping[str, str]) -> None:
        text = self._replace(item.text)
        if "elsewhere" in orders:
            if not (ROOT / orders["elsewhere"]).is_file():
                raise self._wrong(item, f"{orders['elsewhere']} does not exist")
        elif "output" in orders:
            self._compare(item)
        elif "file" in orders:
            file = self.folder / orders["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif "start" in orders:
            command = f"exec env {' '.join(text.split())}"
            pod = Pod(command, self.folder, self._environment(), orders["start"])
            self._pods[orders["start"]] = pod
            await pod.start()
        elif item.kind == "python":
            await self._python(item.line, text)
        elif item.kind == "sh":
            await self._shell(item, text)
        elif item.kind == "sql":
            await self._sql(text, orders.get("sql"))
        elif item.kind not in SHOWN:
            raise self._wrong(item, f"a block of {item.kind or 'no language'}")
        self.executed += item.kind in EXECUTED

    # ---- kinds of blocks ----------------------------------------------------------------------

    async def _python(self, line: int, text: str) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile("\n" * (line - 1) + text, str(self.path), "exec", flags)
        found = eval(code, self.names)
        if found is not None:
            await found

    async def _shell(self, item: Item, text: str) -> None:
        kept = self.folder / _VARIABLES
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", f"set -a\n{text}\nset +a\nenv -0 > {kept}"],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if done.returncode:
            raise self._wrong(item, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        lines = kept.read_text().split("\0")
        self._variables = dict(line.split("=", 1) for line in lines if line)
        self.printed = done.stdout

    async def _sql(self, text: str, user: str | None) -> None:
        connection = await asyncpg.connect(self.database, user=user)
        try:
            await connection.execute(text)
        finally:
            await connection.close()

    def _compare(self, item: Item) -> None:
        """Blanks and ends of lines count as one blank each."""
        parts = (r"\s+".join(map(re.escape, part.split())) for part in item.text.split("…"))
        if re.fullmatch(r"\s*.*?\s*".join(parts), self.printed.strip(), re.DOTALL) is None:
            raise self._wrong(item, f"what was printed is\n{self.printed}")

    # ---- inside -------------------------------------------------------------------------------

    def _replace(self, text: str) -> str:
        for before, after in self.replaced.items():
            text = text.replace(before, after)
        return text

    def _environment(self) -> dict[str, str]:
        return shell_environment(self.folder) | dict(self.env) | self._variables

    def _wrong(self, item: Item, what: str) -> PageError:
        return PageError(f"{self.path.name}:{item.line}: {what}")


class Pod:
    """A command that stays, in a session of its own, until `end`."""

    def __init__(self, command: str, folder: Path, env: Mapping[str, str], name: str) -> None:
        self._command, self._folder, self._env = command, folder, dict(env)
        self._name, self._starts = name, 0
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Return when its log says that it is ready. Raises PageError with the log when it ends before."""
        await self.end(signal.SIGINT)
        self._starts += 1
        path = self._folder / f"{self._name}-{self._starts}.log"
        process = self._process = self._spawn(path)

        def ready() -> bool:
            ended = process.poll() is not None
            said = path.read_text(errors="replace")
            if ended and READY not in said:
                raise PageError(f"{self._command} ended before it was ready:\n{said}")
            return READY in said

        await until(ready, what=f"readiness of {self._command}", deadline=PATIENCE)

    def _spawn(self, path: Path) -> subprocess.Popen[bytes]:
        with path.open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", self._command],
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def end(self, by: signal.Signals) -> None:
        """Send this signal, unless it has ended, and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(by)
        what = f"the end of {self._command}"
        await until(lambda: process.poll() is not None, what=what, deadline=PATIENCE)


def items(path: Path) -> Iterator[Item]:
    """The page's blocks and comments, in order."""
    lines = path.read_text(encoding="utf-8").split("\n")
    at = 0
    while at < len(lines):
        comment, fence = _COMMENT.match(lines[at]), _FENCE.match(lines[at])
        if comment is not None:
            yield Item("comment", at + 1, comment[1])
        elif lines[at].startswith("<!--"):
            raise PageError(f"{path.name}:{at + 1}: a comment of the page is one line")
        elif fence is not None:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].rstrip() == "```"), None)
            if end is None:
                raise PageError(f"{path.name}:{at + 1}: this block has no end")
            yield Item(fence[1], at + 2, "\n".join(lines[at + 1 : end]) + "\n")
            at = end
        at += 1


def shell_environment(folder: Path) -> dict[str, str]:
    """Ours without our own settings; ``perdure``, ``python`` and ``pytest`` are those of this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "POD_"))}
    scripts = folder / ".bin"
    if not scripts.exists():
        scripts.mkdir(parents=True)
        for name, module in (("python", ""), ("perdure", "-m perdure "), ("pytest", "-m pytest ")):
            (scripts / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            (scripts / name).chmod(0o755)
    return kept | {
        "PATH": f"{scripts}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }
