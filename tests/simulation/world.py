"""One simulated world: a server, pods, clients, and what is done to them, all drawn from one seed."""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import Task
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from perdure import App
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.storage.clock import SeededRandomness
from perdure.storage.errors import PerdureError
from perdure.storage.model import Claims

from .clients import Accounts, Visitor
from .database import Connections, FakeClock, Faults, Server, SimulatedDatabase
from .hints import HintNet
from .loop import LANE, Lane, VirtualLoop
from .pods import factories
from .workload import WORKFLOWS, Execution

PATIENCE = 150.0
"""Virtual seconds after the last fault in which everything has to come to its end."""
SETTLING = 4.0
"""Leases within which every shard has a living holder when everything else has come to its end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one world is like."""

    pods: int
    partial: int
    """So many of the pods do not know the workflow `rare`."""
    clients: int
    runs: int
    slots: int
    shards: int
    lease: float
    warm_runs: int
    recording: str
    mailbox: int
    """Unread messages a run may have."""
    kept: float | None
    """Seconds that ended runs are kept; None: for ever."""
    page: int
    """Entries of a journal read at once."""
    bursts: int
    """Starts come in so many bursts; 0: each at a moment of its own."""
    span: float
    """Virtual seconds of faults and work."""
    events: int
    """Faults that are events: crashes, pauses, cuts, jumps …"""
    noise: float
    """How often single calls go wrong."""
    latency: float
    """Seconds that a call travels at most, one way."""

    @classmethod
    def draw(cls, chance: Random) -> Figures:
        pods = chance.choice((2, 2, 3, 3, 4))
        bursts = chance.choice((0, 0, 0, 1, 2))
        return cls(
            pods=pods,
            partial=chance.choice((0, 0, 1)) if pods > 2 else 0,
            clients=2,
            runs=24 if bursts else chance.choice((8, 12, 20)),
            slots=chance.choice((2, 5, 50)),
            shards=chance.choice((4, 8)),
            bursts=bursts,
            warm_runs=chance.choice((0, 1, 1_000)),
            recording=chance.choice(("full", "coarse")),
            page=chance.choice((1, 3, 1_000)),
            mailbox=chance.choice((1, 10_000)),
            kept=chance.choice((None, None, 3.0)),
            lease=chance.choice((3.0, 5.0)),
            span=chance.choice((12.0, 20.0)),
            events=chance.choice((0, 2, 4, 6)),
            noise=chance.choice((0.0, 0.02, 0.06)),
            latency=chance.choice((0.1, 0.25) if bursts else (0.004, 0.02, 0.1, 0.25)),
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to a process (None: to all), from ``at`` until ``until``. What it excuses: see the checkers."""

    kind: str
    at: float
    until: float
    process: int | None = None


class Pod:
    """A replica: process after process under one name."""

    def __init__(self, world: World, name: str, workflows: list[str]) -> None:
        self.world = world
        self.name = name
        self.workflows = workflows
        self.faults = Faults()
        self.clock = FakeClock(world.loop)
        self.number = 0
        self.runner: Runner | None = None
        self.main = self.keeper = Lane("none", self)
        self.main.dead = self.keeper.dead = True
        self.chance = world.random(name)
        self.connections: Connections | None = None
        self._kept: list[Any] = []
        self.stopping = False

    @property
    def lives(self) -> bool:
        return not self.main.dead

    def boot(self) -> None:
        """A new process."""
        if self.lives or self.stopping:
            return
        world = self.world
        self.number = world.new_process(self)
        self.main = Lane(f"{self.name}/{self.number}", self)
        self.keeper = Lane(f"{self.name}/{self.number} keeper", self)
        self.clock = FakeClock(world.loop, self.clock.offset, self.chance.uniform(0, 5000))
        self.connections = self._connect(self.main)
        database = SimulatedDatabase(
            world.server,
            self.connections,
            chance=self.chance.getrandbits(60),
            deadline=world.deadline,
            hints=world.hints.channel,
            seen=world.seen,
            page=world.figures.page,
            claimed=lambda claims: world.claimed(self, claims),
        )
        self.runner = Runner(
            App(self.name, workflows=[WORKFLOWS[name] for name in self.workflows]),
            world.settings(self.name),
            clock=self.clock,
            randomness=SeededRandomness(self.chance.getrandbits(60)),
            port=False,
            database=database,
            factories=factories(self.keeper),
        )
        world.say(f"{self.name} boots as process {self.number}")
        context = contextvars.Context()
        context.run(LANE.set, self.main)
        self._kept.append((self.runner, self.main, self.keeper))
        world.go(self._live(self.runner), context)

    def _connect(self, lane: Lane) -> Connections:
        world = self.world
        return Connections(
            world.server,
            lane,
            self.number,
            self.faults,
            self.chance,
            world.deadline,
            world.figures.latency,
            lambda what: world.say(f"{lane.name}: {what}"),
        )

    async def _live(self, runner: Runner) -> None:
        try:
            await runner.start()
            await runner.closed()
        except Exception as error:
            self.world.say(f"{self.name} ends: {error!r}")
            self.world.fault("gave up", self.number)
            await runner.stop()
            self._gone("stop")
            self.world.later(self.chance.uniform(0.5, 2.0), self.boot)

    def start_inside(self, run_id: str, workflow: str, plan: dict[str, Any]) -> None:
        """The application in this very process starts a run: it may be born claimed."""
        if self.lives and self.runner is not None and self.runner._client is not None:
            context = contextvars.Context()
            context.run(LANE.set, self.main)
            self.world.go(self._start(self.runner, run_id, workflow, plan), context)

    async def _start(
        self, runner: Runner, run_id: str, workflow: str, plan: dict[str, Any]
    ) -> None:
        try:
            await runner.client.start(WORKFLOWS[workflow], plan, run_id=run_id)
        except PerdureError as error:
            self.world.say(f"{self.name} starts nothing: {error!r}")
        else:
            self.world.accounts.tell(run_id, "accepted", f"by {self.name} itself")

    # -- what is done to it
    def killed(self) -> None:
        """SIGKILL: nothing of it runs any more; what it had sent may still arrive."""
        if self.lives:
            self.world.say(f"{self.name} is killed")
            self._gone("crash")
            self.world.later(self.chance.uniform(0.1, 4.0), self.boot)

    def _gone(self, kind: str) -> None:
        self.main.dead = self.keeper.dead = True
        self.world.fault(kind, self.number)

    def pause(self, seconds: float, *, keeper: bool) -> None:
        """SIGSTOP, or (without the keeper) user code that does not give the main loop back."""
        if not self.lives or self.main.paused:
            return
        self.world.say(f"{self.name} {'stops' if keeper else 'is blocked'} for {seconds:.2f} s")
        self.world.fault("pause" if keeper else "block", self.number, seconds)
        lanes = [self.main, self.keeper] if keeper else [self.main]
        for lane in lanes:
            self.world.loop.pause(lane)
        self.world.later(seconds, self.go_on, lanes)

    def go_on(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self.world.loop.go_on(lane)

    def cut(self, seconds: float) -> None:
        """No packet between it and the database."""
        self.world.say(f"{self.name} is cut off for {seconds:.2f} s")
        self.world.fault("cut", self.number, seconds)
        self.faults.cut = True
        self.world.later(seconds, self.healed)

    def healed(self) -> None:
        self.faults.cut = False

    def drain(self) -> None:
        """SIGTERM."""
        if not self.lives or self.runner is None or self.main.paused:
            return
        self.world.say(f"{self.name} is asked to stop")
        context = contextvars.Context()
        context.run(LANE.set, self.main)
        self.world.go(self._stop(self.runner), context)

    async def _stop(self, runner: Runner) -> None:
        world = self.world
        world.seen["drained"] += 1
        drained = await runner.drain()
        if runner._session is not None and runner._session.failure is not None:
            # It has found another one of its name.
            world.fault("gave up", self.number)
        elif not (drained or runner.cut_short):  # that it was declared dead is told by the history
            world.fault("grace over", self.number)
        await runner.stop()
        self._gone("stop")
        world.later(self.chance.uniform(0.1, 2.0), self.boot)


class World:
    """See the module. wrong: what must not have happened. story: what happened, when asked for."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        self.seed = seed
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.seen: Counter[str] = Counter()
        self.violations: list[str] = []
        self.story: list[str] | None = [] if tell else None
        self.figures = Figures.draw(self.random("figures"))
        self.deadline = 2.0
        self._processor_time = 0.0
        self.grace = 3.0
        self.park_after = 1.5
        self.registered: set[int] = set()
        """Runners that heard that they are registered. Others are nobody, and may be declared dead at any time."""
        self.server = Server(self.loop)
        self.hints = HintNet(self.loop, self.random("hints"), self.seen)
        self.executions: list[Execution] = []
        self.kills: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.jumps: list[tuple[float, float]] = []
        self.falling_over = 0
        """Replicas that are still to become the primary."""
        """When the database's clock was set, and by how much."""
        self.accounts = Accounts(self)
        self.processes: dict[int, Pod | None] = {0: None}
        self._context = contextvars.Context()
        figures = self.figures
        self.pods = [
            Pod(
                self,
                f"pod-{number}",
                ["play"] if number < figures.partial else ["play", "rare"],
            )
            for number in range(figures.pods)
        ]
        self.twins: list[Pod] = []
        self.visitors = [Visitor(self, f"client-{n}") for n in range(figures.clients)]

    # -- for everybody
    def random(self, name: str) -> Random:
        """A stream of its own for each purpose, so that one more draw here changes nothing there."""
        return Random(f"{self.seed} {name}")

    def say(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.loop.now - 1000.0:9.4f}  {text}")

    def wrong(self, text: str) -> None:
        self.say(f"WRONG {text}")
        self.violations.append(text)

    def later(self, delay: float, callback: Any, *args: Any) -> None:
        """In the world's own lane."""
        self.loop.call_later(delay, callback, *args, context=self._context)

    def go(self, doing: Coroutine[Any, Any, None], context: contextvars.Context) -> Task[None]:
        """Let it happen in the lane of that context. It must not raise: a simulation that broke proves nothing."""
        task = self.loop.create_task(doing, context=context)
        task.add_done_callback(self._done, context=self._context)
        return task

    def _done(self, task: Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.wrong(f"the simulation broke off: {task.exception()!r}")

    def new_process(self, pod: Pod | None) -> int:
        number = len(self.processes)
        self.processes[number] = pod
        return number

    def fault(self, kind: str, process: int | None = None, seconds: float = 0.0) -> None:
        self.seen[kind] += 1
        self.faults.append(Fault(kind, self.loop.now, self.loop.now + seconds, process))

    def twin(self, pod: Pod) -> None:
        """A second process under the same name, as when a lost node's pod is replaced while it still lives."""
        self.say(f"{pod.name} is replaced while it lives")
        self.seen["twins"] += 1
        twin = Pod(self, pod.name, pod.workflows)
        twin.chance = self.random(f"twin {len(self.twins)}")
        self.twins.append(twin)
        twin.boot()
        pod.pause(twin.chance.uniform(0.1, 2.0 * self.figures.lease), keeper=True)

    def settings(self, replica: str) -> Settings:
        figures = self.figures
        return Settings(
            db="postgresql://simulation/none",
            runner_storage="sql",
            shards=figures.shards,
            lease=figures.lease,
            renewal=figures.lease / 4,
            look=figures.lease / 4,
            storage_deadline=self.deadline,
            grace=self.grace,
            slots=figures.slots,
            warm_runs=figures.warm_runs,
            recording=figures.recording,
            mailbox_limit=figures.mailbox,
            finished_ttl=figures.kept,
            park_after=self.park_after,
            scan=3.0,
            replica_id=replica,
        )

    def claimed(self, pod: Pod, claims: Claims) -> None:
        if self.story is not None:
            for run in claims.runs:
                self.say(
                    f"{pod.name} claims {run.run_id} (claim {run.claim_id % 10_000}, entry {run.next_seq})"
                )

    def began(self, pod: Pod, execution: Execution, known: int) -> None:
        """A step's function begins; ``known``: entries its body has seen before it called it (R4)."""
        self.executions.append(execution)
        self.say(f"{pod.name} executes {execution.key} of {execution.run}")
        if self.server.lost:
            return  # what was durable then may be gone now
        durable = self.server.query(
            "select count(*) from perdure_steps where run_id = ?", execution.run
        )[0][0]
        if durable < known:
            self.wrong(
                f"run {execution.run}: step {execution.key} began when {durable} entries were durable "
                f"and its body had seen {known}"
            )

    # -- its course
    async def live(self) -> None:
        """Work and faults, then peace, until everything has come to its end."""
        self._make_noise()
        for pod in self.pods:
            self.later(self.random(pod.name).uniform(0, 1.5), pod.boot)
        for visitor in self.visitors:
            visitor.arrive()
        Disturbance(self).plan()
        await asyncio.sleep(self.figures.span)
        self._make_peace()
        ends = self.loop.now + PATIENCE
        operator = self.visitors[0]
        while self.loop.now < ends:
            await asyncio.sleep(0.5)
            if operator.idle and not self.falling_over and not self.unsettled():
                break
            operator.release_holds()
        # Leases that were written before a clock was set back are longer by as much.
        set_back = sum(-by for _, by in self.jumps if by < 0)
        ends = self.loop.now + SETTLING * self.figures.lease + set_back
        while self.loop.now < ends and self.unheld():  # noqa: ASYNC110 - of what nobody announces
            await asyncio.sleep(0.5)

    def _networks(self) -> list[Faults]:
        return [pod.faults for pod in self.pods] + [each.faults for each in self.visitors]

    def _make_noise(self) -> None:
        noise, chance = self.figures.noise, self.random("noise")
        for faults in self._networks():
            faults.unavailable = noise * chance.random()
            faults.conflict = noise * chance.random()
            faults.lost_before = noise * chance.random()
            faults.lost_after = noise * chance.random()
            faults.ghost = noise * chance.random()
            faults.slow = 2 * noise * chance.random()
        self.hints.lost = chance.choice((0.0, 0.1, 0.5))
        self.hints.doubled = chance.choice((0.0, 0.2))
        self.hints.late = chance.choice((0.0, 0.2))

    def _make_peace(self) -> None:
        self.say("peace")
        self.server.down = False
        self.hints.clear()
        for twin in self.twins:
            twin.stopping = True
            twin.killed()
        for faults in self._networks():
            faults.clear()
        for pod in self.pods:
            pod.go_on([pod.main, pod.keeper])
            if not pod.lives:
                self.later(0.1, pod.boot)

    def unsettled(self) -> list[str]:
        """Runs that are neither final nor waiting for what only people can give."""
        rows = self.server.query(
            "select f.run_id, f.status, f.reason, w.wake_at, w.hold, "
            "(select count(*) from perdure_messages m where m.run_id = f.run_id and m.consumed_seq is null) "
            "from perdure_fences f join perdure_wakes w on w.run_id = f.run_id order by f.run_id"
        )
        found = []
        for run_id, status, reason, wake_at, hold, unread in rows:
            if hold == "crash-loop" and self.accounts.is_killer(run_id):
                continue
            if (
                status == "suspended"
                and reason == "signal"
                and wake_at is None
                and not unread
                and not hold
            ):
                continue
            found.append(
                f"run {run_id} is {status} ({reason}, hold {hold}, wake_at {wake_at}, {unread} unread)"
            )
        return found

    def unheld(self) -> list[str]:
        """Shards that no living process holds."""
        living = {
            pod.runner._session.runner_id: pod.name
            for pod in self.pods
            if pod.lives and pod.runner is not None and pod.runner._session is not None
        }
        rows = self.server.query("select shard_id, runner_id from perdure_shards order by shard_id")
        return [
            f"shard {shard} is held by {holder}, of no living process"
            for shard, holder in rows
            if holder not in living
        ]

    def processor_time(self) -> float:
        """Each look at it has cost a little."""
        self._processor_time += 0.0003
        return self._processor_time

    def run(self) -> None:
        self.loop.run(self.live())

    def close(self) -> None:
        self.loop.close()
        self.server.close()


class Disturbance:
    """Faults that are events, at moments drawn from the seed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.random("faults")

    def plan(self) -> None:
        figures, chance, world = self._world.figures, self._chance, self._world
        for _ in range(figures.events):
            world.later(chance.uniform(1.0, figures.span * 0.9), self._strike, chance.random())

    def _strike(self, lot: float) -> None:
        world, chance = self._world, self._chance
        pod = chance.choice(world.pods)
        lease = world.figures.lease
        if lot < 0.22:
            pod.killed()
        elif lot < 0.36:
            pod.pause(chance.uniform(0.1, 2.5 * lease), keeper=True)
        elif lot < 0.44:
            pod.pause(chance.uniform(0.1, 2.5 * lease), keeper=False)
        elif lot < 0.58:
            pod.cut(chance.uniform(0.1, 2.0 * lease))
        elif lot < 0.72:
            pod.drain()
        elif lot < 0.78:
            self._outage(chance.uniform(0.1, 1.5 * lease))
        elif lot < 0.84:
            self._jump(chance.choice((-30.0, -3.0, 3.0, 30.0)))
        elif lot < 0.86:
            world.twin(pod)
        elif lot < 0.89:
            world.seen["pod clock jumped"] += 1
            pod.clock.offset += chance.choice((-60.0, -2.0, 2.0, 60.0))
        else:
            self._fall_over(chance.uniform(0.01, 3.0))

    def _jump(self, seconds: float) -> None:
        world = self._world
        world.say(f"the database's clock jumps by {seconds} s")
        world.seen["database clock jumped"] += 1
        world.jumps.append((world.loop.now, seconds))
        world.server.clock.offset += seconds

    def _outage(self, seconds: float) -> None:
        world = self._world
        world.say(f"the database is away for {seconds:.2f} s")
        world.fault("outage", None, seconds)
        world.server.down = True
        world.later(seconds, self._back)

    def _back(self) -> None:
        self._world.server.down = False

    def _fall_over(self, lag: float) -> None:
        """A replica stops following now; in ``lag`` seconds it is the primary, and what came between is lost. Often
        shards change hands in between."""
        world, chance = self._world, self._chance
        world.say(f"a replica stops following, to become the primary in {lag:.2f} s")
        world.server.copy()
        world.falling_over += 1
        world.later(lag, self._promote)
        if chance.random() < 0.5:
            world.later(chance.uniform(0.0, lag), chance.choice(world.pods).drain)

    def _promote(self) -> None:
        world = self._world
        world.falling_over -= 1
        if world.server.fail_over():
            world.say("fail-over: the old copy is the database")
            world.seen["commits lost"] += 1
