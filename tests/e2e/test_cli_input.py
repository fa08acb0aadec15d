"""Wrong input at the command line: one line that says what is wrong, exit code 2, and nothing written."""

import json
import socket
import sqlite3
import time
from contextlib import closing

import pytest

from tests.e2e.commands import APP, ORDER, Commands
from tests.harness.postgres import free_port

TWO_WORKFLOWS = """
from perdure import App, Context, workflow

@workflow(name="one")
async def one(ctx: Context, text: str) -> None: ...

@workflow(name="two")
async def two(ctx: Context, text: str) -> None: ...

app = App("two", workflows=[one, two])
"""
TWINS = TWO_WORKFLOWS.replace('name="two"', 'name="one"')
BAD_STEP = """
from perdure import App, Context, step, workflow

@step(name="a>b")
async def bad() -> None: ...

app = App("bad")
"""


@pytest.fixture
def cli(sqlite_url, tmp_path):
    """Commands on a migrated SQLite file, in a folder with a few applications."""
    commands = Commands(sqlite_url, tmp_path)
    commands("migrate").ok()
    for name, text in {
        "two_app": TWO_WORKFLOWS,
        "twin_app": TWINS,
        "bad_step_app": BAD_STEP,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    return commands


def nothing_written(cli: Commands) -> bool:
    return bool(cli("workflows", "list", "--format", "json").ok().json == [])


def start(cli, *options, app=APP, name="orders.fulfil", payload=ORDER):
    return cli("workflows", "start", name, "--app", app, "--payload", json.dumps(payload), *options)


@pytest.mark.req("WF3", "ST12")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"payload": {"id": 3}}, ["orders.fulfil", "id:", "customer: field required", "cents"]),
        ({"payload": None}, ["orders.fulfil", "payload"]),
        ({"name": "orders.fulfill"}, ["no workflow is named 'orders.fulfill'", "orders.fulfil"]),
        (
            {"app": "two_app:app", "name": "one", "payload": "x" * 3_000_000},
            ["3,000,0", "2,097,152"],
        ),
        ({"app": "nowhere:app"}, ["no module named 'nowhere'"]),
        ({"app": "two_app:application"}, ["has no application; it has two_app:app"]),
        ({"app": "two_app"}, ["app = 'two_app'", "module:attribute"]),
        ({"app": "twin_app:app"}, ["'one'", "twin_app.py:4", "twin_app.py:7"]),
        ({"app": "bad_step_app:app"}, ["a>b", "bad_step_app.py"]),
    ],
)
def test_starts_that_cannot_be(cli, options, said):
    refused = start(cli, **options).refused()
    assert not [word for word in said if word not in refused]
    assert nothing_written(cli)


@pytest.mark.parametrize(
    "run_id", ["", " edge", "edge ", "x" * 201, "a\0b", "a\ud800b", "\u00fc" * 101]
)
def test_run_ids_that_cannot_be(cli, run_id):
    assert "run id" in start(cli, "--run-id", run_id).refused()
    assert nothing_written(cli)


def test_one_id_under_two_workflows(cli):
    start(cli, "--run-id", "same", app="two_app:app", name="one", payload="a").ok()
    refused = start(cli, "--run-id", "same", app="two_app:app", name="two", payload="b").refused()
    assert all(word in refused for word in ("'same'", "'one'", "'two'"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("workflows list --status done", "unknown status 'done': use one of pending, running, "),
        ("workflows list --statuses pending,done", "unknown status 'done'"),
        ("workflows list --since yesterday", "'yesterday' is no instant"),
        ("workflows list --tail 0", "--tail"),
        ("workflows list --tail many", "--tail"),
        ("workflows list --format xml", "allowed is table or json"),
        ("workflows list --colour", "--colour"),
        ("workflows start one --app two_app:app --payload {", "not JSON"),
        ("workflows start one --app two_app:app --payload text", "a text needs quotes"),
        ("workflows start one --app two_app:app --payload @nowhere.json", "nowhere.json"),
        ("workflows start one --app two_app:app --payload @.", "Is a directory"),
        ("workflows start one --app two_app:app --payload " + "9" * 5_000, "not JSON"),
        ("workflows start one --app two_app:app --payload " + "[" * 5_000, "not JSON"),
        ('workflows start one --app two_app:app --payload "\\u0000"', "NUL character"),
        ("workflows show a\0b", "run id 'a\\x00b' holds a NUL character"),
        ("workflows why \ud800", "lone surrogate (U+D800)"),
        ("workflows cancel nobody --reason a\0b", "NUL character"),
        ("workflows list --workflow \0", "NUL character"),
        ("workflows start", "NAME"),
        ("workflows show", "RUN"),
        ("workflows signal nobody --name x", "there is no run 'nobody'"),
        ("workflows show nobody", "there is no run 'nobody'"),
        ("workflows why nobody", "there is no run 'nobody'"),
        ("workflows cancel nobody", "there is no run 'nobody'"),
        ("workflows retry nobody", "there is no run 'nobody'"),
        ("workflows resume nobody", "there is no run 'nobody'"),
        ("cluster status --format yaml", "allowed is table or json"),
        (
            "serve two_app:app --shard-lock advisory",
            "auto or row: SQLite has no locks that end with a session",
        ),
        ("serve two_app:app --shard-lock raft", "auto or row"),
        ("serve two_app:app --lease soon", "lease = 'soon' from the flag --lease"),
        ("serve two_app:app --lease 9 --renewal 4", "at most a third of the lease (9 s)"),
        ("serve two_app:app --runner-storage sql --lease 2", "at least 5 s"),
        ("serve two_app:app --set leese=3", "did you mean lease?"),
        ("serve two_app:app --set lease", "write KEY=VALUE"),
        ("serve two_app", "module:attribute"),
        ("serve", "which application?"),
        ("dev nowhere:app", "no module named 'nowhere'"),
        ("dance", "dance"),
    ],
)
def test_commands_that_cannot_be(cli, arguments, said):
    assert said in cli(*arguments.split()).refused()
    assert nothing_written(cli)


