"""What a start gives back: a run by its id, to wait for, look at and act on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.views import RunInfo

if TYPE_CHECKING:
    from perdure.runtime.client import Client

Out = TypeVar("Out")


class Handle(Generic[Out]):
    """A run somebody started. ``status`` says what the *start* did and never changes.

    status: "running" (this start made it, or it is live), "replayed" (it had ended before: wait() gives the old
    result or raises the old error).
    """

    def __init__(
        self,
        client: Client,
        run_id: str,
        status: str,
        workflow: WorkflowDefinition[Any, Out] | None,
        *,
        known: bool = True,
    ) -> None:
        self._known = known
        self._client = client
        self._workflow = workflow
        self.run_id = run_id
        self.status = status

    async def wait(self, timeout: float | None = None) -> Out:
        """The result, in the workflow's type. Raises the recorded error, `RunCancelled`, or TimeoutError after
        ``timeout`` seconds (the run goes on)."""
        record = await self._client.ended(self.run_id, timeout, known=self._known)
        return await self._client.outcome(record, self._workflow)  # type: ignore[no-any-return]

    async def poll(self) -> RunInfo | None:
        """How it stands now; None for an id nobody has."""
        return await self._client.get(self.run_id)

    async def signal(self, name: str, payload: Any = None, *, id: str | None = None) -> None:
        await self._client.signal(self.run_id, name, payload, id=id)

    async def cancel(self, reason: str | None = None) -> None:
        await self._client.cancel(self.run_id, reason)

    async def suspend(self, reason: str | None = None) -> None:
        await self._client.suspend(self.run_id, reason)

    async def resume(self) -> None:
        await self._client.resume(self.run_id)

    def __repr__(self) -> str:
        return f"Handle(run_id={self.run_id!r}, status={self.status!r})"
