"""``perdure cluster status``: what the database knows of the cluster, and what each live runner says of itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape

from perdure.runtime.cli.options import Db, Format, Schema, check_format, client_settings
from perdure.runtime.cli.output import (
    CommandFailed,
    console,
    messages,
    plain,
    print_json,
    print_table,
    span,
)
from perdure.runtime.client import Client
from perdure.runtime.settings import Settings
from perdure.runtime.views import ClusterStatus, RunnerView

BETWEEN_LOOKS = 2.0
ANSWER_WITHIN = 1.0
"""Seconds a runner gets to answer; one that does not is shown from the database alone."""

REMEMBERED = 600.0
"""Seconds a dead runner without shards is still listed after its lease ran out."""

commands = typer.Typer(help="Look at the cluster.", no_args_is_help=True)

Live = Mapping[str, Any]


GONE = ("dead", "stopped")
"""States of a runner that is no part of the cluster any more."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A runner as the database knows it, and what it says of itself (None: no answer in time)."""

    runner: RunnerView
    live: Live | None

    @property
    def state(self) -> str:
        """live; draining; silent (believed alive, it does not answer); stopped (it said good-bye); dead."""
        if self.live is not None:
            return "draining" if self.runner.draining else "live"
        # Without a lease only its answer tells; one that left cleanly has given its shards back.
        believed = self.runner.shards > 0 if self.leaseless else self.runner.alive
        if believed:
            return "silent"
        return "stopped" if self.runner.draining else "dead"

    @property
    def leaseless(self) -> bool:
        """Runner storage memory: the file's lock stands in for a lease."""
        return self.runner.info.get("lease") == "none"

    @property
    def lease_age(self) -> float | None:
        """Seconds since the last renewal, by the database's clock; None where there is no lease."""
        try:
            lease = float(self.runner.info["lease"])
        except (KeyError, ValueError):
            return None
        return max(0.0, lease - self.runner.lease_left)

    @property
    def localhost(self) -> bool:
        return self.runner.info.get("localhost") == "yes"

    @property
    def running(self) -> object:
        """Runs it has in memory, as it says itself; None if it does not answer."""
        return None if self.live is None else self.live.get("runs_in_memory")

    @property
    def listed(self) -> bool:
        """Worth a line: not a runner that died long ago."""
        return (
            self.state not in GONE or self.runner.shards > 0 or self.runner.lease_left > -REMEMBERED
        )

    def named(self, process: str | None) -> bool:
        """It is the one asked for; None asks for all."""
        return (
            process is None
            or self.runner.replica_id.startswith(f"{process}.")
            or process in (self.runner.replica_id, self.runner.address, self.runner.info.get("app"))
        )


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
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, with rates, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="With --watch: from one look to the next. [default: 2]"
        ),
    ] = None,
    db: Db = None,
    schema: Schema = None,
    format: Format = "table",
) -> None:
    """Every runner with its shards, lease and runs. Works from the database alone when no runner is up.

    --watch shows what each pod does a second, and goes on when the database goes away; with --format json each look is
    one line."""
    as_json = check_format(format)
    if every is not None and not 0.1 <= every <= 3600:
        raise typer.BadParameter(f"{every:g}: from 0.1 to 3600 seconds", param_hint="--every")
    if every is not None and not watch:
        raise typer.BadParameter(
            "it says how often --watch looks: add --watch", param_hint="--every"
        )
    settings = client_settings(db, schema)
    if watch:
        watch_cluster(settings, process, every or BETWEEN_LOOKS, as_json=as_json)
        return

    async def read() -> tuple[ClusterStatus, list[Instance]]:
        async with Client(settings) as client:
            found = await client.cluster()
        return found, await ask_runners(found.runners)

    with messages().status("asking the cluster"):
        found, instances = asyncio.run(read())
    shown = [each for each in instances if each.listed and each.named(process)]
    if process is not None and not shown:
        raise CommandFailed(
            f"no runner is named {process!r}; there are: "
            + (", ".join(each.runner.replica_id for each in instances if each.listed) or "none")
        )
    if as_json:
        print_json(status_json(found, instances, shown))
    else:
        print_status(found, instances, shown)


