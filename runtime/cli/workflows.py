"""``perdure workflows …``: start runs, look at them and act on them, straight in the database."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from perdure.runtime.authoring.definitions import UNSET, WorkflowDefinition
from perdure.runtime.cli.options import Db, Format, Schema, check_format, client_settings
from perdure.runtime.cli.output import (
    CommandFailed,
    console,
    instant,
    messages,
    plain,
    print_json,
    print_table,
    say,
    short,
    span,
)
from perdure.runtime.client import KEEP, Client
from perdure.runtime.discovery import discover, load_app
from perdure.runtime.errors import RunNotFound
from perdure.runtime.inspection import json_value
from perdure.runtime.settings import Settings
from perdure.runtime.views import RunInfo, StepView
from perdure.storage.clock import from_micros
from perdure.storage.model import EntryKind, RunEvent, RunStatus

T = TypeVar("T")

SOURCE = "inspect"
"""Recorded as the source of runs started from here."""

commands = typer.Typer(help="Start runs, look at them, act on them.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", show_default=False)]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="MODULE:ATTRIBUTE",
        help="Application that defines the workflow [PERDURE_APP]; if left out, the one that is being served.",
    ),
]
Payload = Annotated[
    str | None,
    typer.Option(
        metavar="JSON", help="JSON text, @FILE, or - for standard input.", show_default=False
    ),
]


@commands.command("start")
def start(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the workflow.", show_default=False)
    ],
    payload: Payload = None,
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="An id of your own.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A tag; may be given several times.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end and print the result.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Longest wait.")] = None,
    app: AppOption = None,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """Start a run of a workflow; prints its id."""
    as_json = check_format(format)
    value = UNSET if payload is None else _json(payload, "--payload")
    settings = client_settings(db, schema, app=app)

    async def work(client: Client) -> None:
        handle = await client.start(name, value, run_id=run_id, source=SOURCE, tags=tag or ())
        if not wait:
            _print({"run_id": handle.run_id, "status": handle.status}, handle.run_id, as_json)
            if handle.status == "replayed":
                say(f"run {handle.run_id} had ended before; nothing was started")
            return
        say(f"run {handle.run_id} {handle.status}")
        with messages().status("waiting for its end (Ctrl-C leaves it running)"):
            try:
                result = await client.ended(handle.run_id, timeout)
            except TimeoutError:
                raise CommandFailed(
                    f"run {handle.run_id} has not ended within {timeout:g} s; it goes on"
                ) from None
        info = await _get(client, result.run_id)
        if as_json or info.status is RunStatus.SUCCEEDED or info.result is not None:
            _print(_run_json(info), json.dumps(info.result, ensure_ascii=False), as_json)
        if info.status is not RunStatus.SUCCEEDED:
            raise CommandFailed(
                f"run {info.run_id} {info.status}: {info.error or info.reason or 'no reason given'}"
            )

    _with_client(settings, work, workflows=_definitions(settings))


@commands.command("list")
def list_(
    status: Annotated[str | None, typer.Option(metavar="STATUS", help="Only this status.")] = None,
    statuses: Annotated[
        str | None, typer.Option(metavar="A,B", help="Any of these statuses.")
    ] = None,
    workflow: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this workflow.")
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Why suspended: timer, signal, crash-loop, …"),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Who started it: app, inspect, …")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="ISO", help="Created then or later; UTC unless it says otherwise."),
    ] = None,
    id_prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ids that begin so.")
    ] = None,
    tail: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="The newest N.")] = 50,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """Runs, newest first."""
    as_json = check_format(format)
    words = [*(statuses or "").split(","), status or ""]
    wanted = _statuses(words, "--statuses" if statuses else "--status")
    chosen: dict[str, Any] = {
        "workflow": workflow,
        "statuses": wanted,
        "reason": reason,
        "source": source,
        "id_prefix": id_prefix,
        "since": _since(since),
        "limit": tail,
    }

    async def work(client: Client) -> None:
        runs = await client.list(**chosen)
        if as_json:
            print_json([_run_json(info) for info in runs])
            return
        headings = ("run", "workflow", "status", "created", "took", "source", "what")
        print_table(headings, [_row(info) for info in runs])
        if len(runs) == tail:
            say(f"the newest {tail}; --tail N shows more")

    _with_client(client_settings(db, schema), work)


@commands.command("show")
def show(run: Run, db: Db = None, schema: Schema = None, format: Format = "table") -> None:
    """A run with its journal, its timeline, and the traceback of its error."""
    as_json = check_format(format)

    async def work(client: Client) -> None:
        info = await _get(client, run)
        journal, events = await client.journal(run), await client.events(run)
        if as_json:
            more = {"traceback": _traceback(info), "journal": journal, "events": events}
            print_json({**_run_json(info), **more})
        else:
            _print_run(info, journal, events)

    _with_client(client_settings(db, schema), work)


@commands.command("why")
def why(run: Run, db: Db = None, schema: Schema = None, format: Format = "table") -> None:
    """What a run waits for, who holds it, and what would move it."""
    as_json = check_format(format)

    async def work(client: Client) -> None:
        answer = await client.why(run)
        if as_json:
            print_json(answer)
            return
        said = f"[bold]{escape(answer.run_id)}[/] {answer.status}: {escape(answer.summary)}"
        console().print(said, soft_wrap=True)
        print_table(("", ""), list(answer.facts.items()))

    _with_client(client_settings(db, schema), work)


@commands.command("signal")
def signal(
    run: Run,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the signal.", show_default=False)
    ],
    payload: Payload = None,
    id: Annotated[
        str | None, typer.Option(metavar="ID", help="Delivered twice under one id, it counts once.")
    ] = None,
    db: Db = None,
    schema: Schema = None,
) -> None:
    """Leave a signal in a run's mailbox."""
    value = _json(payload, "--payload")

    async def work(client: Client) -> None:
        await client.signal(run, name, value, id=id)
        say(f"signal {name} is in the mailbox of run {run}")

    _with_client(client_settings(db, schema), work)


