"""Puts the commands together and turns every error into one line and an exit code (`exit_codes`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from perdure.runtime.cli import cluster, doctor, pods, schema, upkeep, workflows
from perdure.runtime.cli.exit_codes import (
    FAILED,
    INTERRUPTED,
    OK,
    WRONG_INPUT,
    Ending,
    meaning,
    threads_left,
)
from perdure.runtime.cli.output import CommandFailed, messages, say_error
from perdure.storage.errors import PerdureError

# typer carries its own copy of click in some releases: its exceptions are reached through the one it exports.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {metadata.version('perdure')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Durable workflows on one SQL database."""


def build() -> typer.Typer:
    """The command tree."""
    root = typer.Typer(
        name="perdure",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    root.callback()(_root)
    root.command("dev")(pods.dev)
    root.command("serve")(pods.serve)
    root.command("migrate")(schema.migrate)
    root.command("doctor")(doctor.doctor)
    root.command("reshard")(upkeep.reshard)
    root.command("after-restore")(upkeep.after_restore)
    root.add_typer(cluster.commands, name="cluster")
    root.add_typer(workflows.commands, name="workflows")
    return root


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    code = FAILED
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    finally:
        if threads_left():
            Ending(code)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough; do not let the interpreter complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    try:
        answer = build()(args=list(arguments), prog_name="perdure", standalone_mode=False)
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return OK
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            messages().print(_format(error), markup=False)
            return WRONG_INPUT
        return _fail(
            WRONG_INPUT, f"{_format(error)} (perdure {_command(error)}--help shows the usage)"
        )
    except ClickException as error:
        return _fail(WRONG_INPUT, _format(error))
    except (CommandFailed, PerdureError) as error:
        return _fail(*meaning(error))
    return answer if isinstance(answer, int) else OK


def _fail(code: int, message: str | None) -> int:
    if message is not None:
        say_error(message)
    return code


def _format(error: Exception) -> str:
    said = error.format_message() if hasattr(error, "format_message") else str(error)
    return str(said).rstrip(".")


def _command(error: Exception) -> str:
    """The words of the command the error belongs to, each with a blank behind it."""
    context = getattr(error, "ctx", None)
    path = str(getattr(context, "command_path", "perdure"))
    words = [word for word in path.split()[1:] if word.isidentifier()]
    return "".join(f"{word} " for word in words)
