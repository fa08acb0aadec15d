"""An application whose steps fork."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time

from perdure import App, Context, step, workflow

FORK = multiprocessing.get_context("fork")


@step
def tells_a_worker_to_stop() -> int | None:
    """As `ProcessPoolExecutor` and many libraries do it; how the worker ended, None: it went on."""
    worker = FORK.Process(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()
    worker.join(5)
    code = worker.exitcode
    worker.kill()
    worker.join()
    return code


@step
def leaves_a_worker() -> int:
    """Its process id: it goes on when the pod has ended."""
    worker = FORK.Process(target=time.sleep, args=(60,))
    worker.start()
    assert worker.pid is not None
    return worker.pid


def _copy(way: str) -> None:
    """What the copy does after its own work."""
    print(f"copy {way}", flush=True)
    if way == "exits":
        sys.exit(7)
    if way == "says why":
        sys.exit("why")
    if way == "raises":
        raise ValueError("in the copy")


def _code(copy: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])


@step
async def forks_on_the_loop(way: str) -> int:
    copy = os.fork()
    if copy == 0:
        _copy(way)
        if way == "awaits":
            await asyncio.sleep(0)
            await asyncio.sleep(60)
        return -1
    return _code(copy)


@step
def forks_in_a_thread(way: str) -> int:
    copy = os.fork()
    if copy == 0:
        _copy(way)
        return -1
    return _code(copy)


@workflow(name="stops-a-worker")
async def stops_a_worker(ctx: Context) -> int | None:
    return await ctx.step(tells_a_worker_to_stop)


@workflow(name="left-behind")
async def left_behind(ctx: Context) -> int:
    return await ctx.step(leaves_a_worker)


@workflow(name="forks")
async def forks(ctx: Context, way: str) -> list[int]:
    return [await ctx.step(forks_on_the_loop, way), await ctx.step(forks_in_a_thread, way)]


app = App("forking", workflows=[stops_a_worker, left_behind, forks])
