"""``perdure dev``, ``serve`` and ``migrate`` as real processes: starting, stopping, and what keeps them from it."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from perdure.storage.connect import DatabaseSettings, migrate
from perdure.storage.schema import SCHEMA_VERSION
from tests.e2e.commands import APP, ROOT, Commands, environment, pods
from tests.harness.pods import Pod
from tests.harness.waiting import until

READY = "runner.ready"


def slow_app(folder, seconds: float = 1.5) -> str:
    """An application whose only step takes its time and writes to a file when it begins and ends."""
    text = f"""
        import asyncio
        from pathlib import Path
        from perdure import App, Context, step, workflow

        LOG = Path("steps.log")

        def note(word):
            with LOG.open("a") as log:
                log.write(word + "\\n")

        @step
        async def slow(number: int) -> int:
            note("begin")
            await asyncio.sleep({seconds})
            note("end")
            return number

        @workflow(name="slow")
        async def body(ctx: Context) -> int:
            return await ctx.step(slow, 1)

        app = App("slow", workflows=[body])
    """
    (folder / "slow_app.py").write_text(textwrap.dedent(text))
    return "slow_app:app"


@pytest.fixture
def start(tmp_path):
    """Start ``perdure`` with these arguments as a process in the test's folder; all are ended afterwards."""
    started: list[Pod] = []

    def make(*arguments: str, **env: str) -> Pod:
        name = f"process-{len(started) + 1}"
        command = [sys.executable, "-m", "perdure", *arguments]
        pod = Pod(
            name,
            command,
            env=environment(**env),
            log_path=tmp_path / f"{name}.log",
            port=0,
            cwd=tmp_path,
        )
        started.append(pod)
        return pod

    yield make
    for pod in started:
        if pod.alive:
            pod.kill()


def steps_of(folder) -> list[str]:
    path = folder / "steps.log"
    return path.read_text().split() if path.exists() else []


class TestDev:
    def test_several_processes_are_for_serve(self, postgres_url, tmp_path):
        cli = Commands(postgres_url, tmp_path)
        said = cli("dev", slow_app(tmp_path), "--set", "processes=4").refused()
        assert "processes = '4' from the flag --processes: allowed is 1 for perdure dev" in said

    @pytest.mark.req("OP4", "CL6", "CL12")
    async def test_nothing_to_set_up_and_runs_go_on_at_the_next_start(self, start, tmp_path):
        app = slow_app(tmp_path)
        cli = Commands("", tmp_path)
        first = start("dev", app)
        await first.wait_log(READY)
        assert (tmp_path / ".perdure" / ".gitignore").read_text() == "*\n"
        boot = next(line for line in first.log.splitlines() if READY in line)
        for fact in (
            "engine=memory",
            "dialect='sqlite",
            "shard_lock=none",
            "returning=yes",
            "replica_id=",
        ):
            assert fact in boot

        run_id = cli.process("workflows", "start", "slow").ok().out.strip()
        await until(lambda: steps_of(tmp_path) == ["begin"], what="the step begins", deadline=20)
        first.kill()
        second = start("dev", app)
        waited = cli.process("workflows", "start", "slow", "--run-id", run_id, "--wait").ok()
        assert waited.out.strip() == "1"
        assert steps_of(tmp_path) == ["begin", "begin", "end"]

        second.process.send_signal(signal.SIGINT)
        assert await second.wait_end() == 0
        assert "pod.stopped" in second.log
        assert "Traceback" not in second.log

    @pytest.mark.req("CL6")
    async def test_two_on_one_file(self, start, tmp_path):
        app = slow_app(tmp_path)
        first = start("dev", app)
        await first.wait_log(READY)
        refused = Commands("", tmp_path).process("dev", app).refused()
        assert f"in use by process {first.pid}" in refused
        assert "PERDURE_RUNNER_STORAGE=sql" in refused

    async def test_reload_starts_the_changed_code(self, start, tmp_path):
        app = slow_app(tmp_path)
        parent = start("dev", app, "--reload")
        await parent.wait_log(READY)
        source = tmp_path / "slow_app.py"
        source.write_text(source.read_text().replace('name="slow"', 'name="slower"'))
        await parent.wait_log("changed: .*slow_app.py", anew=True)
        await parent.wait_log(READY, anew=True)
        status = Commands("", tmp_path).bare("cluster", "status", "--format", "json").ok().json
        assert [each["workflows"] for each in status["runners"] if each["state"] == "live"] == [
            ["slower"]
        ]

        source.write_text("app = (\n")
        await parent.wait_log("error: importing slow_app failed: SyntaxError", anew=True)
        await parent.wait_log("ended with exit code 2; waiting for a change", anew=True)
        slow_app(tmp_path)
        await parent.wait_log(READY, anew=True)
        parent.process.send_signal(signal.SIGINT)
        assert await parent.wait_end() == 0

    @pytest.mark.slow
    async def test_a_reloaded_pod_stops_when_its_parent_is_killed(self, start, tmp_path):
        parent = start("dev", slow_app(tmp_path), "--reload")
        await parent.wait_log(READY)
        parent.kill()
        await until(lambda: "pod.stopped" in parent.log, what="the orphan stops", deadline=20)

    @pytest.mark.req("WF4")
    async def test_the_project_file_names_application_and_workflows(self, start, tmp_path):
        (tmp_path / "pyproject.toml").write_text(
            '[tool.perdure]\napp = "shop:app"\ndiscover = "flows"\ndb = "data.db"\n'
        )
        (tmp_path / "shop.py").write_text('from perdure import App\napp = App("shop")\n')
        flows = tmp_path / "flows"
        flows.mkdir()
        (flows / "empty_workflow.py").touch()
        (flows / "hello_workflow.py").write_text(
            "from perdure import Context, workflow\n"
            "@workflow\nasync def hello(ctx: Context, name: str) -> str:\n    return f'hello {name}'\n"
        )
        pod = start("dev")
        await pod.wait_log(READY)
        assert f"{flows}/empty_workflow.py is named for a workflow" in pod.log
        cli = Commands("", tmp_path)
        done = cli.bare("workflows", "start", "hello", "--payload", '"you"', "--wait").ok()
        assert done.out == '"hello you"\n'
        assert (tmp_path / "data.db").exists()


