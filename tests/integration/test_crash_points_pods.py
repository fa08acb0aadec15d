"""PostgreSQL: a pod is killed right before or right after a statement of a run's life; another pod goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.harness.fixtures import audited_database
from tests.harness.postgres import PrivatePostgres
from tests.harness.proxy import HangWhere
from tests.integration.crash_campaign import Campaign, Point
from tests.integration.crash_world import MOMENTS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.req("CL4", "CL5")]

WHERE: Sequence[HangWhere] = ("before", "answer")
POINTS: list[Point] = [(event, where) for event in MOMENTS for where in WHERE]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["advisory", pytest.param("row", marks=pytest.mark.slow)],
)
async def campaign(
    request: pytest.FixtureRequest,
    postgres: PrivatePostgres,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Campaign]:
    chosen: list[Any] = [
        (item.callspec.params["event"], item.callspec.params["where"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_a_pod_is_killed
        and item.callspec.params["campaign"] == request.param
    ]
    folder = tmp_path_factory.mktemp("pods")
    with audited_database(postgres) as url:
        async with Campaign(url, postgres.port, folder, chosen, shard_lock=request.param) as made:
            yield made


@pytest.mark.parametrize(("event", "where"), POINTS)
async def test_a_pod_is_killed(campaign: Campaign, event: str, where: HangWhere) -> None:
    await campaign.result((event, where))
