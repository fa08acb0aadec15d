"""``perdure reshard`` and ``perdure after-restore``: refused beside a pod, and runs go on afterwards."""

from __future__ import annotations

import json

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, upkeep
from perdure.storage.errors import DatabaseUnavailable, UnknownOutcome
from tests.contract.world import World
from tests.e2e.commands import Commands, pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import PostgresProxy
from tests.integration.in_process import port_and_name

pytestmark = pytest.mark.req("OP7")
APPROVAL = json.dumps({"approved": True, "by": "a test"})


@pytest.fixture
def cli(migrated_url, tmp_path):
    return Commands(migrated_url, tmp_path)


@pytest.fixture
def on_postgres(migrated_postgres_url, tmp_path):
    return Commands(migrated_postgres_url, tmp_path)


def approve(cli, run_id):
    cli("workflows", "signal", run_id, "--name", "approval", "--payload", APPROVAL).ok()


def wait_for_approval(cli, run_id):
    found = cli.wait_status(run_id, "suspended", "running")
    while found["reason"] != "signal":
        found = cli.wait_status(run_id, "suspended")


@pytest.mark.slow
async def test_another_number_of_shards(cli, tmp_path):
    run_id = cli.start()
    with pods(cli, tmp_path, park_after="0.1") as running:
        pod = await running.ready()
        wait_for_approval(cli, run_id)
        assert "1 to 65,536 shards" in cli("reshard", "0").refused()
        said = cli("reshard", "12").refused()
        assert ("pod-1 at 127.0.0.1" in said) or str(pod.pid) in said
        assert "stop all pods first" in said
        assert "PERDURE_RUNNER_STORAGE" not in said
        planned = cli("reshard", "12", "--dry-run")
        assert planned.code == 2
        assert "would be 256 -> 12 shards" in planned.err
        assert said in planned.err
        pod.terminate()
        await pod.wait_end()
    planned = cli("reshard", "12", "--dry-run").ok().err
    assert "would be 256 -> 12 shards" in planned
    assert "now 256 -> 12 shards" in cli("reshard", "12").ok().err
    with pods(cli, tmp_path) as running:
        old = running.start("old")
        assert await old.wait_end() == 2
        assert "PERDURE_SHARDS=12" in old.log
    with pods(cli, tmp_path, shards="12") as running:
        await running.ready("new")
        approve(cli, run_id)
        assert cli.wait_status(run_id, "succeeded")["status"] == "succeeded"


@pytest.mark.slow
async def test_a_dry_run_judges_like_the_change_itself(on_postgres, tmp_path):
    """All live pods are named by both, with one exit code; the lease of a killed one is waited for by both."""
    cli = on_postgres
    with pods(cli, tmp_path, lease="4") as running:
        killed, first, second = [await running.ready() for _ in range(3)]
        killed.kill()
        for words in (("reshard", "12", "--dry-run"), ("reshard", "12")):
            said = cli(*words)
            assert said.code == 2
            assert "pod-2 at 127.0.0.1" in said.err
            assert "pod-3 at 127.0.0.1" in said.err
            assert "pod-1 at" not in said.err
        for pod in (first, second):
            pod.kill()
            await pod.wait_end()
        assert "would be 256 -> 12 shards" in cli("reshard", "12", "--dry-run").ok().err
    with pods(cli, tmp_path, lease="4") as running:
        (await running.ready()).kill()
        assert "now 256 -> 12 shards" in cli("reshard", "12").ok().err


@pytest.mark.parametrize(
    "words", [("reshard", "12"), ("reshard", "12", "--dry-run"), ("after-restore",)]
)
def test_nothing_is_left_where_there_is_no_file(tmp_path, words):
    cli = Commands(f"sqlite:///{tmp_path / 'none.db'}", tmp_path)
    assert cli(*words).code in (2, 3)
    assert list(tmp_path.glob("none.db*")) == []


@pytest.mark.slow
async def test_a_pod_that_was_paused_meanwhile_ends(on_postgres, tmp_path):
    cli = on_postgres
    with pods(cli, tmp_path, lease="2", park_after="0.1") as running:
        pod = await running.ready()
        pod.freeze()
        assert "now 256 -> 8 shards" in cli("reshard", "8").ok().err  # its lease is waited for
        pod.thaw()
        assert await pod.wait_end() == 2
        assert "divided into 8 shards" in pod.log
        assert "PERDURE_SHARDS=8" in pod.log


