"""What each number is called: one list, read by /metrics of the runner port and by OpenTelemetry's meters.

Nothing here is on the hot path: numbers are read when somebody asks for them. Distributions alone are also handed to
OpenTelemetry one by one, once a statement, and only where a meter provider is set up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from perdure.runtime.telemetry.tally import Distribution, Tally


@dataclass(frozen=True, slots=True)
class Readings:
    """What stands in a runner at this moment. Times in seconds.

    due_waiting: for how long it has known of due runs that it could not claim. loop_lag: how long its main loop last
    took to answer. clock_offset: the database's clock − this machine's.
    """

    slots: int = 0
    slots_taken: int = 0
    runs_in_memory: int = 0
    shards: int = 0
    due_waiting: float = 0.0
    loop_lag: float = 0.0
    clock_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What the numbers are read from."""

    tally: Tally
    now: Readings


Points = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One number, or one per combination of ``labels``. counter: it only grows. unit: "s" or ""."""

    name: str
    help: str
    read: Callable[[Scene], Points]
    counter: bool = True
    unit: str = ""
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        name = self.name.replace(".", "_")
        return name + ("_seconds" if self.unit else "") + ("_total" if self.counter else "")


def _one(read: Callable[[Scene], float]) -> Callable[[Scene], Points]:
    return lambda scene: [((), read(scene))]


def _counter(name: str, help: str, read: Callable[[Tally], float]) -> Instrument:
    return Instrument(name, help, _one(lambda scene: read(scene.tally)))


def _gauge(name: str, help: str, read: Callable[[Readings], float], unit: str = "") -> Instrument:
    return Instrument(name, help, _one(lambda scene: read(scene.now)), counter=False, unit=unit)


INSTRUMENTS = (
    Instrument(
        "perdure.workflow.runs.started",
        "Runs that starts of this process have made.",
        lambda scene: [((name,), n) for name, n in list(scene.tally.started.items())],
        labels=("workflow",),
    ),
    Instrument(
        "perdure.workflow.runs",
        "Runs that have ended here.",
        lambda scene: list(scene.tally.ended.items()),
        labels=("workflow", "status"),
    ),
    Instrument(
        "perdure.workflow.last.success.timestamp",
        "When a run last succeeded here, in Unix time.",
        lambda scene: [((name,), at) for name, at in list(scene.tally.last_success.items())],
        counter=False,
        unit="s",
        labels=("workflow",),
    ),
    _counter("perdure.step.attempts", "Attempts of steps.", lambda t: t.attempts),
    _counter("perdure.step.attempts.failed", "Those that failed.", lambda t: t.attempts_failed),
    _counter("perdure.claims", "Statements that asked for due runs.", lambda t: t.claims),
    _counter("perdure.claimed.runs", "Runs that claims brought.", lambda t: t.claimed),
    _counter("perdure.entered.runs", "Bodies begun, new and resumed.", lambda t: t.entered),
    _counter("perdure.replayed.entries", "Journal entries replayed.", lambda t: t.replayed),
    _counter("perdure.parked.runs", "Runs that left memory to wait.", lambda t: t.parked),
    _counter("perdure.parks.refused", "Parks refused, mail had come.", lambda t: t.parks_refused),
    _counter("perdure.fenced.writes", "Writes refused: another has the run.", lambda t: t.fenced),
    _counter("perdure.reloaded.runs", "Runs that had to be loaded anew.", lambda t: t.reloaded),
    _counter(
        "perdure.set.aside.writes", "Writes sent again: a row was locked.", lambda t: t.set_aside
    ),
    _counter("perdure.unknown.outcomes", "Statements whose answer was lost.", lambda t: t.unknown),
    _counter("perdure.hints.sent", "Hints sent over HTTP.", lambda t: t.hints_sent),
    _counter(
        "perdure.hints.dropped", "Hints a pod was too far away for.", lambda t: t.hints_dropped
    ),
    _counter("perdure.hints.heard", "Hints that came over HTTP.", lambda t: t.hints_heard),
    _counter("perdure.hints.refused", "Posts with a wrong signature.", lambda t: t.hints_refused),
    _gauge("perdure.slots", "Runs that may be at work at once.", lambda r: r.slots),
    _gauge("perdure.slots.taken", "Runs at work.", lambda r: r.slots_taken),
    _gauge("perdure.memory.runs", "Runs in memory.", lambda r: r.runs_in_memory),
    _gauge("perdure.shards", "Shards held.", lambda r: r.shards),
    _gauge(
        "perdure.due.waiting", "How long due runs have waited here.", lambda r: r.due_waiting, "s"
    ),
    _gauge("perdure.loop.lag", "How long the main loop took to answer.", lambda r: r.loop_lag, "s"),
    _gauge("perdure.clock.offset", "The database's clock − ours.", lambda r: r.clock_offset, "s"),
)

DISTRIBUTIONS: Mapping[str, tuple[str, str, Callable[[Tally], Distribution]]] = {
    "perdure.commit.duration": ("s", "How long commits take.", lambda t: t.commit_seconds),
    "perdure.commit.runs": ("", "How many runs share a commit.", lambda t: t.commit_runs),
    "perdure.claim.duration": ("s", "How long claims take.", lambda t: t.claim_seconds),
}
"""name → unit, help, where it is kept."""


# ---- Prometheus -------------------------------------------------------------------------------


def exposition(scene: Scene) -> str:
    """Everything in Prometheus' text form, version 0.0.4."""
    return "\n".join(_lines(scene)) + "\n"


def _lines(scene: Scene) -> Iterator[str]:
    for each in INSTRUMENTS:
        name = each.prometheus
        yield f"# HELP {name} {each.help}"
        yield f"# TYPE {name} {'counter' if each.counter else 'gauge'}"
        for values, number in each.read(scene):
            yield f"{name}{_labels(each.labels, values)} {number:.15g}"
    for otel_name, (unit, text, kept) in DISTRIBUTIONS.items():
        name = otel_name.replace(".", "_") + ("_seconds" if unit else "")
        spread = kept(scene.tally)
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*spread.bounds, "+Inf"), list(spread.counts), strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {spread.sum:.9g}"
        yield f"{name}_count {total}"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---- OpenTelemetry ----------------------------------------------------------------------------


def publish(scene: Callable[[], Scene | None], tally: Tally) -> bool:
    """Let OpenTelemetry read the numbers, if a meter provider is set up now. One runner of a process does it.

    scene: None once there is nothing to read any more.
    """
    api = sys.modules.get("opentelemetry.metrics")
    if api is None:
        return False
    provider = api.get_meter_provider()
    # The API's own classes stand for "nothing is set up".
    if type(provider).__module__.startswith("opentelemetry.metrics"):
        return False
    from opentelemetry.metrics import CallbackOptions, Observation

    meter = provider.get_meter("perdure")

    def reader(each: Instrument) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            seen = scene()
            if seen is None:
                return []
            return [
                Observation(number, dict(zip(each.labels, values, strict=True)))
                for values, number in each.read(seen)
            ]

        return read

    for each in INSTRUMENTS:
        make = meter.create_observable_counter if each.counter else meter.create_observable_gauge
        make(each.name, callbacks=[reader(each)], unit=each.unit, description=each.help)
    for name, (unit, text, kept) in DISTRIBUTIONS.items():
        kept(tally).mirror = meter.create_histogram(name, unit=unit, description=text).record
    return True
