"""One trace from the process that starts a run through the steps on each pod that had it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pods import ROOT, Pods
from tests.harness.waiting import until
from tests.integration.apps.traced import GATE, SPANS
from tests.integration.in_process import client_on


@pytest.mark.req("DB7", "WF12", "WF15")
async def test_a_run_that_is_taken_over_goes_on_in_its_trace(
    migrated_postgres_url: str, tmp_path: Path
) -> None:
    url, spans, gate = migrated_postgres_url, tmp_path / "spans", tmp_path / "gate"
    files = {SPANS: str(spans), GATE: str(gate)}
    settings = {"PERDURE_LEASE": "1", "PERDURE_SCAN": "0.4", **files}

    def seen(name: str) -> list[dict[str, Any]]:
        lines = spans.read_text().splitlines() if spans.exists() else []
        return [s for s in map(json.loads, lines) if s["name"] == name]

    with Pods("tests.integration.apps.traced:app", url, tmp_path, env=settings) as pods:
        killed = await pods.ready()
        run_id = await start_elsewhere(url, files)
        await until(lambda: seen("step weigh"), what="the first step's span")
        async with client_on(url, []) as client:

            async def recorded() -> bool:
                return len(await client.journal(run_id)) == 1

            await until(recorded, what="the first step's entry")
            survivor = await pods.ready()
            killed.kill()
            gate.touch()
            assert await client.wait(run_id, timeout=20) == 3
        await until(lambda: seen("run traced.parcel"), what="the run's span")
        metrics = (await survivor.http("/metrics")) or (0, "")
        survivor.terminate()
        await survivor.wait_end()

    [request], [start] = seen("request"), seen("start traced.parcel")
    [weigh], [scales], [carry], [run] = map(
        seen, ("step weigh", "scales", "step carry", "run traced.parcel")
    )
    assert {s["trace"] for s in (request, start, weigh, scales, carry, run)} == {request["trace"]}
    assert start["parent"] == request["id"]
    # The killed pod's run span died with it; the step that had ended there was not executed again.
    assert weigh["pid"] == killed.pid
    assert scales["parent"] == weigh["id"], "what the blocking step's thread traces lies below it"
    assert run["pid"] == carry["pid"] == survivor.pid
    assert run["parent"] == start["id"]
    assert carry["parent"] == run["id"]
    assert weigh["parent"] not in (None, run["id"], start["id"])
    assert run["attributes"].items() >= {"perdure.run_id": run_id, "perdure.replayed": 1}.items()
    assert run["attributes"]["perdure.runner"] == survivor.name
    assert (
        'perdure_workflow_runs_total{workflow="traced.parcel",status="succeeded"} 1' in metrics[1]
    )
    assert "perdure_replayed_entries_total 1\n" in metrics[1]


async def start_elsewhere(url: str, files: dict[str, str]) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.apps.traced", url),
        env=os.environ | {"PYTHONPATH": paths} | files,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()