def test_an_unknown_variable_of_ours_is_refused_by_every_command(cli):
    for command in (("workflows", "list"), ("serve", APP), ("migrate",)):
        refused = cli.bare(*command, "--db", cli.url, env={"PERDURE_LEESE": "3"}).refused()
        assert "PERDURE_LEESE" in refused
        assert "did you mean PERDURE_LEASE?" in refused


def test_which_application_is_asked_for_when_none_is_served(cli):
    refused = cli("workflows", "start", "one").refused(code=1)
    assert "pass --app module:attribute or set PERDURE_APP" in refused


def test_no_database_at_all(tmp_path):
    cli = Commands("", tmp_path)
    for command in (("workflows", "list"), ("serve", APP), ("migrate",), ("cluster", "status")):
        assert "set PERDURE_DB" in cli.bare(*command).refused()


@pytest.mark.req("OP3")
def test_a_schema_that_is_missing_or_too_old_names_the_command(cli, tmp_path):
    missing = Commands(f"sqlite:///{tmp_path}/none.db", tmp_path)
    assert f"perdure migrate --db {missing.url}" in missing("workflows", "list").refused(code=3)
    with closing(sqlite3.connect(tmp_path / "perdure.db")) as file, file:
        file.execute("update perdure_meta set value = '0' where key = 'schema_version'")
    for refused in (
        cli("workflows", "list").refused(code=3),
        cli("cluster", "status").refused(code=3),
        cli.process("serve", APP, "--db", cli.url).refused(code=3),
    ):
        assert "version 0" in refused
        assert f"perdure migrate --db {cli.url}" in refused


class TestServers:
    def refused(self, url, tmp_path, code=2) -> str:
        began = time.monotonic()
        said = Commands(url, tmp_path)("workflows", "list").refused(code)
        assert time.monotonic() - began < 10.5
        assert "secret" not in said
        return said

    @pytest.mark.parametrize(
        "url",
        ["mysql://me:secret@127.0.0.1/x", "me:secret@h", "postgresql+psycopg://me:secret@h/x"],
    )
    def test_urls_of_nothing_we_know(self, url, tmp_path):
        assert "db = " in self.refused(url, tmp_path)

    def test_nobody_listens(self, tmp_path):
        url = f"postgresql://me:secret@127.0.0.1:{free_port()}/x"
        assert "Check host and port" in self.refused(url, tmp_path, code=1)

    @pytest.mark.req("CL11")
    def test_a_silent_server(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"postgresql://me:secret@127.0.0.1:{silent.getsockname()[1]}/x"
            assert "127.0.0.1" in self.refused(url, tmp_path, code=1)

    def test_no_such_database(self, postgres, tmp_path):
        assert "does not exist" in self.refused(postgres.url("not_there"), tmp_path)

    def test_no_sqlite_file(self, tmp_path):
        (tmp_path / "text.db").write_text(
            "not a database, but long enough to be taken for one" * 40
        )
        assert "SQLite" in self.refused(f"{tmp_path}/text.db", tmp_path)
        assert "folder" in self.refused("nowhere/x.db", tmp_path)
