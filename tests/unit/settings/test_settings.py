"""Where settings come from, which are refused, and with which words."""

import socket
from pathlib import Path

import pytest

from perdure.runtime.settings import Settings, find_pyproject, load_settings
from perdure.runtime.settings_rules import RULES
from perdure.storage.errors import ConfigurationError


def refusal(**kwargs) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(**{"environ": {}, "folder": Path("/"), **kwargs})
    return str(refused.value)


def settings(**kwargs) -> Settings:
    return load_settings(**{"environ": {}, "folder": Path("/"), **kwargs})


@pytest.fixture
def project(tmp_path: Path):
    """A folder whose pyproject.toml has the given lines under [tool.perdure]."""

    def write(*lines: str) -> Path:
        text = "\n".join(("[tool.perdure]", *lines))
        (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
        (tmp_path / "app" / "deep").mkdir(parents=True, exist_ok=True)
        return tmp_path / "app" / "deep"

    return write


class TestPrecedence:
    def test_defaults(self):
        made = settings()
        assert (made.lease, made.renewal, made.look, made.slots) == (10.0, 2.5, 0.5, 200)
        assert (made.runner_storage, made.shard_lock, made.runner_port) == ("sql", "auto", 34_000)

    @pytest.mark.req("WF4")
    def test_the_nearest_pyproject_counts_and_the_environment_and_flags_win_over_it(self, project):
        folder = project("slots = 7", "grace = 3", "lease = 20")
        made = settings(
            folder=folder,
            environ={"PERDURE_SLOTS": "8", "PERDURE_GRACE": "4"},
            flags={"slots": "9", "db": None},
        )
        assert (made.lease, made.grace, made.slots) == (20.0, 4.0, 9)
        assert "pyproject.toml" in made.origins["lease"]
        assert "PERDURE_GRACE" in made.origins["grace"]
        assert "--slots" in made.origins["slots"]

    def test_a_commands_own_default_gives_way_to_everything(self, project):
        made = settings(folder=project("slots = 7"), defaults={"slots": 3, "runner_port": 0})
        assert (made.slots, made.runner_port) == (7, 0)

    def test_dashes_and_underscores_are_the_same_in_pyproject(self, project):
        assert settings(folder=project("runner-port = 5")).runner_port == 5

    def test_the_search_goes_up_from_the_folder(self, project):
        folder = project()
        assert find_pyproject(folder) == folder.parents[1] / "pyproject.toml"

    @pytest.mark.req("CL7")
    def test_pod_address_and_name_come_from_the_platform_unless_set_here(self):
        platform = {"POD_IP": "10.0.0.7", "POD_NAME": "pod-3"}
        made = settings(environ=platform)
        assert (made.runner_host, made.replica(1), made.localhost) == ("10.0.0.7", "pod-3", False)
        own = {"PERDURE_RUNNER_HOST": "10.0.0.8", "PERDURE_REPLICA_ID": "mine"}
        made = settings(environ={**own, **platform})
        assert (made.runner_host, made.replica(1)) == ("10.0.0.8", "mine")

    @pytest.mark.req("CL7")
    def test_without_a_pod_name_the_replica_is_host_and_bound_port(self):
        assert settings(environ={"PERDURE_RUNNER_PORT": "0"}).replica(41_007) == (
            f"{socket.gethostname()}:41007"
        )

    @pytest.mark.req("CL7")
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3", "::1", "0.0.0.0"])
    def test_addresses_of_this_machine_alone_are_known_as_such(self, host):
        assert settings(environ={"PERDURE_RUNNER_HOST": host}).localhost


class TestDerived:
    @pytest.mark.req("CL6")
    def test_sqlite_is_memory_unless_sql_is_asked_for(self):
        assert settings(flags={"db": "sqlite:////x/y.db"}).runner_storage == "memory"
        asked = settings(flags={"db": "sqlite:////x/y.db", "runner_storage": "sql"})
        assert asked.runner_storage == "sql"
        assert settings(flags={"db": "postgresql://h/d"}).runner_storage == "sql"

    def test_renewal_and_look_follow_the_lease(self):
        made = settings(flags={"lease": "1", "db": "postgresql://h/d"})
        assert (made.renewal, made.look) == (0.25, 0.25)

    def test_files_are_relative_to_where_they_were_written(self, project, monkeypatch, tmp_path):
        folder = project('db = "sqlite:///data/x.db"')
        assert settings(folder=folder).db == f"sqlite:///{tmp_path}/data/x.db"
        monkeypatch.chdir(folder)
        assert settings(environ={"PERDURE_DB": "x.db"}).db == f"sqlite:///{folder}/x.db"
        assert settings(flags={"db": "sqlite:///:memory:"}).db == "sqlite:///:memory:"

    @pytest.mark.parametrize(
        ("written", "file"),
        [
            ("x.db", "x.db"),
            ("./x.db", "x.db"),
            ("data/../x.db", "x.db"),
            ("../x.db", "../x.db"),
            ("data//x.db", "data/x.db"),
            ("sqlite:///x.db", "x.db"),
            ("sqlite:///./x.db", "x.db"),
            ("sqlite:///.//data/./x.db", "data/x.db"),
            ("sqlite:///../x.db", "../x.db"),
            ("sqlite:///data//x", "data/x"),
            ("sqlite:///data/x/", "data/x"),
            ("sqlite:///./x.db?a=./x.db", "x.db?a=./x.db"),
            ("sqlite:///~/x.db", "~/x.db"),
        ],
    )
    def test_one_file_in_every_spelling(
        self, project, tmp_path, monkeypatch, written: str, file: str
    ):
        """It is beside the pyproject.toml that names it, whatever folder a command runs in."""
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        folder = project(f'db = "{written}"')
        monkeypatch.chdir(folder)
        base = tmp_path / "home" if file.startswith("~/") else tmp_path
        if file.startswith("../"):
            base = tmp_path.parent
        meant = f"sqlite:///{base}/{file.removeprefix('~/').removeprefix('../')}"
        assert settings(folder=folder).db == meant
        monkeypatch.chdir(tmp_path)
        assert Settings(db=written).db == meant

    def test_connections_of_a_pod(self):
        assert settings(flags={"db_pool": "4"}).connections == 8
        with pytest.raises(ConfigurationError, match="db_pool = '2'"):
            settings(flags={"db_pool": "2"})

    def test_what_storage_is_told(self):
        url = "postgresql://u:secret@h/d"
        made = settings(flags={"db": url, "schema": "own", "db_pool": 3, "storage_deadline": 2})
        told = made.database("perdure here")
        assert (told.url, told.schema, told.pool, told.deadline) == (url, "own", 3, 2.0)
        assert told.application_name == "perdure here"
        assert "secret" not in repr(made)


class TestRefused:
    def test_the_fault_names_key_value_origin_and_what_is_allowed(self):
        said = refusal(environ={"PERDURE_LEASE": "soon"})
        assert "lease = 'soon' from PERDURE_LEASE in the environment" in said
        assert "a number of seconds from 0.5 to 3,600" in said

    def test_all_faults_are_told_at_once(self, project):
        said = refusal(folder=project("slots = 0", "hints = 'perhaps'"), flags={"grace": "-1"})
        assert all(key in said for key in ("slots = '0'", "hints = 'perhaps'", "grace = '-1'"))
        assert "--grace" in said
        assert "pyproject.toml" in said

    @pytest.mark.parametrize(
        ("origin", "said"),
        [
            ({"environ": {"PERDURE_LEESE": "1"}}, "did you mean PERDURE_LEASE?"),
            ({"pyproject": "leese = 1"}, "did you mean lease?"),
        ],
    )
    def test_unknown_keys(self, project, origin, said):
        folder = project(origin.pop("pyproject")) if "pyproject" in origin else Path("/")
        assert said in refusal(folder=folder, **origin)

    def test_addresses_of_services_that_a_platform_puts_there_are_no_keys(self):
        links = {
            "PERDURE_SERVICE_HOST": "10.0.0.1",
            "PERDURE_PORT_34000_TCP_ADDR": "10.0.0.1",
            "PERDURE_RUNNER_SERVICE_PORT_HTTP": "80",
            "PERDURE_RUNNER_PORT": "tcp://10.0.0.1:80",
        }
        assert settings(environ=links).runner_port == 34_000

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("raft", "unknown word"),
            ("", "unknown word"),
        ],
    )
    def test_lock_modes(self, value, said):
        text = refusal(environ={"PERDURE_SHARD_LOCK": value})
        assert said in text.replace(", allowed", ": allowed")
        assert "auto or row or advisory" in text

    @pytest.mark.parametrize("value", ["auto", "row", "ROW", "advisory"])
    def test_lock_modes_that_are_known(self, value):
        assert settings(environ={"PERDURE_SHARD_LOCK": value}).shard_lock == value.lower()

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"lease": 10, "renewal": 4}, "at most a third of the lease (10 s)"),
            ({"runner_port": 65_530, "processes": 8}, "at most 65528 with 8 processes"),
            ({"renewal": 1, "look": 2}, "at most the renewal (1 s)"),
            (
                {"db": "sqlite:////x/y.db", "runner_storage": "sql", "lease": 2},
                "at least 5 s with runner_storage sql on SQLite",
            ),
            ({"db": "sqlite:///:memory:", "runner_storage": "sql"}, "cannot be shared"),
            ({"hints": "off", "hint_transport": "http"}, "auto with hints off"),
            ({"hints": "off", "hint_transport": "database"}, "auto with hints off"),
        ],
    )
    def test_values_that_contradict_each_other(self, flags, said):
        assert said in refusal(flags=flags)

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("mysql://u:secret@h/d", "mysql is not in this release"),
            ("oddball://u:secret@h/d", "unknown database 'oddball'"),
            ("no url at all", "cannot be read"),
            ("postgresql+psycopg://u:secret@h/d", "another driver cannot be chosen"),
        ],
    )
    def test_urls(self, url, said):
        text = refusal(environ={"PERDURE_DB": url})
        assert said in text
        assert "PERDURE_DB" in text
        assert "secret" not in text

    @pytest.mark.parametrize("text", ["[tool.perdure", "[tool]\nperdure = 3"])
    def test_a_pyproject_that_cannot_be_used(self, tmp_path, text):
        (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
        assert str(tmp_path / "pyproject.toml") in refusal(folder=tmp_path)

    def test_no_database(self):
        with pytest.raises(ConfigurationError, match="--db URL, set PERDURE_DB"):
            settings().require_db()

    def test_settings_made_in_code_are_checked_as_well(self):
        with pytest.raises(ConfigurationError, match="slots = '0' from code"):
            Settings(slots=0)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("payload_limit", "3 MiB", 3 * 1024 * 1024),
        ("step_result_limit", "512KiB", 512 * 1024),
        ("finished_ttl", "never", None),
        ("finished_ttl", "86400", 86_400.0),
        ("finished_ttl", "30 days", 30 * 86_400.0),
        ("park_after", "50ms", 0.05),
        ("hints", "off", False),
        ("hints", "Yes", True),
        ("log_format", "JSON", "json"),
        ("app", "shop.main:app", "shop.main:app"),
        ("renewal", "0", 2.5),
    ],
)
def test_forms_that_are_understood(key, text, value):
    assert getattr(settings(environ={f"PERDURE_{key.upper()}": text}), key) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("slots", "1.5"),
        ("slots", "nan"),
        ("lease", "inf"),
        ("lease", ""),
        ("runner_port", "70000"),
        ("runner_host", ""),
        ("replica_id", " edge"),
        ("replica_id", "pod-\udcff"),  # what Python makes of bytes that are no UTF-8
        ("runner_host", "host-\udcff"),
        ("schema", "a-b"),
        ("schema", 'a"; drop'),
        ("app", "shop.main"),
        ("discover", "shop/main"),
        ("hints", ""),
        ("payload_limit", "2 MB"),
        ("log_level", "loud"),
        ("grace", "1 year"),
        ("slots", "3 s"),
        ("runner_storage", "disk"),
    ],
)
def test_forms_that_are_refused(key, text):
    assert f"{key} = {text!r}" in refusal(environ={f"PERDURE_{key.upper()}": text})


def test_every_setting_has_a_rule():
    assert set(RULES) == set(Settings.__dataclass_fields__) - {"origins"}
