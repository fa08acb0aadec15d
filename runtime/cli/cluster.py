"""``perdure cluster status``: what the database knows of the cluster, and what each live runner says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
import typer

from perdure.runtime.cli.options import Db, Format, Schema, check_format, client_settings
from perdure.runtime.cli.output import console, messages, plain, print_json, say, span, table
from perdure.runtime.client import Client
from perdure.runtime.logs import NONE_YET
from perdure.runtime.views import ClusterStatus, RunnerView

ANSWER_WITHIN = 1.0
"""Seconds a runner gets to answer; one that does not is shown from the database alone."""

REMEMBERED = 600.0
"""Seconds a dead runner without shards is still listed after its lease ran out."""

commands = typer.Typer(help="Look at the cluster.", no_args_is_help=True)

Live = Mapping[str, Any]


@commands.callback()
def cluster() -> None:
    """Look at the cluster."""


@commands.command("status")
def status(
    process: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only the runners with this replica id, address or application."
        ),
    ] = None,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """Every runner with its shards, lease and runs. Works from the database alone when no runner is up."""
    as_json = check_format(format)
    settings = client_settings(db, schema)

    async def read() -> tuple[ClusterStatus, list[tuple[RunnerView, Live | None]]]:
        async with Client(settings) as client:
            found = await client.cluster()
        wanted = [each for each in found.runners if listed(each) and is_wanted(each, process)]
        answers = await ask_runners([each for each in wanted if each.alive])
        return found, [(each, answers.get(each.runner_id)) for each in wanted]

    with messages().status("asking the cluster"):
        found, runners = asyncio.run(read())
    if as_json:
        print_json(status_json(found, runners))
    else:
        print_status(found, runners)


def listed(runner: RunnerView) -> bool:
    return runner.alive or runner.shards > 0 or runner.lease_left > -REMEMBERED


def is_wanted(runner: RunnerView, process: str | None) -> bool:
    return process is None or process in (
        runner.replica_id,
        runner.address,
        runner.info.get("app"),
        runner.info.get("app_name"),
    )


async def ask_runners(runners: Sequence[RunnerView]) -> dict[int, Live]:
    """runner_id → what its ``/status`` says; those that do not answer in time, or are another one now, are missing."""
    async with httpx.AsyncClient(timeout=ANSWER_WITHIN, trust_env=False) as http:
        answers = await asyncio.gather(*(_ask(http, runner) for runner in runners))
    return {
        runner.runner_id: live
        for runner, live in zip(runners, answers, strict=True)
        if live is not None
    }


async def _ask(http: httpx.AsyncClient, runner: RunnerView) -> Live | None:
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            answer = await http.get(f"http://{runner.address}/status")
            live = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
        return None
    # The port may belong to a successor by now; ids are compared as text since JSON readers round big numbers.
    if not isinstance(live, dict) or str(live.get("runner_id")) != str(runner.runner_id):
        return None
    return live


def state_of(runner: RunnerView, live: Live | None) -> str:
    """One word: live, draining, silent (its lease runs, it does not answer), expired, dead."""
    if not runner.alive:
        return "dead"
    if runner.lease_left < 0:
        return "expired"
    if runner.draining:
        return "draining"
    return "live" if live is not None else "silent"


def status_json(
    found: ClusterStatus, runners: Sequence[tuple[RunnerView, Live | None]]
) -> dict[str, Any]:
    """Everything the table shows, as plain values; ids as texts, since they are 63 bits wide."""
    return {
        "runners": [
            {
                **plain(runner),
                "runner_id": str(runner.runner_id),
                "state": state_of(runner, live),
                "lease_age": lease_age(runner),
                "localhost": runner.info.get("localhost") == "yes",
                "running": None if live is None else live.get("runs_in_memory"),
            }
            for runner, live in runners
        ],
        "shard_count": found.shard_count,
        "shards_unowned": found.shards_unowned,
        "lock_mode": found.lock_mode,
        "runs": dict(found.runs),
        "active_replicas": active(found),
        "claims": claims(found),
        "at": found.db_now,
    }


def print_status(found: ClusterStatus, runners: Sequence[tuple[RunnerView, Live | None]]) -> None:
    out = console()
    headings = (
        "replica", "state", "address", "dialect", "tier", "shard lock", "CDC", "cron", "shards", "lease age", "running",
    )  # fmt: skip
    out.print(table(headings, [_row(runner, live) for runner, live in runners]))
    reasons = {info: None for runner, _ in runners if (info := _lock_reason(runner.info))}
    for reason in reasons:
        say(f"shard lock {reason}")
    if any(runner.info.get("localhost") == "yes" for runner, _ in runners if runner.alive):
        say(
            "(localhost): other machines cannot reach this address; set PERDURE_RUNNER_HOST or POD_IP there"
        )
    out.print(footer(found), soft_wrap=True)


def footer(found: ClusterStatus) -> str:
    """The sums of the whole cluster on one line."""
    flight = ", ".join(f"{number} {word}" for word, number in sorted(found.runs.items())) or "none"
    return (
        f"active replicas {active(found)} · claims {claims(found)} · workflow runs in flight: {flight} · "
        f"schedule runs: {NONE_YET} · shards {found.shard_count}, {found.shards_unowned} unowned"
    )


def active(found: ClusterStatus) -> int:
    return sum(1 for runner in found.runners if runner.alive and runner.lease_left >= 0)


def claims(found: ClusterStatus) -> int:
    """Runs somebody holds now."""
    return found.runs.get("running", 0)


def _row(runner: RunnerView, live: Live | None) -> Sequence[object]:
    info = runner.info
    flag = " (localhost)" if info.get("localhost") == "yes" else ""
    return (
        runner.replica_id,
        state_of(runner, live),
        f"{runner.address}{flag}",
        info.get("dialect"),
        info.get("tier"),
        info.get("shard_lock"),
        _brief(info.get("cdc")),
        _brief(info.get("cron")),
        runner.shards,
        span(lease_age(runner)),
        "?" if live is None else live.get("runs_in_memory"),
    )


def lease_age(runner: RunnerView) -> float | None:
    """Seconds since the last renewal, by the database's clock; None where there is no lease."""
    try:
        lease = float(runner.info["lease"])
    except (KeyError, ValueError):
        return None
    return max(0.0, lease - runner.lease_left)


def _brief(text: str | None) -> str | None:
    return "none" if text == NONE_YET else text


def _lock_reason(info: Mapping[str, str]) -> str:
    return f"{info['shard_lock']}: {info.get('shard_lock_why')}" if "shard_lock" in info else ""
