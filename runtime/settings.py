"""What one process is told: settings, where each came from, and which values are allowed.

Precedence: flags of the command line, then the environment (``PERDURE_<KEY>``), then ``[tool.perdure]`` in the
nearest ``pyproject.toml`` of the application, then the defaults below. Unknown keys and bad values are refused,
naming the key, the value, where it came from and what is allowed; all faults are reported at once.

Connections. Each pod opens at most ``db_pool + 4`` connections to its server: the pool, one for the keeper, one for
the listener, one for shard ownership and, for a moment each minute, one for retention. A process with a client alone
opens ``db_pool + 2``: the pool, the listener and, while it looks at the cluster, one for that. For P pods and C such
processes a server needs

    max_connections >= P * (db_pool + 4) + C * (db_pool + 2) + what the server keeps for itself
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.runtime.settings_rules import (
    RULES,
    Fault,
    absolute_url,
    is_sqlite,
    report,
    sqlite_path,
)
from perdure.storage.connect import DatabaseSettings
from perdure.storage.errors import ConfigurationError

PREFIX = "PERDURE_"
FIXED_CONNECTIONS = 4
"""Of a pod, beside its pool: keeper, listener, ownership, retention."""

SQLITE_LEASE_MINIMUM = 5.0
"""Seconds. One writer at a time and commits that wait for the disk: a shorter lease would be lost for nothing."""

# Variables of other names that a container platform sets; the project's own name wins over them.
ALIASES: Mapping[str, str] = {"runner_host": "POD_IP", "replica_id": "POD_NAME"}

# Kubernetes puts the addresses of services into the environment; those of a service called "perdure" or
# "perdure-runner" look like settings of ours.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_SERVICE_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a pod, a client or the command line can be told. Checked when made; never changes.

    Durations are seconds, sizes are bytes. ``origins`` says where values that are no defaults came from.
    Raises ConfigurationError naming every fault.
    """

    db: str = field(default="", repr=False)
    """Database URL: postgresql://…, sqlite:////absolute/file, sqlite:///:memory:; "" where none was given."""
    schema: str | None = None
    """PostgreSQL schema of the tables; None: the first of the role's search path."""
    db_pool: int = 10
    runner_storage: str = ""
    """memory: this process alone runs what it started. sql: pods share the work. "": memory on SQLite, else sql."""
    shard_lock: str = "auto"
    """row: who is silent for a lease is dead. advisory: who loses its session's lock is dead at once, too.
    auto: what the cluster uses already; in a new one advisory where the database allows it, else row."""
    shards: int = 256
    lease: float = 10.0
    """How long peers believe a runner that they do not hear from."""
    renewal: float = 0.0
    """Time between two renewals; 0: a quarter of the lease. At most a third of it."""
    look: float = 0.0
    """Time between two looks at the other runners; 0: 0.5 or the renewal, whichever is shorter."""
    storage_deadline: float = 5.0
    """Of one statement."""
    grace: float = 25.0
    """How long a stopping pod lets running steps go on."""
    processes: int = 1
    """Pods that one `perdure serve` keeps running on this machine."""
    slots: int = 200
    """Runs of one pod that may be in a turn or a step at once."""
    park_after: float = 5.0
    warm_runs: int = 1_000
    """Parked runs whose bodies stay in memory, so that they wake without a replay; 0: none."""
    warm_bytes: int = 64 * 1024 * 1024
    """Of those, by the size of their journals and payloads."""
    max_reclaims: int = 3
    scan: float = 5.0
    """Time between two safety scans, give or take a fifth."""
    runner_host: str = "127.0.0.1"
    runner_port: int = 34_000
    """0: any free port."""
    replica_id: str | None = None
    """Stable name of the pod; None: hostname:port. See `replica`."""
    step_result_limit: int = 2 * 1024 * 1024
    payload_limit: int = 2 * 1024 * 1024
    mailbox_limit: int = 10_000
    """Unread messages of one run."""
    mailbox_bytes: int = 64 * 1024 * 1024
    """Of their payloads together."""
    recording: str = "full"
    """full: inputs of steps, and lines of steps that are running, are kept for people. coarse: neither."""
    input_record_limit: int = 16 * 1024
    """Of a step's input kept for people to read; longer ones are shortened, 0 keeps only how long they were."""
    finished_ttl: float | None = None
    """How long ended runs are kept; None: for ever."""
    log_format: str = "console"
    log_level: str = "info"
    hints: bool = True
    hint_transport: str = "auto"
    """database, http (from process to process, signed), or auto: http where the database does not push hints."""
    app: str | None = None
    """``module:attribute`` of the application, for commands that are not given one."""
    discover: str | None = None
    """Package to import and search for workflows."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        faults = []
        for key, rule in RULES.items():
            try:
                object.__setattr__(self, key, rule.parse(getattr(self, key)))
            except ValueError as reason:
                faults.append(self._fault(key, str(reason)))
        report(faults or self._derive())

    @property
    def sqlite(self) -> bool:
        """The database is a SQLite file or memory: one host, several defaults differ."""
        return is_sqlite(self.db)

    @property
    def connections(self) -> int:
        """The most connections one pod opens (the formula is in the module's docstring)."""
        return self.db_pool + FIXED_CONNECTIONS

    @property
    def localhost(self) -> bool:
        """The runner's address means something on this machine only."""
        host = self.runner_host.strip("[]").lower()
        return host in ("localhost", "::1", "0.0.0.0", "::") or host.startswith("127.")

    def replica(self, port: int) -> str:
        """The replica id: as configured (``POD_NAME`` in Kubernetes), else ``hostname:port`` of the bound port."""
        return self.replica_id or f"{socket.gethostname()}:{port}"

    def require_db(self) -> str:
        """The database URL. Raises ConfigurationError saying how to give one."""
        if not self.db:
            raise ConfigurationError(
                'no database: pass --db URL, set PERDURE_DB, or write db = "…" under [tool.perdure] '
                "in pyproject.toml (postgresql://user@host/name or sqlite:///file.db), "
                "or be in the folder where perdure dev runs"
            )
        return self.db

    def require_one_process(self, command: str) -> None:
        """Raises ConfigurationError when ``command``, which runs one pod, is asked for several."""
        if self.processes > 1:
            allowed = f"1 for {command}, which runs one pod; perdure serve runs several"
            report([self._fault("processes", allowed=allowed)])

    def database(self, application_name: str = "perdure") -> DatabaseSettings:
        """What the storage floor is told. Raises ConfigurationError when no database is configured."""
        return DatabaseSettings(
            url=self.require_db(),
            schema=self.schema,
            pool=self.db_pool,
            deadline=self.storage_deadline,
            application_name=application_name,
        )

    def _derive(self) -> list[Fault]:
        """Fill what depends on other values, then check what only makes sense together."""
        if not self.runner_storage:
            object.__setattr__(self, "runner_storage", "memory" if self.sqlite else "sql")
        if not self.renewal:
            object.__setattr__(self, "renewal", round(self.lease / 4, 6))
        if not self.look:
            object.__setattr__(self, "look", min(0.5, self.renewal))
        return list(self._contradictions())

    def _contradictions(self) -> Sequence[Fault]:
        faults = []
        if self.renewal > self.lease / 3:
            allowed = f"at most a third of the lease ({self.lease:g} s), so that two may get lost"
            faults.append(self._fault("renewal", allowed=allowed))
        if self.look > self.renewal:
            allowed = f"at most the renewal ({self.renewal:g} s)"
            faults.append(self._fault("look", allowed=allowed))
        sql = self.runner_storage == "sql"
        if sql and self.sqlite and self.lease < SQLITE_LEASE_MINIMUM:
            allowed = f"at least {SQLITE_LEASE_MINIMUM:g} s with runner_storage sql on SQLite"
            faults.append(self._fault("lease", allowed=allowed))
        if self.shard_lock == "advisory" and self.sqlite:
            allowed = "auto or row: SQLite has no locks that end with a session"
            faults.append(self._fault("shard_lock", allowed=allowed))
        if sql and self.sqlite and sqlite_path(self.db) is None:
            allowed = "memory: the database lives in this process's memory and cannot be shared"
            faults.append(self._fault("runner_storage", allowed=allowed))
        if not self.hints and self.hint_transport != "auto":
            allowed = "auto with hints off: none are sent"
            faults.append(self._fault("hint_transport", allowed=allowed))
        last = self.runner_port + self.processes - 1
        if self.runner_port and last > 65_535:
            allowed = f"at most {65_535 - self.processes + 1} with {self.processes} processes, which take one port each"
            faults.append(self._fault("runner_port", allowed=allowed))
        if self.processes > 1 and not sql:
            allowed = "1 with runner_storage memory: one process has the file for itself; sql lets several share it"
            faults.append(self._fault("processes", allowed=allowed))
        return faults

    def _fault(self, key: str, reason: str = "", allowed: str = "") -> Fault:
        origin = self.origins.get(key, "code")
        return Fault(key, getattr(self, key), origin, reason, allowed or RULES[key].allowed)


KEYS = tuple(RULES)


@dataclass(frozen=True, slots=True)
class _Source:
    """One place settings come from: what it says, how it names a key, and what relative paths start at."""

    values: Mapping[str, Any]
    origin: Callable[[str], str]
    base: Path


def load_settings(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of this process.

    flags: key → value as given on the command line; None means not given. environ: `os.environ` if left out.
    folder: where the search for ``pyproject.toml`` begins, going up; the current folder if left out.
    defaults: what a command takes when nobody says otherwise. Raises ConfigurationError naming every fault.
    """
    faults: list[str] = []
    here = Path.cwd()
    sources = (
        _Source(defaults or {}, lambda key: "the command's default", here),
        _read_pyproject(find_pyproject(folder or here), faults),
        _read_environment(os.environ if environ is None else environ, faults),
        _Source(
            _read_flags(flags or {}, faults),
            lambda key: (
                "the command line" if key == "app" else f"the flag --{key.replace('_', '-')}"
            ),
            here,
        ),
    )
    report(faults)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        for key, value in source.values.items():
            plain = key != "db" or not isinstance(value, str)
            values[key] = value if plain else absolute_url(value.strip(), source.base)
            origins[key] = source.origin(key)
    return Settings(**values, origins=origins)


def find_pyproject(folder: Path) -> Path | None:
    """The nearest ``pyproject.toml`` in ``folder`` or above it."""
    for place in (folder.resolve(), *folder.resolve().parents):
        if (place / "pyproject.toml").is_file():
            return place / "pyproject.toml"
    return None


def _read_flags(flags: Mapping[str, Any], faults: list[str]) -> Mapping[str, Any]:
    given = {key: value for key, value in flags.items() if value is not None}
    faults.extend(_unknown(key, "the flags", sorted(RULES)) for key in given.keys() - RULES.keys())
    return {key: value for key, value in given.items() if key in RULES}


def _read_pyproject(path: Path | None, faults: list[str]) -> _Source:
    if path is None:
        return _Source({}, str, Path.cwd())
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("perdure", {})
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; correct or remove it") from error
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.perdure is {table!r}; it has to be a table")
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for key in sorted(values.keys() - RULES.keys()):
        faults.append(_unknown(key, f"[tool.perdure] in {path}", sorted(RULES)))
        del values[key]
    return _Source(values, lambda key: f"[tool.perdure] in {path}", path.parent)


def _read_environment(environ: Mapping[str, str], faults: list[str]) -> _Source:
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, name in ALIASES.items():
        if environ.get(name):
            values[key], names[key] = environ[name], name
    for name, value in environ.items():
        if not name.startswith(PREFIX) or _is_service_link(name, value):
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in RULES:
            values[key], names[key] = value, name
        else:
            known = [PREFIX + each.upper() for each in sorted(RULES)]
            faults.append(_unknown(name, "the environment", known))
    return _Source(values, lambda key: f"{names[key]} in the environment", Path.cwd())


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name) or _SERVICE_LINK_VALUE.match(value))


def _unknown(key: str, origin: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {key} in {origin}{meant} (known: {', '.join(known)})"
