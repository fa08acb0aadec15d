"""``perdure workflows …`` on each engine: straight in the database, with and without a pod."""

import json

import pytest

from tests.e2e.commands import ORDER, Commands, pods

APPROVAL = json.dumps({"approved": True, "by": "a test"})


@pytest.fixture
def cli(db_url, tmp_path):
    commands = Commands(db_url, tmp_path)
    commands("migrate").ok()
    return commands


@pytest.mark.req("WF15")
def test_without_a_pod_runs_are_accepted_looked_at_and_cancelled(cli):
    run_id = cli.start()
    assert cli.start() == run_id  # the same order is the same run

    shown = cli.show(run_id)
    assert (shown["status"], shown["source"]) == ("pending", "inspect")
    assert shown["payload"] == ORDER
    assert shown["journal"] == []

    why = cli("workflows", "why", run_id).ok().out
    assert "pending: it is due and no runner is alive: start one with perdure serve" in why

    other = cli.start({**ORDER, "id": "B-2"}, "--run-id", "mine-7")
    assert other == "mine-7"

    def ids(*options: str) -> list[str]:
        listed = cli("workflows", "list", *options, "--format", "json").ok().json
        return [run["run_id"] for run in listed]

    assert ids() == ["mine-7", run_id]  # newest first
    assert ids("--tail", "1") == ["mine-7"]
    assert ids("--id-prefix", "mine-") == ["mine-7"]
    assert ids("--source", "app") == []
    assert ids("--since", "2100-01-01") == []
    assert ids("--statuses", "running, pending", "--workflow", "orders.fulfil") == ids()

    said = cli("workflows", "cancel", run_id, "--reason", "no longer wanted").ok()
    assert f"run {run_id} is cancelled" in said.err
    assert cli.show(run_id)["reason"] == "no longer wanted"
    assert ids("--status", "cancelled") == [run_id]
    cli("workflows", "cancel", run_id).ok()  # again changes nothing

    again = cli("workflows", "retry", run_id).ok().out.strip()
    assert again not in (run_id, "")
    assert cli.show(again)["payload"] == ORDER

    table = cli("workflows", "list").ok().out
    assert all(each in table for each in (run_id, "mine-7", again, "cancelled", "pending"))


@pytest.mark.req("DB1", "SL2", "SL7")
async def test_with_a_pod_a_run_goes_from_start_over_signal_to_its_result(cli, tmp_path):
    with pods(cli, tmp_path) as running:
        await running.ready()
        # The application need not be named: the pod that serves it says which it is.
        command = ("workflows", "start", "orders.fulfil", "--payload", "-")
        run_id = cli(*command, text=json.dumps(ORDER)).ok().out.strip()
        cli.wait_status(run_id, "suspended")
        why = cli("workflows", "why", run_id).ok().out
        assert "suspended: it waits for signal approval until " in why
        assert "pod-1" in why

        message = tmp_path / "approval.json"
        message.write_text(APPROVAL)
        signal = ("workflows", "signal", run_id, "--name")
        for _ in range(2):  # under one id it is one signal
            cli(*signal, "note", "--id", "one", "--payload", '"hello"').ok()
        assert "unread messages  1" in cli("workflows", "why", run_id).ok().out
        cli(*signal, "approval", "--payload", f"@{message}").ok()

        ended = cli.wait_status(run_id, "succeeded")
        assert ended["result"]["status"] == "shipped"
        names = [entry["name"] for entry in ended["journal"]]
        assert names[0].startswith("charge#")
        assert sum(name.startswith("signal:approval") for name in names) == 1
        types = {event["type"] for event in ended["events"]}
        assert {"run-started", "signal-awaited", "signal-received", "run-succeeded"} <= types

        shown = cli("workflows", "show", run_id).ok().out
        assert all(
            word in shown for word in ("journal", "timeline", "print_label#0", "run-started")
        )

        for act in (("cancel",), ("retry",), ("resume",)):
            assert run_id in cli("workflows", *act, run_id).refused(code=1)
        late = cli("workflows", "signal", run_id, "--name", "approval").refused(code=1)
        assert "has already ended" in late

        waited = cli(*command, "--wait", text=json.dumps(ORDER)).ok()
        assert json.loads(waited.out) == ended["result"]


@pytest.mark.req("SL5")
async def test_ends_other_than_success_are_told_with_their_reason(cli, tmp_path):
    with pods(cli, tmp_path) as running:
        await running.ready()
        run_id = cli.start()
        cli.wait_status(run_id, "suspended")
        cli("workflows", "cancel", run_id, "--reason", "sold out").ok()
        assert cli.wait_status(run_id, "cancelled")["reason"] == "sold out"
        waited = cli(
            "workflows", "start", "orders.fulfil", "--payload", json.dumps(ORDER), "--wait"
        )
        assert waited.code == 1
        assert f"run {run_id} cancelled: sold out" in waited.err
        assert waited.out == ""

        failing = cli.start({**ORDER, "id": "A-unfit"})
        cli("workflows", "signal", failing, "--name", "approval", "--payload", '"no"').ok()
        assert "in fulfil" in cli.wait_status(failing, "failed")["traceback"]
        shown = cli("workflows", "show", failing).ok().out
        assert "Traceback (most recent call last)" in shown
