"""Code that blocks the main loop of its pod is named, by its run and its line, while it does so."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from perdure import Context, step, workflow
from perdure.runtime.occupant import occupant
from perdure.testing import running

stop = threading.Event()


def spin() -> None:
    while not stop.is_set():
        time.sleep(0.001)


@workflow
async def blocking_body(ctx: Context) -> None:
    spin()


@step
async def blocking_step() -> None:
    spin()


@workflow
async def with_blocking_step(ctx: Context) -> None:
    await ctx.step(blocking_step)


@pytest.mark.req("DB7")
@pytest.mark.parametrize(
    ("blocking", "whose"),
    [(blocking_body, "the body of run r1"), (with_blocking_step, "step blocking_step of run r1")],
    ids=["body", "step"],
)
async def test_who_blocks_the_loop_is_named(blocking: Any, whose: str) -> None:
    stop.clear()
    main, seen = threading.get_ident(), list[str | None]()

    def look() -> None:
        deadline = time.monotonic() + 10
        while not stop.is_set() and time.monotonic() < deadline:
            if (found := occupant(main)) is not None and "spin" in found:
                seen.append(found)
                break
            time.sleep(0.005)
        stop.set()

    async with running([blocking_body, with_blocking_step]) as client:
        threading.Thread(target=look, daemon=True).start()
        handle = await client.start(blocking, run_id="r1")
        await handle.wait(15)
    assert seen
    assert seen[0] is not None
    assert seen[0].startswith(f"{whose}, at spin (test_occupant.py:")
