"""Three pods fulfil orders, one of them is killed half-way, and every order is done all the same.

    python -m examples.orders.demo [--db sqlite|postgres] [--orders N]

The pods are real processes that share one database: a SQLite file, or a private PostgreSQL server. At the end the
executions of all steps (a side log outside the database) are laid beside the commits (a history kept by triggers):
each execution must be a committed one, an attempt that failed and was tried again, or one that the kill cut short.
Exit code 0: all orders done, everything explained.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.orders.app import Order, Shipment, fulfil
from examples.orders.audit import History, Verdict, judge
from examples.orders.postgres import private_postgres
from examples.orders.sidelog import VARIABLE, read_executions
from perdure import Client, ClusterStatus, RunStatus

ROOT = Path(__file__).parents[2]
PODS = ("pod-1", "pod-2", "pod-3")
VICTIM = "pod-2"
LEASE = 5
"""Seconds: how long the others believe a pod that they do not hear from."""
REFUSED = 9
"""Every ninth order is not approved."""
STEPS_SHIPPED, STEPS_REFUNDED = 4, 2
LONGEST = 120.0


class Failed(Exception):
    """The demo did not do what it shows; the message says what."""


class Pod:
    """One process running ``perdure serve``. ``lifeline``: the read end of a pipe; it stops when the pipe closes."""

    def __init__(self, name: str, url: str, folder: Path, lifeline: int) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        options = {
            "--db": url,
            "--runner-storage": "sql",
            "--lease": LEASE,
            "--runner-port": 0,
            "--replica-id": name,
            "--log-level": "warning",
            "--tied-to": lifeline,
        }
        words = [str(word) for option in options.items() for word in option]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                perdure("serve", "examples.orders.app:app", *words),
                cwd=ROOT,
                env=environment(folder),
                stdout=log,
                stderr=log,
                pass_fds=(lifeline,),
                start_new_session=True,  # a Ctrl-C is for the demo alone, which ends its pods
            )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=40)


def perdure(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perdure", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """Ours without settings that would reach into the demo, and with the place of the side log."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PERDURE_")}
    return {**kept, VARIABLE: str(folder / "executions.jsonl")}