def watch_cluster(settings: Settings, process: str | None, every: float, *, as_json: bool) -> None:
    """Until Ctrl-C, or until nobody reads it any more: that is how it ends well."""
    from perdure.runtime.cli.watching import Watch  # it needs this module

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(Watch(settings, process).run(every, as_json=as_json))


async def ask_runners(
    runners: Sequence[RunnerView], http: httpx.AsyncClient | None = None
) -> list[Instance]:
    """Ask all that are worth a line for their ``/status``, at once."""
    if http is None:
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN, trust_env=False) as http:
            return await ask_runners(runners, http)
    return list(await asyncio.gather(*(_ask(http, runner) for runner in runners)))


async def _ask(http: httpx.AsyncClient, runner: RunnerView) -> Instance:
    if not Instance(runner, None).listed:
        return Instance(runner, None)
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            answer = await http.get(f"http://{runner.address}/status")
            live = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError):
        return Instance(runner, None)
    # The port may belong to a successor by now.
    same = isinstance(live, dict) and str(live.get("runner_id")) == str(runner.runner_id)
    return Instance(runner, live if same else None)


def status_json(
    found: ClusterStatus, instances: Sequence[Instance], shown: Sequence[Instance]
) -> dict[str, Any]:
    """Everything the table shows, as plain values; ids as texts, since they are 63 bits wide."""
    return {
        "runners": [
            {
                **plain(each.runner),
                "runner_id": str(each.runner.runner_id),
                "state": each.state,
                "lease_age": each.lease_age,
                "localhost": each.localhost,
                "running": each.running,
            }
            for each in shown
        ],
        "shard_count": found.shard_count,
        "shards_unowned": unowned(found, instances),
        "lock_mode": found.lock_mode,
        "runs": dict(found.runs),
        "active_replicas": active(instances),
        "claims": claims(found),
        "at": found.db_now,
    }


def print_status(
    found: ClusterStatus, instances: Sequence[Instance], shown: Sequence[Instance]
) -> None:
    headings = (
        "replica", "state", "address", "dialect", "tier", "shard lock", "shards", "lease age", "running",
    )  # fmt: skip
    print_table(headings, [_row(each) for each in shown])
    out = console()
    # What those that are gone went by may contradict what holds now.
    present = [each for each in shown if each.state not in GONE]
    for reason in dict.fromkeys(_lock_reason(each.runner.info) for each in present):
        if reason:
            out.print(escape(reason), soft_wrap=True)
    if any(each.localhost for each in present):
        out.print(LOCALHOST, soft_wrap=True)
    out.print(escape(footer(found, instances)), soft_wrap=True)


LOCALHOST = (
    "(localhost): other machines cannot reach this address; set PERDURE_RUNNER_HOST or POD_IP there"
)


def footer(found: ClusterStatus, instances: Sequence[Instance]) -> str:
    """The sums of the whole cluster on one line."""
    flight = ", ".join(f"{number} {word}" for word, number in sorted(found.runs.items())) or "none"
    return (
        f"active replicas {active(instances)} · claims {claims(found)} · workflow runs in flight: {flight} · "
        f"shards {found.shard_count}, {unowned(found, instances)} unowned"
    )


def active(instances: Sequence[Instance]) -> int:
    """Runners that the database believes in, and those without a lease that answer."""
    return sum(
        1
        for each in instances
        if (each.live is not None if each.leaseless else each.state not in GONE)
    )


def unowned(found: ClusterStatus, instances: Sequence[Instance]) -> int:
    """As the database knows it, and those of one without a lease that does not answer."""
    silent = (each for each in instances if each.leaseless and each.live is None)
    return found.shards_unowned + sum(each.runner.shards for each in silent if each.runner.alive)


def claims(found: ClusterStatus) -> int:
    """Runs somebody holds now."""
    return found.runs.get("running", 0)


def _row(each: Instance) -> Sequence[object]:
    runner, info = each.runner, each.runner.info
    return (
        runner.replica_id,
        each.state,
        f"{runner.address}{' (localhost)' if each.localhost else ''}",
        info.get("dialect"),
        info.get("tier"),
        info.get("shard_lock"),
        runner.shards,
        span(each.lease_age) or "no lease",
        "?" if each.running is None else each.running,
    )


def _lock_reason(info: Mapping[str, str]) -> str:
    if "shard_lock" not in info:
        return ""
    return f"shard lock {info['shard_lock']}: {info.get('shard_lock_why')}"
