"""``perdure cluster status``: with live pods, with dead ones, with none, on each engine."""

import pytest

from tests.e2e.commands import APP, Commands, pods
from tests.harness.waiting import until, until_blocking


@pytest.fixture
def cli(db_url, tmp_path):
    commands = Commands(db_url, tmp_path)
    commands("migrate").ok()
    return commands


def status(cli, *options):
    return cli("cluster", "status", "--format", "json", *options).ok().json


@pytest.mark.req("CL8", "CL1", "CL5")
async def test_every_instance_is_shown_while_it_lives_and_after(cli, tmp_path):
    with pods(cli, tmp_path) as running:
        first, second = await running.ready(), await running.ready()

        def shared():
            found = status(cli)
            shards = {each["replica_id"]: each["shards"] for each in found["runners"]}
            return found if shards == {"pod-1": 128, "pod-2": 128} else None

        found = until_blocking(shared, what="shards shared evenly", deadline=30)
        assert (found["active_replicas"], found["shards_unowned"]) == (2, 0)
        for each, pod in zip(found["runners"], (first, second), strict=True):
            assert (each["state"], each["running"]) == ("live", 0)
            assert each["address"] == f"127.0.0.1:{pod.port}"
            assert 0 <= each["lease_age"] < 5
            info = each["info"]
            assert (info["tier"], info["engine"], info["app"]) == ("full", "sql", APP)
            lock = "advisory" if cli.url.startswith("postgresql") else "row"
            assert (info["shard_lock"], info["cdc"]) == (lock, "none in this release")
            assert info["shard_lock_why"].startswith("auto")
            assert info["dialect"].split()[0] in cli.url

        table = cli("cluster", "status").ok().out
        assert all(word in table for word in ("pod-1", "pod-2", "live", "128", "full", lock))
        assert f"shard lock {lock}: auto" in table
        assert "(localhost)" in table
        assert "active replicas 2 · claims 0 · workflow runs in flight: none" in table
        only = status(cli, "--process", "pod-2")["runners"]
        assert [each["replica_id"] for each in only] == ["pod-2"]
        refused = cli("cluster", "status", "--process", "pod-9").refused(code=1)
        assert "there are: pod-1, pod-2" in refused

        second.kill()
        states = {each["replica_id"]: each["state"] for each in status(cli)["runners"]}
        assert states["pod-2"] in ("silent", "dead")
        await until(
            lambda: status(cli, "--process", "pod-1")["runners"][0]["shards"] == 256,
            what="take-over of all shards",
            deadline=30,
        )
        first.terminate()
        assert await first.wait_end() == 0

    found = status(cli)
    assert found["active_replicas"] == 0
    assert found["shards_unowned"] == 256
    states = {each["replica_id"]: each["state"] for each in found["runners"]}
    assert states == {"pod-1": "stopped", "pod-2": "dead"}
    assert "shard lock row:" not in (gone := cli("cluster", "status").ok().out)
    assert "shard lock advisory:" not in gone


@pytest.mark.req("CL8")
async def test_shards_of_pods_that_were_all_killed_are_unowned(migrated_postgres_url, tmp_path):
    """Their rows go on naming the dead, since nobody is there to take them: that no pod is well is to be seen."""
    cli = Commands(migrated_postgres_url, tmp_path)
    with pods(cli, tmp_path, lease="1") as running:
        pod = await running.ready()
        assert status(cli)["shards_unowned"] == 0
        pod.kill()
        await until(
            lambda: status(cli)["shards_unowned"] == 256, what="the end of its lease", deadline=10
        )
    assert "shards 256, 256 unowned" in cli("cluster", "status").ok().out


@pytest.mark.req("CL6", "CL8")
async def test_a_pod_without_a_lease_is_known_by_its_answer(sqlite_url, tmp_path):
    cli = Commands(sqlite_url, tmp_path)
    cli("migrate").ok()
    with pods(cli, tmp_path, runner_storage="memory") as running:
        pod = await running.ready()
        await until(lambda: status(cli)["runners"][0]["shards"] == 256, what="the pod's shards")
        (each,) = status(cli)["runners"]
        assert (each["state"], each["lease_age"]) == ("live", None)
        assert each["info"]["tier"] == "single-process"
        assert "no lease" in cli("cluster", "status").ok().out
        pod.kill()
    found = status(cli)
    assert found["runners"][0]["state"] == "silent"
    assert (found["active_replicas"], found["shards_unowned"]) == (0, 256)


@pytest.mark.req("CL7")
async def test_addresses_that_only_this_machine_can_reach_are_flagged(postgres_url, tmp_path):
    cli = Commands(postgres_url, tmp_path)
    cli("migrate").ok()
    with pods(cli, tmp_path) as running:
        pod = await running.ready()
        assert status(cli)["runners"][0]["localhost"] is True
        await pod.wait_log("can only be reached from this machine")
