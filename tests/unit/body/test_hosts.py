"""Bodies on real host loops: asyncio's, the same in debug mode, uvloop; with real tasks and real time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from perdure.runtime.body import Body, Ending, RefusedInBody, StepCall
from perdure.storage.model import Entry, RunEvent
from tests.unit.body.driving import Work, call_of

HOSTS: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], bool]] = {
    "asyncio": (asyncio.new_event_loop, False),
    "asyncio, debug": (asyncio.new_event_loop, True),
    "uvloop": (uvloop.new_event_loop, False),
}


class RealPort:
    """Steps are tasks of the host that take a few milliseconds; writes are durable at the next turn."""

    def __init__(self, host: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.entries: list[Entry] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.over: asyncio.Future[Ending] = host.create_future()
        self.body: Body

    def recorded(self, entry: Entry, message_id: str | None) -> None:
        self.entries.append(entry)

    def event(self, event: RunEvent) -> None:
        return None

    def start_step(
        self, key: str, call: StepCall, attempt: int, context: contextvars.Context
    ) -> None:
        self.tasks[key] = self.host.create_task(self._run(key, call), context=context)

    async def _run(self, key: str, call: StepCall) -> None:
        assert asyncio.get_running_loop() is self.host
        await asyncio.sleep(call.target.seconds)
        self.body.step_done(
            key, attempt=1, output=f"r({call.target.tag})", error=None, started_at=0
        )

    def abandon_step(self, key: str) -> None:
        self.tasks[key].cancel()

    def want_mail(self) -> None:
        self.body.mail([], time.time())

    def quiescent(self) -> None:
        self.host.call_soon(self.body.committed, len(self.entries))

    def ended(self, ending: Ending) -> None:
        self.over.set_result(ending)


async def live(main: Callable[[Body], Any]) -> tuple[Ending, RealPort]:
    port = RealPort(asyncio.get_running_loop())
    port.body = Body(
        host=port.host,
        main=main,
        entered_at=time.time(),
        journal=(),
        clock=time.time,
        port=port,
        name="run-1",
    )
    port.body.begin()
    async with asyncio.timeout(20):
        return await port.over, port


def step(body: Body, tag: str, seconds: float = 0.005) -> Any:
    return body.step(call_of("step", Work(tag, seconds=seconds)))


@pytest.mark.req("WF6", "SL1")
@pytest.mark.parametrize("host", HOSTS)
def test_a_body_on_a_real_loop(host: str) -> None:
    async def main(body: Body) -> Any:
        both: list[Any] = [*await asyncio.gather(step(body, "a"), step(body, "b"))]
        try:
            async with asyncio.timeout(0.02):
                await step(body, "slow", 1000)
        except TimeoutError:
            both.append("timeout")
        await body.sleep(0.01)
        return both

    factory, debug = HOSTS[host]
    with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
        ending, port = runner.run(live(main))
    assert ending.value == ["r(a)", "r(b)", "timeout"]
    assert port.tasks["0/step#0"].cancelled()
    assert [entry.kind.value for entry in port.entries] == ["step", "step", "timer", "timer"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_thread_that_wakes_a_body_fails_its_run(host: str) -> None:
    refused: list[RefusedInBody] = []
    threads: list[threading.Thread] = []

    async def main(body: Body) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(future.set_result, 1)
            except RefusedInBody as error:
                refused.append(error)

        threads.append(threading.Thread(target=wake, daemon=True))
        threads[0].start()
        await future

    factory, debug = HOSTS[host]
    with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
        ending, _ = runner.run(live(main))
    threads[0].join(20)
    assert ending.kind == "raised"
    assert ending.error is refused[0]


@pytest.mark.parametrize("host", HOSTS)
def test_a_long_replay_lets_the_host_turn(host: str) -> None:
    """Bodies that never wait hold the host for one slice at a time."""
    turns = 0

    async def main(body: Body) -> None:
        deadline = time.perf_counter() + 0.1
        while time.perf_counter() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def beside() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def both() -> Ending:
        task = asyncio.create_task(beside())
        ending, _ = await live(main)
        task.cancel()
        return ending

    factory, debug = HOSTS[host]
    with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
        assert runner.run(both()).kind == "returned"
    assert turns > 5
