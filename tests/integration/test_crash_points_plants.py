"""Mistakes planted to show that the tests of crash points would notice them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perdure.storage.postgres import runs
from perdure.storage.postgres.runs import PostgresRunStore
from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import DeadlineExceededError
from tests.integration.apps.take_over_once import take_over_once
from tests.integration.crash_campaign import Campaign, Point
from tests.integration.crash_ground import ground_on, lost_start, runner_loses

pytestmark = pytest.mark.req("CL4", "CL5")


@pytest.mark.parametrize("event", ["claim", "wake"])
async def test_a_take_over_scan_that_looks_only_once(
    postgres: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """A claim whose answer was lost is a run of mine that I do not know of: only that scan finds it."""
    monkeypatch.setattr(PostgresRunStore, "claim_runs", take_over_once(PostgresRunStore.claim_runs))
    async with ground_on(postgres, tmp_path) as ground:
        with pytest.raises((DeadlineExceededError, TimeoutError)):
            await runner_loses(ground, event, "answer", deadline=2.0)


@pytest.mark.slow
async def test_a_survivor_that_takes_over_only_once(
    postgres: PrivatePostgres, tmp_path: Path
) -> None:
    """A pod that dies once the survivor has looked for orphans takes its run with it."""
    point: Point = ("claim", "answer")
    with audited_database(postgres) as url:
        serve = ("-m", "tests.integration.apps.take_over_once")
        async with Campaign(url, postgres.port, tmp_path, [point], serve=serve) as campaign:
            with pytest.raises((DeadlineExceededError, TimeoutError)):
                await campaign.result(point, deadline=8.0)


async def test_a_lost_insert_that_is_not_adopted(
    postgres: PrivatePostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeat takes its own row for somebody else's."""
    outcome_of = runs._start_outcome

    def not_mine(*args: object) -> object:
        outcome = outcome_of(*args)  # type: ignore[arg-type]
        run, created = args[0], args[1]
        return replace(outcome, created=run.run_id in created)  # type: ignore[attr-defined, operator]

    monkeypatch.setattr(runs, "_start_outcome", not_mine)
    async with ground_on(postgres, tmp_path) as ground:
        with pytest.raises(AssertionError, match="this very start made the run"):
            await lost_start(ground)
