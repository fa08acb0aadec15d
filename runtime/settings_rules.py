"""Which values each setting takes, how text becomes a value, and how a fault is put into words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from perdure.runtime.authoring.durations import to_seconds
from perdure.runtime.authoring.names import storable_fault
from perdure.storage.connect import parse, redact
from perdure.storage.errors import ConfigurationError

log = structlog.get_logger("perdure.settings")

KIB, MIB, GIB = 1024, 1024**2, 1024**3
_FILE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
_SQLITE = "sqlite:///"
_CREDENTIALS = re.compile(
    r"(://[^\s:/@]*:)[^\s]*@|([?&][^\s=&]*password=)[^\s&'\"]*", re.IGNORECASE
)


class Rule(Protocol):
    """How one setting is read. ``parse`` takes text or an already typed value; ValueError: why it will not do."""

    @property
    def allowed(self) -> str: ...

    def parse(self, value: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with one setting."""

    key: str
    value: object
    origin: str
    reason: str = ""
    allowed: str = ""

    def __str__(self) -> str:
        shown = redact(str(self.value)) if self.key == "db" else hide_credentials(str(self.value))
        said = [self.reason, f"allowed is {self.allowed}" if self.allowed else ""]
        return f"{self.key} = {shown!r} from {self.origin}: {', '.join(filter(None, said))}"


def report(faults: Sequence[Fault | str]) -> None:
    """Raise ConfigurationError naming all of them; nothing when there are none."""
    if faults:
        plural = "settings" if len(faults) > 1 else "setting"
        raise ConfigurationError(f"wrong {plural}: " + "; ".join(map(str, faults)))