class Demo:
    """One showing. Lines of progress go to ``console``; bars too where it is a terminal."""

    def __init__(self, url: str, folder: Path, orders: int, console: Console) -> None:
        self.url = url
        self.folder = folder
        self.console = console
        self.history = History(url)
        self.orders = [
            Order(id=f"A-{n:03}", customer=f"customer {n}", cents=100 * n)
            for n in range(1, orders + 1)
        ]
        refunded = orders // REFUSED
        self.steps = (orders - refunded) * STEPS_SHIPPED + refunded * STEPS_REFUNDED
        self.pods: dict[str, Pod] = {}
        self.lifeline, self._held = os.pipe()  # closed by the kernel, should this process be killed
        self.pids: dict[int, int] = {}
        """runner_id → process id, of every runner that was ever seen."""
        self.tasks: list[asyncio.Task[Shipment]] = []
        self.done = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(
            f"{time.monotonic() - self._began:5.1f} s  {text}", markup=False, soft_wrap=True
        )

    async def show(self) -> None:
        await self.command("migrate", "--db", self.url)
        await self.history.install()
        for name in PODS:
            self.pods[name] = Pod(name, self.url, self.folder, self.lifeline)
        async with Client(self.url, workflows=[fulfil]) as client:
            await self.wait_for(
                "three pods that share the shards", lambda: self._shared(client, PODS)
            )
            self.say("three pods are up")
            await self.command("cluster", "status", "--db", self.url)
            with self.progress():
                shipments = await self._half_way_and_on(client)
            await self.command("cluster", "status", "--db", self.url)
            await self._see_runners(client)
        self._check_shipments(shipments)
        survivors = [pod for name, pod in self.pods.items() if name != VICTIM]
        codes = await asyncio.gather(*(asyncio.to_thread(pod.stop) for pod in survivors))
        if any(codes):
            raise Failed(f"the pods that were stopped cleanly ended with exit codes {codes}")
        self._report(await self._verdict())

    async def _half_way_and_on(self, client: Client) -> Sequence[Shipment]:
        self.say(
            f"starting {len(self.orders)} orders ({self.steps} steps) and sending their approvals"
        )
        draw = random.Random(7)
        tasks = self.tasks = [
            asyncio.create_task(self._order(client, order, number, draw.uniform(0.2, 1.5)))
            for number, order in enumerate(self.orders, 1)
        ]
        try:
            await self.wait_for("half of the steps", lambda: self._half_way(client))
            self.pods[VICTIM].kill()
            killed_at = time.monotonic()
            self.say(f"killed {VICTIM} (SIGKILL, process {self.pods[VICTIM].process.pid})")
            others = [name for name in PODS if name != VICTIM]
            await self.wait_for("a take-over", lambda: self._shared(client, others))
            self.say(
                f"the others hold its shards {time.monotonic() - killed_at:.1f} s after the kill (lease {LEASE} s)"
            )
            await self.command("cluster", "status", "--db", self.url)
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _order(self, client: Client, order: Order, number: int, thinking: float) -> Shipment:
        await asyncio.sleep(number * 0.15)
        handle = await client.start(fulfil, order)
        await asyncio.sleep(thinking)
        await handle.signal("approval", {"approved": number % REFUSED != 0, "by": "the demo"})
        shipment = await handle.wait(LONGEST)
        self.done += 1
        return shipment

    async def _half_way(self, client: Client) -> bool:
        """Half of the steps are committed, and the pod to be killed has runs in its hands."""
        if await self.history.commits() < self.steps / 2:
            return False
        runs = await client.list(status=RunStatus.RUNNING, limit=len(self.orders))
        victim = self.pods[VICTIM].process.pid
        return any(self.pids.get(info.record.runner_id or 0) == victim for info in runs)

    async def _shared(self, client: Client, names: Sequence[str]) -> bool:
        """These pods are alive and hold all shards between them, none of them nothing."""
        self._still_running(names)
        status = await self._see_runners(client)
        shards = {
            runner.replica_id: runner.shards
            for runner in status.runners
            if runner.alive and runner.shards
        }
        return set(shards) == set(names) and sum(shards.values()) == status.shard_count

    async def _see_runners(self, client: Client) -> ClusterStatus:
        status = await client.cluster()
        self.pids |= {
            runner.runner_id: self.pods[runner.replica_id].process.pid for runner in status.runners
        }
        return status

    def _still_running(self, names: Sequence[str]) -> None:
        for name in names:
            code = self.pods[name].process.poll()
            if code is not None:
                raise Failed(
                    f"{name} ended with exit code {code}:\n{self.pods[name].log.read_text()[-3000:]}"
                )

    def _check_shipments(self, shipments: Sequence[Shipment]) -> None:
        for number, (order, shipment) in enumerate(zip(self.orders, shipments, strict=True), 1):
            expected = "refunded" if number % REFUSED == 0 else "shipped"
            if (shipment.order_id, shipment.status) != (order.id, expected):
                raise Failed(f"order {order.id} should be {expected}: {shipment}")
        self.say(f"all {len(shipments)} orders are done")

    async def _verdict(self) -> Verdict:
        executions = read_executions(self.folder / "executions.jsonl")
        return judge(
            await self.history.lines(), executions, self.pids, self.pods[VICTIM].process.pid
        )

    def _report(self, found: Verdict) -> None:
        self.say(
            f"steps committed {found.commits} (each once), executions of step functions {found.executions}:"
        )
        self.say(f"  {found.tried_again} attempts failed at the provider and were tried again")
        self.say(f"  {found.cut_by_kill} were cut short by the kill and executed again elsewhere")
        self.say(
            f"  {len(found.faults)} are not explained; runs taken over from {VICTIM}: {found.taken_over}"
        )
        for fault in found.faults:
            self.say(f"  fault: {fault}")
        if found.commits != self.steps:
            raise Failed(f"{found.commits} steps were committed, {self.steps} expected")
        if (
            found.executions != found.commits + found.tried_again + found.cut_by_kill
            or found.faults
        ):
            raise Failed("some executions are not explained by the kill")
        if not found.taken_over:
            raise Failed(f"{VICTIM} held no run when it was killed: nothing has been shown")

    async def wait_for(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + LONGEST
        while not await condition():
            for task in self.tasks:
                if task.done():
                    task.result()  # an order that failed ends the waiting
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {LONGEST:.0f} s")
            await asyncio.sleep(0.1)

    async def command(self, *arguments: str) -> None:
        """Run a command of perdure's and show it with its output."""
        self.say(f"$ perdure {' '.join(arguments)}")
        process = await asyncio.create_subprocess_exec(
            *perdure(*arguments),
            cwd=ROOT,
            env={**environment(self.folder), "COLUMNS": str(max(100, self.console.width))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        self.console.print(
            output.decode(errors="replace").rstrip(), highlight=False, markup=False, soft_wrap=True
        )
        if process.returncode:
            raise Failed(f"perdure {arguments[0]} ended with exit code {process.returncode}")

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Bars on a terminal, else a line every other second, until the block ends."""
        bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        orders = bars.add_task("orders done", total=len(self.orders))
        steps = bars.add_task("steps committed", total=self.steps)

        async def watch() -> None:
            shown = -1
            while True:
                commits = await self.history.commits()
                bars.update(orders, completed=self.done)
                bars.update(steps, completed=commits)
                if not self.console.is_terminal and commits != shown:
                    self.say(
                        f"steps committed {commits} of {self.steps}, orders done {self.done} of {len(self.orders)}"
                    )
                    shown = commits
                await asyncio.sleep(0.2 if self.console.is_terminal else 2)

        with bars:
            watcher = asyncio.get_running_loop().create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
                bars.update(orders, completed=self.done)

    def clean_up(self) -> None:
        for pod in self.pods.values():
            if pod.process.poll() is None:
                pod.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.orders.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--db", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument(
        "--orders", type=int, default=36, metavar="N", help="30 or more (default 36)"
    )
    asked = parser.parse_args()
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the pods like a Ctrl-C
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-demo-")))
        url = (
            stack.enter_context(private_postgres())
            if asked.db == "postgres"
            else f"sqlite:///{folder}/orders.db"
        )
        demo = Demo(url, folder, max(30, asked.orders), console)
        stack.callback(demo.clean_up)
        try:
            asyncio.run(asyncio.wait_for(demo.show(), LONGEST))
        except (Failed, TimeoutError) as failure:
            console.print(
                f"FAILED: {str(failure) or f'not done within {LONGEST:.0f} s'}", markup=False
            )
            sys.exit(1)
        except KeyboardInterrupt:
            console.print("interrupted")
            sys.exit(130)
    console.print("PASSED: all orders done, every execution explained", markup=False)


if __name__ == "__main__":
    main()
