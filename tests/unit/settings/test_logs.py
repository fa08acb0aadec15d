"""What a pod's log looks like, and that no password is ever in it."""

import io
import json
import logging
from typing import Any

import pytest
import structlog

from perdure.runtime.logs import BootFacts, boot_facts, configure_logs, log_boot
from perdure.runtime.settings import Settings
from perdure.sharding.lock_mode import choose
from perdure.storage.interface import Capabilities
from perdure.storage.model import LockFacts

SECRET = "s3cr3t/w@rd"
URL = f"postgresql://me:{SECRET}@db.example/shop"
SERVER = Capabilities("postgresql", "15.4", True, True, True, True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logged():
    """Configure logging onto a text stream; the settings before are put back."""
    root = logging.getLogger()
    kept = (root.handlers[:], root.level, logging.getLogger("perdure").level)

    def configure(format, level="info", stream=None):
        stream = stream or io.StringIO()
        configure_logs(format=format, level=level, stream=stream)
        return stream

    yield configure
    root.handlers[:], root.level = kept[0], kept[1]
    logging.getLogger("perdure").setLevel(kept[2])
    structlog.reset_defaults()


def lines(stream) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def facts(**settings: Any) -> BootFacts:
    made = Settings(**{"db": URL, **settings})
    lock = choose(made.shard_lock, None, LockFacts(session_locks=not made.sqlite))
    address = f"{made.runner_host}:34000"
    return boot_facts(made, SERVER, lock=lock, replica_id="pod-1", address=address)


@pytest.mark.req("CL12")
class TestBootLine:
    def test_it_tells_everything(self, logged):
        out = logged("json")
        log_boot(facts(runner_host="10.0.0.1"))
        (line,) = lines(out)
        assert line["event"] == "runner.ready"
        expected = {
            "engine": "sql",
            "dialect": "postgresql 15.4",
            "tier": "full",
            "shard_lock": "advisory",
            "cdc": "none in this release",
            "cron": "none in this release",
            "returning": "yes",
            "replica_id": "pod-1",
            "address": "10.0.0.1:34000",
        }
        assert {key: line[key] for key in expected} == expected
        assert line["shard_lock_why"].startswith("auto: ")

    def test_the_lock_mode_says_why(self):
        assert facts(shard_lock="row").shard_lock_why == "set by shard_lock"
        alone = facts(db="sqlite:///:memory:")
        assert (alone.engine, alone.tier, alone.shard_lock) == ("memory", "single-process", "none")
        assert "this process owns every shard" in alone.shard_lock_why

    def test_it_is_kept_in_the_runner_row_as_texts(self):
        info = facts().info()
        assert info["localhost"] == "yes"
        assert info["lease"] == "10"
        assert all(isinstance(value, str) for value in info.values())


@pytest.mark.req("CL7")
class TestLocalhostWarning:
    def test_shared_work_on_an_address_of_this_machine_is_warned_about(self, logged):
        out = logged("json")
        log_boot(facts())
        warning = lines(out)[1]
        assert warning["level"] == "warning"
        assert "PERDURE_RUNNER_HOST" in warning["what"]
        assert warning["address"] == "127.0.0.1:34000"

    @pytest.mark.parametrize(
        "settings", [{"runner_host": "10.0.0.1"}, {"db": "sqlite:///:memory:"}]
    )
    def test_else_not(self, logged, settings):
        out = logged("json")
        log_boot(facts(**settings))
        assert len(lines(out)) == 1


class TestForms:
    def test_console_has_colours_only_on_a_terminal(self, logged):
        plain = logged("console")
        structlog.get_logger("perdure.x").info("hello", n=1)
        assert "hello" in plain.getvalue()
        assert "\x1b[" not in plain.getvalue()
        coloured = logged("console", stream=Terminal())
        structlog.reset_defaults()
        configure_logs(stream=coloured)
        structlog.get_logger("perdure.x").info("hello", n=1)
        assert "\x1b[" in coloured.getvalue()

    def test_other_libraries_get_the_same_form_from_warning_on(self, logged):
        out = logged("json", level="debug")
        logging.getLogger("uvicorn.error").info("quiet")
        logging.getLogger("uvicorn.error").warning("took %d s", 3, extra={"port": 80})
        logging.getLogger("perdure.y").debug("detail")
        first, second = lines(out)
        assert (first["event"], first["logger"], first["port"]) == ("took 3 s", "uvicorn.error", 80)
        assert (second["event"], second["level"]) == ("detail", "debug")

    def test_the_level_holds_for_ours(self, logged):
        out = logged("json", level="warning")
        structlog.get_logger("perdure.z").info("no")
        structlog.get_logger("perdure.z").warning("yes")
        assert [line["event"] for line in lines(out)] == ["yes"]


@pytest.mark.parametrize("format", ["console", "json"])
def test_no_password_in_any_line(logged, format):
    out = logged(format)
    log = structlog.get_logger("perdure.x")
    log.info(f"connecting to {URL}", url=URL, nested={"urls": [URL, (URL,)]}, raw=URL.encode())
    log.info("query", url="postgresql://h/d?sslpassword=s3cr3t&password=s3cr3t")
    log.info("object", thing=ValueError(URL))
    try:
        raise ConnectionError(f"cannot reach {URL}")
    except ConnectionError:
        log.exception("failed")
        logging.getLogger("other").exception("failed as well")
    text = out.getvalue()
    assert text.count("***") >= 8
    assert "s3cr3t" not in text
    assert "w@rd" not in text
    assert "db.example" in text


def test_local_variables_are_no_part_of_a_traceback(logged):
    out = logged("json")
    try:
        customer = "Ada Lovelace"
        raise RuntimeError(len(customer))
    except RuntimeError:
        structlog.get_logger("perdure.x").exception("failed")
    (line,) = lines(out)
    assert "RuntimeError: 12" in line["exception"]
    assert "Lovelace" not in line["exception"].replace('customer = "Ada Lovelace"', "")
