"""URLs: what can be used, what is said about the rest, and that no password is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, database_file, parse, redact
from perdure.storage.errors import ConfigurationError
from perdure.storage.postgres.address import address_of


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql://u:hush@h:5433/d?sslmode=require",
            "postgresql://u:***@h:5433/d?sslmode=require",
        ),
        ("postgres://u:hush@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d?password=hush&sslpassword=hush", "postgresql://u@h/d"),
        ("postgresql://u:hush%40%2F@h/d", "postgresql://u:***@h/d"),
        (" sqlite:////srv/my data.db ", "sqlite:////srv/my data.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("user:hush", "(unreadable URL)"),
        ("postgresql://u:hush@h:port/d", "(unreadable URL)"),
    ],
)
def test_a_shown_url_has_no_password(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("user:hush", "cannot be read"),
        ("postgresql://u:hush@h:port/d", "cannot be read"),
        ("", "cannot be read"),
        ("mysql://u:hush@h/d", "mysql is not in this release"),
        ("mariadb+pymysql://u:hush@h/d", "mariadb is not in this release"),
        ("redis://u:hush@h/0", "unknown database 'redis'"),
        ("postgresql+psycopg://u:hush@h/d", "write postgresql:// instead of postgresql+psycopg://"),
        ("sqlite+aiosqlite:////x.db?password=hush", "write sqlite:// instead"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_can(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(DatabaseSettings(url), clock=SystemClock())
    assert says in str(caught.value)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_settings_do_not_show_the_url() -> None:
    assert "hush" not in repr(DatabaseSettings("postgresql://u:hush@h/d"))


def test_files_of_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert database_file("sqlite:////srv/x.db") == Path("/srv/x.db")
    assert database_file("sqlite:///x.db") == tmp_path.resolve() / "x.db"
    assert database_file("sqlite:///:memory:") is None
    assert database_file("sqlite://") is None
    assert database_file("postgresql://h/d") is None
    assert parse("postgres://h/d").get_backend_name() == "postgresql"


def test_the_driver_gets_the_password_and_nobody_else() -> None:
    address = address_of("postgresql+asyncpg://u:hu%2Fsh@h/d?sslmode=disable")
    assert address.dsn == "postgresql://u:hu%2Fsh@h/d?sslmode=disable"
    assert address.host == "h:5432"
    assert "sh@" not in repr(address)
    assert address_of("postgresql://u@/d?host=/var/run/postgresql").host == "/var/run/postgresql"
