"""One life of a workflow: the real context over the real body, without storage. Time jumps to what is waited for."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from perdure.runtime.authoring.codec import encode_message
from perdure.runtime.authoring.context import Context, RunFacts
from perdure.runtime.authoring.current import StepInfo, entering_step
from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.failures import encode_failure
from perdure.runtime.authoring.step import StepTarget
from perdure.runtime.body import Body, Ending, StepCall
from perdure.storage.model import Entry, Message, MessageKind, RunEvent

ENTERED = 1_700_000_000.0


class Life:
    """Implements the body's port on the running event loop. What is recorded is durable at the next quiescence.

    facts: overrides of the run's facts. journal: of earlier lives.
    """

    def __init__(
        self,
        definition: WorkflowDefinition[Any, Any],
        payload: Any = None,
        *,
        journal: Sequence[Entry] = (),
        messages: Sequence[Message] = (),
        **facts: Any,
    ) -> None:
        self.definition = definition
        self.payload = definition.encode_payload(payload)
        self.entries = list(journal)
        self.events: list[RunEvent] = []
        self.executed: list[str] = []
        self.messages = list(messages)
        self.facts = RunFacts(**(KNOWN_FACTS | {"workflow": definition.name} | facts))
        self.context: Context | None = None
        self._jumped = 0.0
        self._began = time.monotonic()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.body = Body(
            host=asyncio.get_running_loop(),
            main=self._main,
            entered_at=ENTERED,
            journal=list(journal),
            clock=self.now,
            port=self,
            name=self.facts.run_id,
        )

    def now(self) -> float:
        return ENTERED + self._jumped + time.monotonic() - self._began

    def _main(self, body: Body) -> Coroutine[Any, Any, Any]:
        self.context = Context(body, self.facts)
        return self.definition.call(self.context, self.definition.decode_payload(self.payload))

    async def ends(self) -> Ending:
        """How the body ends; TimeoutError after 20 s of real time."""
        self.body.mail(self.messages, self.now())
        self.body.begin()
        async with asyncio.timeout(20):
            return await self._ending

    async def result(self) -> Any:
        ending = await self.ends()
        if ending.error is not None:
            raise ending.error
        return ending.value

    # -- BodyPort
    def recorded(self, entry: Entry, message_id: str | None) -> None:
        self.entries.append(entry)
        self.messages = [m for m in self.messages if m.message_id != message_id]

    def event(self, event: RunEvent) -> None:
        self.events.append(event)

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        info = StepInfo(self.facts.run_id, key, call.name, attempt)
        self._tasks[key] = asyncio.get_running_loop().create_task(
            self._execute(info, call.target), context=context
        )

    async def _execute(self, info: StepInfo, target: StepTarget) -> None:
        self.executed.append(info.key)
        output = error = None
        started_at = self.now()
        try:
            args, kwargs = target.arguments()
            with entering_step(info):
                if target.definition.is_blocking:
                    value = await asyncio.to_thread(target.definition, *args, **kwargs)
                else:
                    value = await target.definition(*args, **kwargs)
            output = target.definition.encode_output(value)
        except Exception as failure:
            error = encode_failure(failure)
        self.body.step_done(
            info.key, attempt=info.attempt, output=output, error=error, started_at=started_at
        )

    def abandon_step(self, key: str) -> None:
        self._tasks[key].cancel()

    def want_mail(self) -> None:
        asyncio.get_running_loop().call_soon(lambda: self.body.mail(self.messages, self.now()))

    def quiescent(self) -> None:
        self.body.committed(len(self.entries))
        idle = self.body.idle()
        if idle is not None and idle.wake_at is not None:
            self._jumped += max(0.0, idle.wake_at - self.now())
            self.body.kick()

    def ended(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)


KNOWN_FACTS: dict[str, Any] = {
    "run_id": "run-1",
    "version": 1,
    "attempt": 1,
    "created_at": ENTERED - 5,
    "seed": 42,
}


def message(name: str, payload: Any, *, number: int = 1, sent_at: float = ENTERED) -> Message:
    """A stored signal."""
    body = encode_message(payload, name)
    kind = MessageKind.SIGNAL
    return Message("run-1", f"m{number}", kind, name, body, wake_seq=number, sent_at=sent_at)


def cancel(*, number: int = 1) -> Message:
    """A stored request to cancel."""
    return Message("run-1", f"m{number}", MessageKind.CANCEL, wake_seq=number, sent_at=ENTERED)
