"""``perdure cluster status --watch``: the cluster again and again, with what each pod does a second.

A database that goes away ends nothing: the last picture stays, with since when it is old, and the pods that were in it
are still asked how they are.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from rich.console import Group
from rich.live import Live
from rich.text import Text

from perdure.runtime.cli.cluster import (
    ANSWER_WITHIN,
    Instance,
    active,
    ask_runners,
    footer,
    status_json,
)
from perdure.runtime.cli.output import console, instant, plain, span, table
from perdure.runtime.client import Client
from perdure.runtime.settings import Settings
from perdure.runtime.settings_rules import hide_credentials
from perdure.runtime.views import ClusterStatus
from perdure.storage.clock import Clock, SystemClock
from perdure.storage.errors import PerdureError, SchemaError

HEADINGS = (
    "replica", "state", "shards", "runs/s", "steps/s", "slots", "memory", "lag", "due", "lease",
)  # fmt: skip
COUNTED = {"runs_per_second": "runs_ended", "steps_per_second": "step_attempts"}
"""What is shown → which of a runner's own counts it is the slope of."""


@dataclass(slots=True)
class Rates:
    """Counts of each runner at two looks make what it does a second. A new runner starts from nothing known."""

    _before: dict[int, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)

    def since(self, instances: Sequence[Instance], now: float) -> dict[int, dict[str, float]]:
        """By runner id. now: seconds of any clock that only grows."""
        found: dict[int, dict[str, float]] = {}
        seen: dict[int, tuple[float, Mapping[str, Any]]] = {}
        for each in instances:
            if each.live is None:
                continue
            key = each.runner.runner_id
            seen[key] = (now, each.live)
            if key in self._before:
                then, old = self._before[key]
                found[key] = {
                    name: _slope(old.get(count), each.live.get(count), now - then)
                    for name, count in COUNTED.items()
                }
        self._before = seen
        return found


def _slope(old: Any, new: Any, seconds: float) -> float:
    if not isinstance(old, int | float) or not isinstance(new, int | float) or seconds <= 0:
        return 0.0
    return round(max(0.0, (new - old) / seconds), 2)


@dataclass(slots=True)
class Picture:
    """One look. failure: why the database was not read this time; ``found`` is then as of ``read_at`` (Unix time)."""

    found: ClusterStatus | None = None
    instances: Sequence[Instance] = ()
    rates: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    failure: str | None = None
    read_at: float | None = None


class Watch:
    """Looks at the cluster. process: only this one is shown, None: all."""

    def __init__(self, settings: Settings, process: str | None, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._settings = replace(
            settings, hints=False
        )  # it only reads, and it says itself what is away
        self._process = process
        self._rates = Rates()
        self._last = Picture()
        self._client: Client | None = None

    async def run(self, every: float, *, as_json: bool) -> None:
        """Until cancelled. every: seconds from one look to the next."""
        screen = console()
        live = (
            Live(console=screen, auto_refresh=False) if screen.is_terminal and not as_json else None
        )
        try:
            async with httpx.AsyncClient(timeout=ANSWER_WITHIN, trust_env=False) as http:
                if live is not None:
                    live.start()
                while True:
                    began = self._clock.monotonic()
                    picture = await self.look(http)
                    if as_json:
                        _print(json.dumps(self.as_json(picture), ensure_ascii=False, default=str))
                    elif live is not None:
                        live.update(self.drawn(picture), refresh=True)
                    else:
                        with screen.capture() as text:
                            screen.print(self.drawn(picture))
                        _print(text.get())
                    await asyncio.sleep(max(0.0, every - (self._clock.monotonic() - began)))
        finally:
            if live is not None:
                live.stop()
            await self._close()

    async def look(self, http: httpx.AsyncClient) -> Picture:
        """Read the database and ask the runners. Raises `SchemaError`: waiting would not cure it."""
        picture = Picture(self._last.found, read_at=self._last.read_at)
        try:
            picture.found = await self._read()
            picture.read_at = self._clock.now()
        except SchemaError:
            raise
        except (PerdureError, OSError) as error:
            picture.failure = hide_credentials(str(error) or type(error).__name__)
        runners = picture.found.runners if picture.found is not None else ()
        picture.instances = await ask_runners(runners, http)
        picture.rates = self._rates.since(picture.instances, self._clock.monotonic())
        self._last = picture
        return picture

    async def _read(self) -> ClusterStatus:
        if self._client is None:
            client = Client(self._settings)
            try:
                await client.__aenter__()
            except BaseException:
                await client.__aexit__(None, None, None)
                raise
            self._client = client
        return await self._client.cluster()

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    def _shown(self, picture: Picture) -> list[Instance]:
        return [each for each in picture.instances if each.listed and each.named(self._process)]

    # -- what is shown
    def as_json(self, picture: Picture) -> dict[str, Any]:
        """One look as one object: as `cluster status` prints it, with rates; ``error`` while the database is away."""
        said: dict[str, Any] = {"error": picture.failure, "read_at": picture.read_at}
        if picture.found is None:
            return said
        shown = self._shown(picture)
        said |= status_json(picture.found, picture.instances, shown)
        for line, each in zip(said["runners"], shown, strict=True):
            line["live"] = None if each.live is None else plain(dict(each.live))
            line["rates"] = picture.rates.get(each.runner.runner_id)
        return said

    def drawn(self, picture: Picture) -> Group:
        """One look as a table and two lines."""
        if picture.found is None:
            return Group(Text(f"the database does not answer: {picture.failure}", style="bold red"))
        rows = [_row(each, picture) for each in self._shown(picture)]
        lines = [Text(footer(picture.found, picture.instances))]
        at = instant(picture.read_at)
        if picture.failure is None:
            lines.append(
                Text(f"{at} · {active(picture.instances)} pods · Ctrl-C ends", style="dim")
            )
        else:
            old = (
                f"the database does not answer ({picture.failure}); shards and runs are as of {at}"
            )
            lines.append(Text(old, style="bold red"))
        return Group(table(HEADINGS, rows, fold=False), *lines)


def _row(each: Instance, picture: Picture) -> Sequence[object]:
    rates: Mapping[str, Any] = picture.rates.get(each.runner.runner_id, {})
    live: Mapping[str, Any] = each.live or {}
    slots = (
        f"{live['slots_taken']}/{live['slots']}" if {"slots_taken", "slots"} <= set(live) else "?"
    )
    return (
        each.runner.replica_id,
        each.state,
        each.runner.shards,
        rates.get("runs_per_second", "?"),
        rates.get("steps_per_second", "?"),
        slots,
        live.get("runs_in_memory", "?"),
        _milliseconds(live.get("loop_lag")),
        _milliseconds(live.get("due_waiting")),
        span(each.lease_age) or "no lease",
    )


def _milliseconds(seconds: Any) -> str:
    return f"{seconds * 1000:.0f} ms" if isinstance(seconds, int | float) else "?"


def _print(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()