@commands.command("cancel")
def cancel(
    run: Run,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept with the run.")] = None,
    db: Db = None,
    schema: Schema = None,
) -> None:
    """Ask a run to end; its body may clean up first."""

    async def work(client: Client) -> None:
        await client.cancel(run, reason)
        info = await _get(client, run)
        ended = info.status is RunStatus.CANCELLED
        say(
            f"run {run} is cancelled"
            if ended
            else f"run {run} ({info.status}) has been asked to end"
        )

    _with_client(client_settings(db, schema), work)


@commands.command("retry")
def retry(
    run: Run,
    payload: Payload = None,
    app: AppOption = None,
    db: Db = None,
    schema: Schema = None,
) -> None:
    """Start a failed or cancelled run anew, as a fresh run; prints the new id. --payload replaces the original."""
    value = KEEP if payload is None else _json(payload, "--payload")
    settings = client_settings(db, schema, app=app)

    async def work(client: Client) -> None:
        handle = await client.retry(run, value)
        _print({}, handle.run_id, as_json=False)

    _with_client(settings, work, workflows=() if payload is None else _definitions(settings))


@commands.command("suspend")
def suspend(
    run: Run,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept with the run.")] = None,
    db: Db = None,
    schema: Schema = None,
) -> None:
    """Put a run on hold: it runs no code until it is resumed; signals go on being kept for it."""

    async def work(client: Client) -> None:
        await client.suspend(run, reason)
        info = await _get(client, run)
        if info.record.hold is not None:
            say(f"run {run} is on hold ({info.record.hold})")
        elif info.status.final:
            say(f"run {run} has ended meanwhile: {info.status}")
        else:
            say(
                f"run {run} starts no more steps and is on hold as soon as those that run have ended"
            )

    _with_client(client_settings(db, schema), work)


@commands.command("resume")
def resume(run: Run, db: Db = None, schema: Schema = None) -> None:
    """Let a run on hold go on, or take a suspend back."""

    async def work(client: Client) -> None:
        await client.resume(run)
        say(f"run {run} may go on")

    _with_client(client_settings(db, schema), work)


# -- inside
def _with_client(
    settings: Settings,
    work: Callable[[Client], Awaitable[T]],
    *,
    workflows: Sequence[WorkflowDefinition[Any, Any]] = (),
) -> T:
    async def run() -> T:
        async with Client(settings, workflows=workflows) as client:
            return await work(client)

    return asyncio.run(run())


def _definitions(settings: Settings) -> Sequence[WorkflowDefinition[Any, Any]]:
    """The workflows of the application: as configured, else of the one being served, if there is exactly one."""
    path = settings.app or _served(settings)
    app = load_app(path)
    if settings.discover is not None:
        discover(settings.discover, app.registry)
    return list(app.registry)


def _served(settings: Settings) -> str:
    async def read(client: Client) -> set[str]:
        status = await client.cluster()
        return {path for runner in status.runners if (path := runner.info.get("app"))}

    paths = _with_client(settings, read)
    if len(paths) == 1:
        return paths.pop()
    found = (
        f"{len(paths)} are being served here ({', '.join(sorted(paths))})"
        if paths
        else "none is being served here"
    )
    raise CommandFailed(
        f"which application defines the workflow? {found}: pass --app module:attribute or set PERDURE_APP"
    )


