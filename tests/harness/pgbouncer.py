"""A private PgBouncer before the private server, in session or transaction mode."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from .postgres import PrivatePostgres, free_port, server_account
from .waiting import until_blocking

MISSING = "pgbouncer is not installed"
PoolMode = Literal["session", "transaction"]


class PgBouncer:
    """Also a context manager. pool: server connections at most, per database; more clients than that wait."""

    def __init__(self, server: PrivatePostgres, *, mode: PoolMode, pool: int = 40) -> None:
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            raise FileNotFoundError(MISSING)
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="perdure-pgbouncer-", dir="/tmp"))
        self._command = [program, str(self._folder / "pgbouncer.ini")]
        (self._folder / "users").write_text('"postgres" ""\n')
        (self._folder / "pgbouncer.ini").write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={server.port}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self._folder / 'users'}\n"
            f"pool_mode = {mode}\ndefault_pool_size = {pool}\nmax_client_conn = 500\n"
            "server_lifetime = 36000\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def installed() -> bool:
        return shutil.which("pgbouncer", path="/usr/local/bin:/usr/bin:/usr/sbin") is not None

    def __enter__(self) -> PgBouncer:
        account = server_account()
        command = self._command
        if account is not None:  # it refuses to run as root
            command = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}"]
            command += ["--init-groups", *self._command]
            for path in (self._folder, *self._folder.iterdir()):
                shutil.chown(path, account.pw_uid, account.pw_gid)
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        until_blocking(self._listens, what="start of pgbouncer", deadline=10)
        return self

    def _listens(self) -> bool:
        text = (self._folder / "log").read_text(errors="replace")
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"pgbouncer ended while starting:\n{text}")
        return f"listening on 127.0.0.1:{self.port}" in text

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
