"""Group commit: what gathers, when it leaves, how large it gets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from perdure.runtime.engine.group import BATCH_BYTES, BATCH_ITEMS, GroupCommit


class Recorder:
    """A flush that can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def flush(self, batch: list[int]) -> None:
        self.batches.append(batch)
        self.entered.set()
        await self.gate.wait()


async def serve(group: GroupCommit[int]) -> asyncio.Task[None]:
    task = asyncio.create_task(group.run())
    await asyncio.sleep(0)
    return task


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_one_alone_leaves_at_once_and_the_rest_gathers_meanwhile() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    group: GroupCommit[int] = GroupCommit(recorder.flush, size=lambda item: 1)
    task = await serve(group)
    group.add(1)
    await recorder.entered.wait()
    for item in (2, 3, 4):
        group.add(item)
    recorder.gate.set()
    await group.drained()
    assert recorder.batches == [[1], [2, 3, 4]]
    await stop(task)


async def test_a_batch_ends_at_its_limits() -> None:
    recorder = Recorder()
    group: GroupCommit[int] = GroupCommit(recorder.flush, size=lambda item: item)
    for _ in range(BATCH_ITEMS + 1):
        group.add(1)
    for item in (BATCH_BYTES, BATCH_BYTES + 5, 10):
        group.add(item)
    task = await serve(group)
    await group.drained()
    assert [len(b) for b in recorder.batches] == [BATCH_ITEMS, 1, 1, 1, 1]
    await stop(task)