@dataclass(frozen=True, slots=True)
class Text:
    allowed: str = "text"
    optional: bool = True

    def parse(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, str):
            raise ValueError("not a text")
        if self.optional and value == "":
            return None
        if not value or value != value.strip() or "\0" in value:
            raise ValueError("empty, with blanks at an end, or with a NUL")
        if fault := storable_fault(value):
            raise ValueError(f"it {fault}")
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words. ``refused``: words that mean something, with why they are not to be had."""

    words: tuple[str, ...]
    refused: Mapping[str, str] | None = None
    blank: bool = False

    @property
    def allowed(self) -> str:
        return " or ".join(self.words)

    def parse(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("not a word")
        word = value.strip().lower()
        if word in self.words or (self.blank and not word):
            return word
        raise ValueError((self.refused or {}).get(word, "unknown word"))


@dataclass(frozen=True, slots=True)
class Recording:
    """What only decides how much people get to read stops no pod: an unknown word means `full`."""

    allowed: str = "full or coarse"

    def parse(self, value: Any) -> str:
        word = str(value).strip().lower()
        if word not in ("full", "coarse"):
            log.warning(
                "settings.recording-unknown", value=str(value), allowed=self.allowed, taken="full"
            )
            return "full"
        return word


@dataclass(frozen=True, slots=True)
class Switch:
    allowed: str = "on or off"

    def parse(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in ("on", "true", "yes", "1"):
            return True
        if word in ("off", "false", "no", "0"):
            return False
        raise ValueError("neither on nor off")


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds. ``whole``: an integer. ``sizes``: KiB, MiB and GiB are understood.
    ``never``: None, and the word "never", are allowed too."""

    low: float
    high: float
    unit: str = ""
    whole: bool = False
    sizes: bool = False
    never: bool = False
    zero: str = ""
    """What 0 means where it lies below ``low``; "" where it is refused like any other."""

    @property
    def allowed(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        unit = f" of {self.unit}" if self.unit else ""
        zero = f", or 0 for {self.zero}" if self.zero else ""
        never = ", or never" if self.never else ""
        return f"{kind}{unit} from {self.low:,} to {self.high:,}{zero}{never}"

    def parse(self, value: Any) -> float | int | None:
        if self.never and (value is None or str(value).strip().lower() == "never"):
            return None
        number = self._read(value)
        if not (self.low <= number <= self.high) and not (self.zero and number == 0):
            raise ValueError("out of range")
        return number

    def _read(self, value: Any) -> float | int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("not a number")
        factor = 1
        text = str(value).strip()
        if self.sizes and (sized := re.fullmatch(r"(\S+?)\s*(KiB|MiB|GiB)", text)):
            text, factor = sized[1], {"KiB": KIB, "MiB": MIB, "GiB": GIB}[sized[2]]
        try:
            number = float(text) * factor
        except ValueError:
            number = self._duration(text)
        if self.whole and number != number // 1:
            raise ValueError("not a whole number")
        return int(number) if self.whole else number

    def _duration(self, text: str) -> float:
        if self.unit != "seconds":
            raise ValueError("not a number")
        try:
            return to_seconds(text)
        except ValueError:
            raise ValueError('neither a number nor text such as "30 s"') from None


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A URL the storage floor can use, or the path of a SQLite file."""

    allowed: str = ""  # the reason says it

    def parse(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("not a text")
        url = absolute_url(value.strip(), Path.cwd())
        try:
            if url:
                parse(url)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return url


@dataclass(frozen=True, slots=True)
class AppPath:
    allowed: str = "module:attribute, as in app.main:app"

    def parse(self, value: Any) -> str | None:
        if value in (None, ""):
            return None
        module, colon, attribute = str(value).partition(":")
        parts = [*module.split("."), *attribute.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            raise ValueError("not of that form")
        return str(value)


@dataclass(frozen=True, slots=True)
class Identifier:
    """A name that can be written into a statement or a path without quoting surprises."""

    pattern: str
    allowed: str

    def parse(self, value: Any) -> str | None:
        if value in (None, ""):
            return None
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise ValueError("not of that form")
        return value


RULES: Mapping[str, Rule] = {
    "db": DatabaseUrl(),
    "schema": Identifier(
        r"[A-Za-z_][A-Za-z0-9_]{0,62}",
        "letters, digits and underscores, at most 63, no digit first",
    ),
    "db_pool": Number(3, 1_000, "connections", whole=True),
    "runner_storage": Choice(("memory", "sql"), blank=True),
    "shard_lock": Choice(("auto", "row", "advisory")),
    "shards": Number(1, 65_536, whole=True),
    "lease": Number(0.5, 3_600, "seconds"),
    "renewal": Number(0.05, 1_200, "seconds", zero="a quarter of the lease"),
    "look": Number(0.01, 1_200, "seconds", zero="0.5 or the renewal, whichever is shorter"),
    "storage_deadline": Number(0.1, 600, "seconds"),
    "grace": Number(0, 86_400, "seconds"),
    "processes": Number(1, 256, whole=True),
    "slots": Number(1, 100_000, whole=True),
    "park_after": Number(0, 86_400, "seconds"),
    "warm_runs": Number(0, 1_000_000, "runs", whole=True),
    "warm_bytes": Number(0, 64 * GIB, "bytes", whole=True, sizes=True),
    "max_reclaims": Number(1, 1_000, whole=True),
    "scan": Number(0.05, 3_600, "seconds"),
    "runner_host": Text("a host name or an IP address", optional=False),
    "runner_port": Number(0, 65_535, whole=True),
    "replica_id": Text("a name without blanks at its ends"),
    "step_result_limit": Number(1, GIB, "bytes", whole=True, sizes=True),
    "payload_limit": Number(1, GIB, "bytes", whole=True, sizes=True),
    "mailbox_limit": Number(1, 10_000_000, "messages", whole=True),
    "mailbox_bytes": Number(1, 64 * GIB, "bytes", whole=True, sizes=True),
    "recording": Recording(),
    "input_record_limit": Number(0, GIB, "bytes", whole=True, sizes=True),
    "finished_ttl": Number(0, 10_000_000_000, "seconds", never=True),
    "log_format": Choice(("console", "json")),
    "log_level": Choice(("debug", "info", "warning", "error")),
    "hints": Switch(),
    "hint_transport": Choice(("auto", "database", "http")),
    "app": AppPath(),
    "discover": Identifier(
        r"[^\W\d]\w*(\.[^\W\d]\w*)*", "the name of a package, as in app.workflows"
    ),
}


def is_sqlite(url: str) -> bool:
    return url.startswith("sqlite:")


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL; None for one that lives in memory."""
    text = url.removeprefix(_SQLITE).partition("?")[0] if url.startswith(_SQLITE) else ""
    return None if text in ("", ":memory:") else Path(text)


def absolute_url(value: str, base: Path) -> str:
    """The URL with the path of a SQLite file made absolute against ``base``; a bare path ending in .db, .sqlite or
    .sqlite3 is such a file. Others come back as they are."""
    if "://" not in value and Path(value).suffix in _FILE_SUFFIXES:
        value = f"{_SQLITE}{value}"
    path = sqlite_path(value) if is_sqlite(value) else None
    if path is None or path.is_absolute():
        return value
    # Put together anew: the path in the text may be written in other ways than `Path` writes it.
    _, mark, query = value.partition("?")
    return f"{_SQLITE}{(base / path.expanduser()).resolve()}{mark}{query}"


def hide_credentials(text: str) -> str:
    """The text with the password of each URL in it replaced by ``***``."""
    return _CREDENTIALS.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)
