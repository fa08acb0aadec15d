"""The exit code is the command's own, whatever the application has left running."""

from __future__ import annotations

import textwrap

import pytest

from tests.e2e.commands import Commands

LINGERING = """
    import threading
    from perdure import App, Context, workflow

    threading.Thread(target=threading.Event().wait).start()

    @workflow(name="nothing")
    async def nothing(ctx: Context) -> None:
        return None

    app = App("lingering", workflows=[nothing])
"""
"""A thread that never ends, and that Python would wait for."""


@pytest.fixture
def cli(postgres_url, tmp_path):
    (tmp_path / "lingering.py").write_text(textwrap.dedent(LINGERING))
    return Commands(postgres_url, tmp_path)


def test_a_missing_schema(cli):
    command = ("serve", "lingering:app", "--db", cli.url, "--runner-port", "0")
    assert "perdure migrate" in cli.process(*command).refused(code=3)


def test_wrong_settings(cli):
    cli("migrate").ok()
    command = ("serve", "lingering:app", "--db", cli.url, "--runner-host", "203.0.113.7")
    assert "PERDURE_RUNNER_HOST" in cli.process(*command).refused(code=2)


def test_before_there_is_a_loop(cli):
    assert "lingering:nobody" in cli.process("serve", "lingering:nobody", "--db", cli.url).refused()


def test_a_command_that_is_done(cli):
    cli("migrate").ok()
    command = ("workflows", "start", "nothing", "--app", "lingering:app", "--db", cli.url)
    assert cli.process(*command).ok().out.strip()
