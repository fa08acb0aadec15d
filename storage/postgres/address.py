"""From a PostgreSQL URL to the driver's arguments. Nothing here ever shows a password."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy.engine import URL

from perdure.storage.connect import parse, redact
from perdure.storage.errors import ConfigurationError

# Parameters the driver itself understands; anything else would become a startup parameter, which poolers refuse.
KNOWN = frozenset(
    {
        "gsslib", "host", "krbsrvname", "passfile", "password", "port", "service", "ssl_max_protocol_version",
        "ssl_min_protocol_version", "sslcert", "sslcrl", "sslkey", "sslmode", "sslnegotiation", "sslpassword",
        "sslrootcert", "target_session_attrs", "user",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Address:
    """dsn: for the driver, with the password. shown: the URL for people. host: ``host:port`` for people."""

    dsn: str = field(repr=False)
    shown: str
    host: str


def address_of(url: str) -> Address:
    """Raises `ConfigurationError` for a port that cannot be and a parameter nobody knows."""
    parsed = parse(url)
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise ConfigurationError(
            f"{redact(url)}: port {parsed.port} in the database URL; use one from 1 to 65,535"
        )
    unknown = sorted(set(parsed.query) - KNOWN)
    if unknown:
        raise ConfigurationError(
            f"{redact(url)}: unknown parameter {unknown[0]!r} in the database URL; known are {', '.join(sorted(KNOWN))}"
        )
    return Address(
        dsn=parsed.set(drivername="postgresql").render_as_string(hide_password=False),
        shown=redact(url),
        host=_host(parsed),
    )


def _host(parsed: URL) -> str:
    given = parsed.query.get("host")
    if parsed.host is None and given:
        return given if isinstance(given, str) else ", ".join(given)
    return f"{parsed.host or 'localhost'}:{parsed.port or 5432}"
