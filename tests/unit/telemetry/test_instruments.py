"""The numbers of a pod under their names: Prometheus' text and OpenTelemetry's meters read the same list."""

import re
from collections.abc import Iterator

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from perdure.runtime.telemetry.instruments import (
    DISTRIBUTIONS,
    INSTRUMENTS,
    Readings,
    Scene,
    exposition,
    publish,
)
from perdure.runtime.telemetry.tally import Distribution, Tally
from perdure.storage.model import RunStatus

pytestmark = pytest.mark.req("DB7")
SAMPLE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\]|\\.)*",?)+\})? (\S+)')


def some_scene() -> Scene:
    tally = Tally()
    tally.end('say "hi"\\now\n', RunStatus.SUCCEEDED, 1_700_000_000.5)
    tally.end("plain", RunStatus.FAILED, 1.0)
    tally.started["plain"] += 2
    tally.attempts = 7
    for seconds in (0.0005, 0.001, 0.02, 9.0):
        tally.commit_seconds.add(seconds)
    return Scene(tally, Readings(slots=200, slots_taken=3, loop_lag=0.25, clock_offset=-1.5))


def test_the_text_form() -> None:
    text = exposition(some_scene())
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            found = SAMPLE.fullmatch(line)
            assert found, line
            samples[found[1] + (found[2] or "")] = float(found[3])
    assert samples['perdure_workflow_runs_total{workflow="plain",status="failed"}'] == 1
    quoted = r'{workflow="say \"hi\"\\now\n",status="succeeded"}'
    assert samples[f"perdure_workflow_runs_total{quoted}"] == 1
    last = 'perdure_workflow_last_success_timestamp_seconds{workflow="say \\"hi\\"\\\\now\\n"}'
    assert samples[last] == 1_700_000_000.5
    assert samples["perdure_step_attempts_total"] == 7
    assert samples["perdure_loop_lag_seconds"] == 0.25
    assert samples["perdure_clock_offset_seconds"] == -1.5
    buckets = [
        n
        for name, n in samples.items()
        if name.startswith("perdure_commit_duration_sec") and "le=" in name
    ]
    assert buckets == sorted(buckets)
    assert buckets[:2] == [2, 2], "a value on a bound is below it"
    assert samples['perdure_commit_duration_seconds_bucket{le="+Inf"}'] == 4
    assert samples["perdure_commit_duration_seconds_count"] == 4
    assert samples["perdure_commit_duration_seconds_sum"] == pytest.approx(9.0215)
    for each in INSTRUMENTS:
        kind = "counter" if each.counter else "gauge"
        assert f"# TYPE {each.prometheus} {kind}\n" in text


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    kept = InMemoryMetricReader()
    provider = MeterProvider([kept])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    yield kept
    provider.shutdown()


def test_open_telemetry_reads_the_same_numbers(reader: InMemoryMetricReader) -> None:
    scene = some_scene()
    assert publish(lambda: scene, scene.tally)
    scene.tally.commit_seconds.add(0.5)
    scene.tally.claim_seconds.add(0.1)
    scene.tally.commit_runs.add(20)
    data = reader.get_metrics_data()
    assert data is not None
    [found] = [m for r in data.resource_metrics for m in r.scope_metrics]
    by_name = {metric.name: metric for metric in found.metrics}
    filled = {each.name for each in INSTRUMENTS}
    assert set(by_name) == filled | set(DISTRIBUTIONS)
    points = {
        tuple((p.attributes or {}).values()): p.value  # type: ignore[union-attr]
        for p in by_name["perdure.workflow.runs"].data.data_points
    }
    assert points == {("plain", "failed"): 1, ('say "hi"\\now\n', "succeeded"): 1}
    assert [p.sum for p in by_name["perdure.commit.duration"].data.data_points] == [0.5]  # type: ignore[union-attr]


def test_without_a_meter_provider_nothing_is_asked_for() -> None:
    tally = Tally()

    def never() -> Scene:
        raise AssertionError("read for nobody")

    assert not publish(never, tally)
    assert tally.commit_seconds.mirror is None


def test_a_distribution_counts_each_value_once() -> None:
    spread = Distribution((1, 2))
    for value in (0, 1, 1.5, 2, 3):
        spread.add(value)
    assert (spread.counts, spread.count, spread.sum) == ([2, 2, 1], 5, 7.5)
