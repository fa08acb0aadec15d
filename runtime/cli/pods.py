"""``perdure dev`` and ``perdure serve``: run one pod in this process until it is told to stop."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from perdure.runtime.app import App
from perdure.runtime.cli.main_loop import run_to_end
from perdure.runtime.cli.options import DEV_FILE, Assignments, Db, Schema, assigned
from perdure.runtime.cli.output import CommandFailed
from perdure.runtime.cli.processes import keep_running
from perdure.runtime.cli.reload import reload_forever
from perdure.runtime.cli.schema import migrate_now
from perdure.runtime.cli.stop_signals import CUT_SHORT, StopSignals, ignore_signals, parent_gone
from perdure.runtime.discovery import discover, load_app, module_folder
from perdure.runtime.logs import configure_logs
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings, load_settings
from perdure.storage.connect import database_file, redact

USUAL_YOUNG = (700, 2000)
"""How many new objects Python lets gather before it looks for garbage among them, by its release."""
YOUNG = 10_000

AppArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="APP", help="The application, as in app.main:app [PERDURE_APP].", show_default=False
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        metavar="HOST", help="Address peers reach this runner at [PERDURE_RUNNER_HOST, POD_IP]."
    ),
]
Port = Annotated[
    str | None,
    typer.Option(metavar="PORT", help="The runner's port; 0: any free one [PERDURE_RUNNER_PORT]."),
]
TiedTo = Annotated[
    int | None, typer.Option(hidden=True, help="Descriptor of a pipe; stop when it closes.")
]
Migrate = Annotated[bool, typer.Option("--migrate", help="Create or update the tables first.")]


def dev(
    app: AppArgument = None,
    db: Db = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Start anew whenever a Python file below this folder changes."
        ),
    ] = False,
    migrate: Migrate = False,
    runner_port: Port = None,
    set: Assignments = None,
    tied_to: TiedTo = None,
) -> None:
    """Run the application here, on a SQLite file, with nothing to set up.

    The file is .perdure/dev.db in this folder unless a database is configured; a SQLite file is migrated at every
    start. Ctrl-C stops cleanly, and what was under way goes on at the next start."""
    if reload:
        words = [app, *_given("--db", db), *_given("--runner-port", runner_port)]
        words += [word for pair in set or () for word in ("--set", pair)] + ["--migrate"] * migrate
        raise typer.Exit(reload_forever(["dev", *(word for word in words if word)], Path.cwd()))
    _stop_with_parent(tied_to)
    flags = {"app": app, "db": db, "runner_port": runner_port, **assigned(set)}
    defaults = {"db": f"sqlite:///{Path.cwd() / DEV_FILE}", "runner_port": 0}
    settings = _settings(flags, defaults)
    settings.require_one_process("perdure dev")
    configure_logs(format=settings.log_format, level=settings.log_level, application=settings.app)
    file = database_file(settings.db)
    if file is not None and file.parent == Path.cwd() / DEV_FILE.parent:
        _private_folder(file.parent)
    _serve(settings, migrate=migrate or settings.sqlite)


def serve(
    app: AppArgument = None,
    db: Db = None,
    schema: Schema = None,
    migrate: Migrate = False,
    runner_storage: Annotated[
        str | None,
        typer.Option(metavar="memory|sql", help="sql: pods share the work (default on servers)."),
    ] = None,
    runner_host: Host = None,
    runner_port: Port = None,
    replica_id: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Stable name of this pod [PERDURE_REPLICA_ID, POD_NAME]."
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="How long peers believe a silent runner (10)."),
    ] = None,
    renewal: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Time between renewals (a quarter of the lease)."),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Pods to keep running here, each a process (1)."),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="N", help="Runs that may be busy at once (200).")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="How long running steps may go on at a stop (25)."),
    ] = None,
    shard_lock: Annotated[
        str | None, typer.Option(metavar="auto|row", help="How shards are locked (auto).")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="console|json", help="Form of the log lines (console).")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error (info).")
    ] = None,
    set: Assignments = None,
    tied_to: TiedTo = None,
) -> None:
    """Run a pod of the application on a shared database, or several.

    SIGTERM or Ctrl-C: nothing new is begun, running steps get the grace period, the shards go to the other pods; a
    second one lets go at once. Every setting can also come from PERDURE_<KEY> or [tool.perdure]."""
    flags: dict[str, str | None] = {
        "app": app,
        "db": db,
        "schema": schema,
        "runner_storage": runner_storage,
        "runner_host": runner_host,
        "runner_port": runner_port,
        "replica_id": replica_id,
        "lease": lease,
        "renewal": renewal,
        "processes": processes,
        "slots": slots,
        "grace": grace,
        "shard_lock": shard_lock,
        "log_format": log_format,
        "log_level": log_level,
        **assigned(set),
    }
    _stop_with_parent(tied_to)
    settings = _settings(flags, {})
    configure_logs(format=settings.log_format, level=settings.log_level, application=settings.app)
    if settings.processes > 1:
        settings.require_db()
        if migrate:
            migrate_now(settings, quiet=True)
        raise typer.Exit(keep_running(["serve", *_words(flags)], settings))
    _serve(settings, migrate=migrate)


def _words(flags: Mapping[str, str | None]) -> list[str]:
    """The command line that says the same."""
    words = [] if flags["app"] is None else [flags["app"]]
    for key, value in flags.items():
        if key != "app" and value is not None:
            words += ["--set", f"{key}={value}"]
    return words


def _settings(flags: dict[str, Any], defaults: dict[str, Any]) -> Settings:
    folder = module_folder(str(flags["app"])) if flags["app"] else None
    return load_settings(flags=flags, folder=folder, defaults=defaults)


def _serve(settings: Settings, *, migrate: bool) -> None:
    settings.require_db()
    if settings.app is None:
        raise typer.BadParameter(
            'which application? Give APP as module:attribute, set PERDURE_APP, or write app = "…" '
            "under [tool.perdure]"
        )
    app = load_app(settings.app)
    if settings.discover is not None:
        discover(settings.discover, app.registry)
    if migrate:
        migrate_now(settings, quiet=True)
    gc.collect()
    try:
        code = run_to_end(run_pod(app, settings))
    finally:
        ignore_signals()
    if code:
        raise typer.Exit(code)


async def run_pod(app: App, settings: Settings) -> int:
    """Run a runner until SIGTERM or SIGINT; a second signal cuts the drain short. The exit code: 0, or `CUT_SHORT`.

    Raises what kept it from starting, or what ended it against its will."""
    runner = Runner(app, settings)
    log = structlog.get_logger("perdure.cli")

    def begin() -> None:
        log.info(
            "pod.stopping",
            what="running steps may end; a second signal or Ctrl-C lets go at once",
            grace=settings.grace,
        )
        runner.begin_drain()

    stop = StopSignals(grace=settings.grace, begin=begin, leave=runner.let_go)
    try:
        up, _ = await stop.unless(1, runner.start())
        if not up:
            await runner.stop()
            log.info("pod.stopped", what="before the runner was up")
            return 0
        return await _until_told(runner, stop, settings)
    finally:
        stop.close()


def calm_collector() -> None:
    """Once everything is loaded: what is there now stays for ever. Searching it for garbage stops the loop for a tenth
    of a second each time, and longer with a large application: every timer and signal of that moment would be late.

    A young generation of Python's usual size is searched several times in each batch, and finds what is under way:
    with a larger one short runs take a fifteenth less CPU. An application that has chosen one keeps it."""
    gc.freeze()
    if gc.get_threshold()[0] in USUAL_YOUNG:
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


async def _until_told(runner: Runner, stop: StopSignals, settings: Settings) -> int:
    log = structlog.get_logger("perdure.cli")
    calm_collector()
    try:
        ended, _ = await stop.unless(1, runner.closed())
        if ended:
            raise CommandFailed(
                f"the runner on {redact(settings.db)} ended by itself; the log before this line says why"
            )
        in_time, drained = await stop.unless(2, runner.drain())
        if not in_time:
            log.warning("pod.letting-go", what="told twice: running steps are let go of now")
        elif runner.cut_short:
            log.warning(
                "pod.steps-lost", what="this runner's life ended first; others have its runs"
            )
        elif not drained:
            log.warning("pod.grace-over", what="others take over the steps that still run")
    finally:
        await runner.stop()
    log.info("pod.stopped")
    return 0 if drained else CUT_SHORT


def _given(flag: str, value: str | None) -> list[str]:
    return [] if value is None else [flag, value]


def _private_folder(folder: Path) -> None:
    """The folder of the development database, kept out of version control."""
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def _stop_with_parent(descriptor: int | None) -> None:
    """Stop cleanly when the process that started this one is gone: its end of the pipe closes."""
    if descriptor is None:
        return

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        parent_gone()

    threading.Thread(target=wait, name="perdure-parent", daemon=True).start()
