"""``perdure doctor``: what it says, and with which exit code, of real pods and of none."""

from __future__ import annotations

import pytest

from perdure.storage.connect import DatabaseSettings, migrate
from tests.e2e.commands import Commands, pods
from tests.harness.pgbouncer import MISSING, PgBouncer
from tests.harness.postgres import PrivatePostgres

pytestmark = pytest.mark.req("DB11")


def found(report) -> dict[str, list[str]]:
    by_check: dict[str, list[str]] = {}
    for each in report:
        if each["verdict"] == "found":
            by_check.setdefault(each["check"], []).append(each["what"])
    return by_check


def test_of_a_healthy_file_and_of_one_with_a_held_run(migrated_sqlite_url, tmp_path):
    cli = Commands(migrated_sqlite_url, tmp_path)
    done = cli("doctor").ok()
    assert "undeclared access" in done.out
    assert "not in this release" in done.out
    assert done.out.rstrip().endswith("skipped")
    run_id = cli.start()
    cli("workflows", "suspend", run_id).ok()
    done = cli("doctor", "--format", "json")
    assert done.code == 1
    report = found(done.json)
    assert set(report) == {"held runs", "runners"}
    assert run_id in report["held runs"][0]
    assert "no runner is alive and 1 runs" in report["runners"][0]
    assert {each["verdict"] for each in done.json} == {"well", "found", "skipped"}


def test_a_missing_schema_is_a_finding(postgres_url, tmp_path):
    done = Commands(postgres_url, tmp_path)("doctor", "--format", "json")
    assert done.code == 1
    assert "perdure migrate" in found(done.json)["schema"][0]


def test_without_a_database_it_refuses(tmp_path):
    refused = Commands("", tmp_path).bare("doctor").refused()
    assert "no database" in refused


@pytest.mark.slow
async def test_of_pods_that_work_and_one_that_does_not_answer(migrated_postgres_url, tmp_path):
    cli = Commands(migrated_postgres_url, tmp_path)
    with pods(cli, tmp_path, lease="20") as running:
        first, second = await running.ready(), await running.ready()
        well = found(cli("doctor", "--format", "json").json)
        assert set(well) <= {"durability", "shards"}  # the tests' server has no fsync
        assert any("fsync is off" in what for what in well["durability"])
        second.freeze()
        report = cli("doctor", "--format", "json")
        assert report.code == 1
        assert "pod-2 at 127.0.0.1" in found(report.json)["runners"][0]
        clocks = [each for each in report.json if each["check"] == "runner clocks"]
        assert [(each["verdict"], "pod-2" in each["what"]) for each in clocks] == [
            ("skipped", True)
        ]
        second.thaw()
        del first


def test_it_only_reads(migrated_sqlite_url, tmp_path):
    migrate(DatabaseSettings(migrated_sqlite_url))
    cli = Commands(migrated_sqlite_url, tmp_path)
    run_id = cli.start()
    before = cli.show(run_id)
    cli("doctor")
    assert cli.show(run_id) == before


@pytest.mark.skipif(not PgBouncer.installed(), reason=MISSING)
def test_a_pooler_that_rotates_sessions_is_found_through_it(
    postgres: PrivatePostgres, migrated_postgres_url, tmp_path
):
    with PgBouncer(postgres, mode="transaction") as pooler:
        url = pooler.url(migrated_postgres_url.rpartition("/")[2])
        done = Commands(url, tmp_path)("doctor", "--format", "json")
        assert "rotates server connections" in found(done.json)["pooler"][0], done
    direct = Commands(migrated_postgres_url, tmp_path)("doctor", "--format", "json")
    assert "pooler" not in found(direct.json)


@pytest.mark.slow
async def test_another_server_is_told_until_somebody_has_seen_to_it(
    postgres: PrivatePostgres, migrated_postgres_url, tmp_path
):
    """As after a fail-over or a restore: what runners wrote down is not where they are now."""
    cli = Commands(migrated_postgres_url, tmp_path)
    database = migrated_postgres_url.rpartition("/")[2]
    with pods(cli, tmp_path, lease="2") as running:
        pod = await running.ready()
        pod.terminate()
        await pod.wait_end()
        postgres.run_sql(
            "update perdure_meta set value = '1/1' where key = 'server'", database=database
        )
        pod = await running.ready("moved")
        pod.terminate()
        await pod.wait_end()
    what = found(cli("doctor", "--format", "json").json)["server"][0]
    assert "was last used on the server 1/1" in what
    assert "perdure after-restore" in what
    assert "the cluster's id is now" in cli("after-restore").ok().err
    assert "server" not in found(cli("doctor", "--format", "json").json)
    assert "nothing to void" in cli("after-restore").ok().err