class TestServe:
    @pytest.mark.req("CL5")
    async def test_a_stop_lets_running_steps_end(self, start, db_url, tmp_path):
        app = slow_app(tmp_path)
        cli = Commands(db_url, tmp_path)
        pod = start("serve", app, "--db", db_url, "--migrate", "--runner-port", "0")
        await pod.wait_log(READY)
        run_id = cli("workflows", "start", "slow").ok().out.strip()
        await until(lambda: steps_of(tmp_path) == ["begin"], what="the step begins", deadline=20)
        pod.terminate()
        assert await pod.wait_end() == 0
        assert steps_of(tmp_path) == ["begin", "end"]
        assert [entry["name"] for entry in cli.show(run_id)["journal"]] == ["slow#0"]

    @pytest.mark.req("CL5")
    async def test_a_second_signal_lets_go_at_once(self, start, sqlite_url, tmp_path):
        app = slow_app(tmp_path, seconds=60)
        cli = Commands(sqlite_url, tmp_path)
        pod = start("serve", app, "--db", sqlite_url, "--migrate", "--runner-port", "0")
        await pod.wait_log(READY)
        cli("workflows", "start", "slow").ok()
        await until(lambda: steps_of(tmp_path) == ["begin"], what="the step begins", deadline=20)
        pod.terminate()
        await pod.wait_log("pod.stopping")

        def let_go() -> bool:
            pod.terminate()  # those that come close behind the first are the first
            return "pod.letting-go" in pod.log

        await until(let_go, what="the second signal is heard", deadline=10)
        assert await pod.wait_end(deadline=10) == 4

    @pytest.mark.req("OP3")
    def test_a_missing_schema_says_what_to_run(self, db_url, tmp_path):
        cli = Commands(db_url, tmp_path)
        refused = cli.process("serve", APP, "--db", db_url).refused(code=3)
        assert f"perdure migrate --db {db_url}" in refused
        assert (
            cli.process("migrate", "--db", db_url)
            .ok()
            .err.endswith(f"schema version none -> {SCHEMA_VERSION}\n")
        )
        assert (
            cli.process("migrate", "--db", db_url).ok().err.endswith("version 2, nothing to do\n")
        )

    @pytest.mark.slow
    @pytest.mark.req("OP3")
    async def test_pods_that_boot_at_once_may_all_migrate(self, start, postgres_url):
        command = ("serve", APP, "--db", postgres_url, "--migrate", "--runner-port", "0")
        booting = [start(*command, POD_NAME=f"pod-{n}") for n in range(3)]
        for pod in booting:
            await pod.wait_log(READY)

    @pytest.mark.req("CL12", "CL7")
    async def test_json_logs_and_the_boot_line(self, start, sqlite_url):
        migrate(DatabaseSettings(sqlite_url))
        options = ("--runner-storage", "sql", "--log-format", "json", "--runner-port", "0")
        pod = start("serve", APP, "--db", sqlite_url, *options, POD_NAME="pod-7")
        await pod.wait_log(READY)
        lines = [json.loads(line) for line in pod.log.splitlines()]
        boot = next(line for line in lines if line["event"] == READY)
        assert (boot["engine"], boot["shard_lock"], boot["replica_id"]) == ("sql", "row", "pod-7")
        assert boot["cdc"] == boot["cron"] == "none in this release"
        assert any("only be reached from this machine" in line.get("what", "") for line in lines)


class TestRefusedToBoot:
    """What only a booting pod can find out. Each is one line, and nothing is written. Exit code 2, or 1 for what may
    pass by itself."""

    async def test_a_taken_port(self, sqlite_url, tmp_path):
        migrate(DatabaseSettings(sqlite_url))
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            cli = Commands(sqlite_url, tmp_path)
            command = ("serve", APP, "--db", sqlite_url, "--runner-port", port)
            refused = cli.process(*command).refused(code=1)
        assert port in refused
        assert "PERDURE_RUNNER_PORT" in refused

    async def test_another_shard_count(self, postgres_url, tmp_path):
        cli = Commands(postgres_url, tmp_path)
        cli("migrate").ok()
        with pods(cli, tmp_path) as running:
            pod = await running.ready()
            pod.terminate()
            await pod.wait_end()
        refused = cli.process(
            "serve", APP, "--db", postgres_url, "--set", "shards=64", "--runner-port", "0"
        ).refused()
        assert "256" in refused
        assert "64" in refused

    async def test_two_live_runners_with_one_name(self, postgres_url, tmp_path):
        cli = Commands(postgres_url, tmp_path)
        cli("migrate").ok()
        with pods(cli, tmp_path, lease="2") as running:
            first = await running.ready()
            second = running.start("newcomer", env={"POD_NAME": "pod-1"})
            assert await second.wait_end(deadline=30) == 2
            assert f"127.0.0.1:{first.port}" in second.log.splitlines()[-1]
            assert second.log.splitlines()[-1].startswith("error: ")
            assert first.alive


def test_python_m_perdure_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("dev", "serve", "migrate", "cluster", "workflows"))
