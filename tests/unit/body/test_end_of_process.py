"""A body that swallows everything, also its own closing, does not keep the process from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, gc
from perdure.runtime.body import Body

class Port:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None

async def host():
    async def main(body):
        while True:
            try:
                await body.sleep(1000)
            except BaseException:
                pass

    body = Body(host=asyncio.get_running_loop(), main=main, entered_at=0.0, journal=(),
                clock=lambda: 1.0, port=Port(), name="r")
    body.begin()
    while body.idle() is None:
        await asyncio.sleep(0)
    print(body.unwind(), flush=True)

    async def step():  # a step that was given the context of a run that is out of memory
        await body.sleep(1)

    task = asyncio.create_task(step())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    print(task.cancelled(), flush=True)

asyncio.run(host())
gc.collect()
print("over", flush=True)
"""


@pytest.mark.req("WF5")
def test_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.splitlines() == ["['body']", "True", "over"]
    assert done.returncode == 0
