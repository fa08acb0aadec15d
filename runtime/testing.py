"""Running workflows in process, for the tests of an application.

    async def test_fulfil(run_workflow):
        assert await run_workflow(fulfil, Order(id=1)) == Shipment(...)

The fixture comes with the package (a pytest plugin); `running` is the same as a context manager, with a client for
signals, cancels and a look at the journal. Everything is real but the disk: a database in memory, a runner, no port.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from perdure.runtime.app import App
from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.client import Client
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings

RunWorkflow = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def running(
    workflows: App | Sequence[WorkflowDefinition[Any, Any]], **settings: Any
) -> AsyncIterator[Client]:
    """A runner in this process over a database in memory; yields its client.

    workflows: an `App` or definitions. settings: any of `Settings`, e.g. ``park_after=0.05``.
    """
    app = workflows if isinstance(workflows, App) else App("test", workflows=workflows)
    runner = Runner(app, Settings(db="sqlite:///:memory:", **settings), port=False)
    await runner.start()
    try:
        yield runner.client
    finally:
        await runner.stop()


def _run_workflow() -> RunWorkflow:
    """``await run_workflow(workflow, payload)``: the result, or the run's error raised. ``timeout``: seconds, 30."""

    async def run(
        workflow: WorkflowDefinition[Any, Any],
        payload: Any = None,
        *,
        timeout: float = 30.0,
        **settings: Any,
    ) -> Any:
        async with running([workflow], **settings) as client:
            return await client.run(workflow, payload, timeout=timeout)

    return run


try:
    import pytest
except ModuleNotFoundError:  # `running` serves without it, in a notebook say
    run_workflow = _run_workflow
else:
    run_workflow = pytest.fixture(name="run_workflow")(_run_workflow)