@pytest.mark.slow
async def test_a_pod_that_was_paused_and_declared_dead_meanwhile_ends(on_postgres, tmp_path):
    cli = on_postgres
    with pods(cli, tmp_path, lease="2") as running:
        pod = await running.ready()
        pod.freeze()
        assert "now 256 -> 8 shards" in cli("reshard", "8").ok().err
        heir = await running.ready(env={"PERDURE_SHARDS": "8"})
        await heir.wait_log("peer.declared-dead")
        pod.thaw()
        assert await pod.wait_end() == 2
        assert "PERDURE_SHARDS=8" in pod.log
        assert "runner.unregistered" not in pod.log


@pytest.mark.slow
async def test_a_restored_database_forgets_who_had_what(
    on_postgres, tmp_path, postgres: PrivatePostgres
):
    """A run in the hands of a pod when the backup was made; the pod is killed and the copy takes its place."""
    cli = on_postgres
    with pods(cli, tmp_path, lease="3", park_after="60") as running:
        pod = await running.ready()
        run_id = cli.start()
        cli.wait_status(run_id, "running")
        while cli.show(run_id)["journal"] == []:
            pass
        refused = cli("after-restore").refused()
        assert "pod-1 at 127.0.0.1" in refused
        assert "--force" in refused
        pod.kill()
    copy = postgres.create_database(template=port_and_name(cli.url)[1])
    restored = Commands(postgres.url(copy), tmp_path)
    done = restored("after-restore", "--format", "json").ok().json
    assert [run["run_id"] for run in done["runs"]] == [run_id]
    assert [runner["replica_id"] for runner in done["runners"]] == ["pod-1"]
    assert "nothing to void" in restored("after-restore").ok().err
    with pods(restored, tmp_path, lease="3") as running:
        await running.ready("after")
        approve(restored, run_id)
        found = restored.wait_status(run_id, "succeeded")
        names = [entry["name"] for entry in found["journal"]]
        assert names.count("charge#0") == 1


STATEMENTS = ["lock_runners", "void_claims", "set_meta", "commit"]


MORE_STATEMENTS = ["topology", "void_runners", "void_shards"]


@pytest.mark.parametrize("where", ["before", "after_commit"])
@pytest.mark.parametrize(
    "name", [*STATEMENTS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE_STATEMENTS)]
)
async def test_voiding_is_done_whole_or_not_at_all(migrated_postgres_url, name, where):
    """The connection is cut at each statement of the transaction; the same command again finds the rest to do."""
    world = await World(migrated_postgres_url).open()
    runner = await world.runner()
    await world.start("r1", "r2")
    await runner.claim()
    port, database = port_and_name(migrated_postgres_url)
    async with PostgresProxy(port) as proxy:
        rule = proxy.cut(name=name, where=where)
        store = upkeep(DatabaseSettings(proxy.url(database)), clock=SystemClock())
        await store.open()
        with pytest.raises((UnknownOutcome, DatabaseUnavailable)):
            await store.void_claims(force=True)
        await rule.happened.wait()
        await store.close()
        await proxy.flowing()
        again = upkeep(DatabaseSettings(migrated_postgres_url), clock=SystemClock())
        await again.open()
        done = await again.void_claims(force=True)
        committed = (name, where) == ("commit", "after_commit")
        assert len(done.runs) == (0 if committed else 2)
        assert [(await world.record(r)).claim_id for r in ("r1", "r2")] == [None, None]
        await again.close()
    await world.close()


@pytest.mark.parametrize("where", ["before", "after_commit"])
@pytest.mark.parametrize("name", ["replace_shards", "commit"])
async def test_resharding_is_done_whole_or_not_at_all(migrated_postgres_url, name, where):
    world = await World(migrated_postgres_url).open()
    port, database = port_and_name(migrated_postgres_url)
    async with PostgresProxy(port) as proxy:
        rule = proxy.cut(name=name, where=where)
        store = upkeep(DatabaseSettings(proxy.url(database)), clock=SystemClock())
        await store.open()
        with pytest.raises((UnknownOutcome, DatabaseUnavailable)):
            await store.reshard(9, apply=True)
        await rule.happened.wait()
        await store.close()
    count = (await world.cluster.open()).shard_count
    assert count == (9 if (name, where) == ("commit", "after_commit") else 4)
    assert len((await world.cluster.read_topology()).shards) == count
    await world.close()