async def _get(client: Client, run_id: str) -> RunInfo:
    info = await client.get(run_id)
    if info is None:
        raise RunNotFound(run_id)
    return info


def _json(text: str | None, option: str) -> Any:
    """The value of a JSON option. Raises BadParameter saying where it is no JSON."""
    if text is None:
        return None
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}", param_hint=option) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise typer.BadParameter(
            f"not JSON ({error.msg} at {where}): {short(text)}; a text needs quotes, as in '\"text\"'",
            param_hint=option,
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # no UTF-8, a number of thousands of digits, too deep
        raise typer.BadParameter(f"not JSON ({error})", param_hint=option) from None


def _statuses(words: Sequence[str], option: str) -> Sequence[RunStatus]:
    """The statuses named by these words; empty ones are left out. Raises BadParameter listing the valid ones."""
    named = [word.strip().lower() for word in words if word.strip()]
    unknown = [word for word in named if word not in set(RunStatus)]
    if unknown:
        raise typer.BadParameter(
            f"unknown status {unknown[0]!r}: use one of {', '.join(RunStatus)}",
            param_hint=option,
        )
    return [RunStatus(word) for word in named]


def _since(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no instant: write it as in 2026-01-31T08:00", param_hint="--since"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _print(value: object, line: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        sys.stdout.write(f"{line}\n")


def _run_json(info: RunInfo) -> dict[str, Any]:
    fields: dict[str, Any] = plain(info)
    del fields["record"]
    return fields


def _row(info: RunInfo) -> Sequence[object]:
    took = info.finished_at - info.started_at if info.finished_at and info.started_at else None
    what = info.error or info.reason or (json.dumps(info.result) if info.result is not None else "")
    return (
        info.run_id,
        info.workflow,
        info.status,
        instant(info.created_at),
        span(took),
        info.source,
        short(what),
    )


def _print_run(info: RunInfo, journal: Sequence[StepView], events: Sequence[RunEvent]) -> None:
    facts = {
        "workflow": f"{info.workflow} (version {info.version})",
        "status": info.status,
        "reason": info.reason,
        "wakes": instant(info.wake_at),
        "source": info.source,
        "created": instant(info.created_at),
        "started": instant(info.started_at),
        "finished": instant(info.finished_at),
        "parent": info.parent_id,
        "tags": info.tags,
        "payload": _compact(info.payload),
        "result": _compact(info.result),
        "error": info.error,
    }
    console().print(f"[bold]{escape(info.run_id)}[/]")
    print_table(("", ""), [(key, value) for key, value in facts.items() if value])
    if journal:
        headings = ("seq", "kind", "name", "status", "attempt", "at", "took", "outcome")
        rows = [
            (
                step.seq,
                step.kind,
                step.name,
                step.status,
                step.attempt,
                instant(step.at),
                span(step.at - step.started_at) if step.started_at else "",
                short(_error(step) or _outcome(step)),
            )
            for step in journal
        ]
        print_table(headings, rows, title="\njournal")
    if events:
        lines = [(instant(event.at), event.type, short(_detail(event), 80)) for event in events]
        print_table(("at", "event", "detail"), lines, title="\ntimeline")
    if recorded := _traceback(info):
        console().print("\n[italic]error[/]")
        console().print(escape(recorded.rstrip()), soft_wrap=True)


def _outcome(step: StepView) -> str | None:
    if step.kind == EntryKind.TIMER and step.output is not None and step.output.isdigit():
        return instant(from_micros(int(step.output)))
    return step.output


def _error(step: StepView) -> str | None:
    again = f"again {instant(step.next_retry_at)} after " if step.next_retry_at is not None else ""
    return None if step.error is None else again + step.error


def _traceback(info: RunInfo) -> str | None:
    """Where the run failed, as recorded; None if it did not."""
    record = json_value(info.record.error)
    return str(record.get("traceback") or "") or None if isinstance(record, dict) else None


def _detail(event: RunEvent) -> str | None:
    """What an event says of itself; of a wait: its key, its name if it has one, and until when."""
    wait = json_value(event.detail)
    if not isinstance(wait, dict) or "due" not in wait:
        return event.detail
    key, name, due = str(wait.get("key")), wait.get("name"), wait["due"]
    named = f" ({name})" if name and event.type == "timer-set" else ""
    return f"{key}{named}{'' if due is None else f' until {instant(due)}'}"


def _compact(value: object) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)
