"""Clients and operators of a simulated world, and what they were told."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perdure.runtime.authoring.registry import Registry
from perdure.runtime.client import Client
from perdure.runtime.errors import MailboxFull, RunEnded, RunNotFound, WrongStatus
from perdure.runtime.hints import HintBus
from perdure.runtime.parts import Parts
from perdure.storage.clock import SeededRandomness
from perdure.storage.errors import PerdureError, StorageError

from .database import Connections, FakeClock, Faults, SimulatedDatabase
from .loop import LANE, Lane
from .workload import WORKFLOWS, draw_plan, is_killer, waits_of

if TYPE_CHECKING:
    from .world import World


@dataclass(frozen=True, slots=True)
class Told:
    """Something a client was told, and when."""

    at: float
    run_id: str
    what: str
    """accepted, result, signalled, cancelled"""
    detail: str = ""


@dataclass(slots=True)
class Accounts:
    """What all clients asked for and were told."""

    world: World
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    workflows: dict[str, str] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    cancels: set[str] = field(default_factory=set)
    """Runs that somebody wanted cancelled."""

    def tell(self, run_id: str, what: str, detail: str = "") -> None:
        self.told.append(Told(self.world.loop.now, run_id, what, detail))
        self.world.say(f"a client is told: {run_id} {what} {detail}")

    def is_killer(self, run_id: str) -> bool:
        plan = self.plans.get(run_id)
        return plan is not None and is_killer(plan)


class Visitor:
    """One client process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.faults = Faults()
        self.chance = world.random(name)
        self.number = world.new_process(None)
        self._busy = 0
        self._client: Client | None = None
        self._context = contextvars.Context()
        self._context.run(LANE.set, Lane(name, self))
        self._kept: list[Any] = []

    @property
    def idle(self) -> bool:
        """Nothing that it asked for is unanswered, but for results."""
        return self._busy == 0

    def arrive(self) -> None:
        self._go(self._visit())

    def _go(self, doing: Coroutine[Any, Any, None]) -> None:
        self._kept.append(self.world.go(doing, self._context))

    async def _visit(self) -> None:
        world = self.world
        lane = self._context[LANE]
        connections = Connections(
            world.server,
            lane,
            self.number,
            self.faults,
            self.chance,
            world.deadline,
            world.figures.latency,
            lambda what: world.say(f"{self.name}: {what}"),
        )
        clock = FakeClock(world.loop, self.chance.choice((0.0, -40.0, 40.0)))
        database = SimulatedDatabase(
            world.server,
            connections,
            chance=self.chance.getrandbits(60),
            deadline=world.deadline,
            hints=world.hints.channel,
            seen=world.seen,
            page=world.figures.page,
            claimed=lambda claims: None,
        )
        registry = Registry()
        for definition in WORKFLOWS.values():
            registry.add(definition)
        bus = HintBus(database.hints(), local=True)
        await bus.open()
        self._client = Client.sharing(
            Parts(
                store=database.runs(),
                bus=bus,
                clock=clock,
                randomness=SeededRandomness(self.chance.getrandbits(60)),
                registry=registry,
                settings=world.settings(self.name),
                database=database,
            )
        )
        await self._client.__aenter__()
        chance, figures = self.chance, world.figures
        share = figures.runs // figures.clients
        for number in range(share):
            # Odd numbers are started by every client, under one id.
            run_id = f"run-{number}" if number % 2 else f"run-{number}-{self.name}"
            plans = world.random(f"plan {run_id}")
            plan, workflow = draw_plan(plans), "rare" if plans.random() < 0.2 else "play"
            at = chance.uniform(0.0, figures.span * 0.6)
            if figures.bursts:
                at = 2.0 + number % figures.bursts * 4.0 + chance.uniform(0.0, 0.01)
            world.later(at, self._go_start, run_id, workflow, plan)

    def _go_start(self, run_id: str, workflow: str, plan: dict[str, Any]) -> None:
        self._go(self._attend(run_id, workflow, plan))

    async def _attend(self, run_id: str, workflow: str, plan: dict[str, Any]) -> None:
        """Start a run, send it signals, perhaps cancel it, wait for its result."""
        world, chance = self.world, self.chance
        assert self._client is not None
        world.accounts.plans[run_id] = plan
        world.accounts.workflows[run_id] = workflow
        if chance.random() < 0.5:
            chance.choice(world.pods).start_inside(run_id, workflow, plan)
            await asyncio.sleep(chance.uniform(0.0, 0.5))
        if not await self._ask(self._start(run_id, workflow, plan)):
            return
        for number in range(waits_of(plan)):
            if chance.random() < 0.85:
                delay = chance.choice((0.0, 0.3, 2.0, 5.0)) * chance.random()
                world.later(delay, self._go_signal, run_id, number)
        if chance.random() < 0.12:
            world.later(chance.uniform(0.0, 4.0), self._go_cancel, run_id)
        if chance.random() < 0.08:
            world.later(
                chance.uniform(0.0, 3.0), self._go_suspend, run_id, chance.uniform(0.1, 6.0)
            )
        await self._wait(run_id)

    async def _ask(self, asking: Coroutine[Any, Any, None]) -> bool:
        """Whether it was answered. What a client may be told instead of an answer says nothing about the run."""
        self._busy += 1
        try:
            await asking
        except (MailboxFull, RunNotFound, RunEnded, WrongStatus, StorageError) as error:
            self.world.say(f"{self.name} is told {type(error).__name__}")
            self.world.seen[f"client told {type(error).__name__}"] += 1
            return False
        finally:
            self._busy -= 1
        return True

    async def _start(self, run_id: str, workflow: str, plan: dict[str, Any]) -> None:
        assert self._client is not None
        await self._client.start(workflow, plan, run_id=run_id)
        self.world.accounts.tell(run_id, "accepted")

    async def _wait(self, run_id: str) -> None:
        assert self._client is not None
        client = self._client
        try:
            record = await client.ended(run_id)
        except (PerdureError, TimeoutError):
            return
        self.world.accounts.tell(run_id, "result", f"{record.status} {record.result or ''}")
        if record.status in ("failed", "cancelled") and self.chance.random() < 0.15:
            await self._ask(self._retry(run_id))

    async def _retry(self, run_id: str) -> None:
        assert self._client is not None
        handle = await self._client.retry(run_id)
        plan = self.world.accounts.plans[run_id]
        self.world.accounts.plans[handle.run_id] = plan
        self.world.accounts.workflows[handle.run_id] = self.world.accounts.workflows[run_id]
        self.world.accounts.tell(handle.run_id, "accepted", "retry")
        self.world.seen["retried"] += 1

    def _go_signal(self, run_id: str, number: int) -> None:
        self._go(self._signal_twice(run_id, f"{self.name} {number}"))

    async def _signal_twice(self, run_id: str, text: str) -> None:
        if await self._ask(self._signal(run_id, text)) and self.chance.random() < 0.1:
            await self._ask(self._signal(run_id, text))

    async def _signal(self, run_id: str, text: str) -> None:
        assert self._client is not None
        await self._client.signal(run_id, "go", text, id=text)
        self.world.accounts.tell(run_id, "signalled", f"signal:{text}")

    def _go_cancel(self, run_id: str) -> None:
        self._go(self._cancel(run_id))

    async def _cancel(self, run_id: str) -> None:
        await self._ask(self._do_cancel(run_id))

    async def _do_cancel(self, run_id: str) -> None:
        assert self._client is not None
        self.world.accounts.cancels.add(run_id)
        await self._client.cancel(run_id, "no longer wanted")
        self.world.accounts.tell(run_id, "cancelled")

    def _go_suspend(self, run_id: str, seconds: float) -> None:
        self._go(self._suspend(run_id, seconds))

    async def _suspend(self, run_id: str, seconds: float) -> None:
        """An operator puts a run on hold, and thinks better of it."""
        assert self._client is not None
        if await self._ask(self._client.suspend(run_id, "let me look")):
            self.world.seen["suspended"] += 1
            await asyncio.sleep(seconds)
            await self._resume(run_id)

    def release_holds(self) -> None:
        """An operator lets held runs go on, but for those that would kill pods for ever."""
        for run_id, hold in self.world.server.query(
            "select run_id, hold from perdure_wakes where hold in ('crash-loop', 'operator') order by run_id"
        ):
            kills = hold == "crash-loop" and self.world.accounts.is_killer(run_id)
            if not kills and self.idle:
                self._go(self._resume(run_id))

    async def _resume(self, run_id: str) -> None:
        assert self._client is not None
        if await self._ask(self._client.resume(run_id)):
            self.world.seen["resumed"] += 1
