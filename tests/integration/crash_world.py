"""Faults at chosen moments of one run's life, and what must be true of the run afterwards."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from perdure import Client
from perdure.runtime.authoring.errors import WorkflowCancelled
from perdure.runtime.handle import Handle
from perdure.storage.model import RunStatus
from tests.harness.audit import AuditRow, read_history
from tests.harness.checkers import accounted_executions, check_history
from tests.harness.proxy import HangWhere, PostgresProxy, ProxiedConnection
from tests.harness.sidelog import Fault, SideLog, check_executions
from tests.harness.waiting import until
from tests.harness.wire import statement_name
from tests.integration.apps.crossing import crossing, unknown

State = tuple[str, int]
"""Status of a run and the number of its entries."""

ABSENT: State = ("absent", 0)
Call = Literal["signal", "cancel"]
WORDS: Mapping[Call, Sequence[str]] = {"signal": ("here", "there"), "cancel": ("here", "back")}
KINDS: Mapping[Call, Sequence[str]] = {
    "signal": ("step", "signal", "step"),
    "cancel": ("step", "cancel", "step"),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A statement in the life of a run: the ``nth`` of this name after the answer to the client's ``after``.

    then: not before the answer to this statement of the pod's, which has to follow that one of the client's.
    call: what the client does while the run waits. before, behind: how the run stands before the statement and after
    it. lost: the step whose result is in nobody's hands if the process ends before the statement.
    """

    after: Literal["start", "signal"]
    statement: str
    nth: int
    before: State
    behind: State
    lost: str | None = None
    call: Call = "signal"
    then: str | None = None

    def state(self, where: HangWhere) -> State:
        return self.before if where == "before" else self.behind


MOMENTS: Mapping[str, Moment] = {
    "claim": Moment("start", "claim", 1, ("pending", 0), ("running", 0)),
    "step": Moment("start", "commit", 1, ("running", 0), ("running", 1), lost="here"),
    "park": Moment("start", "commit", 2, ("running", 1), ("suspended", 1)),
    "wake": Moment("signal", "claim", 1, ("suspended", 1), ("running", 1)),
    "journal": Moment("signal", "journal", 1, ("running", 1), ("running", 1)),
    "mailbox": Moment("signal", "mailbox", 1, ("running", 1), ("running", 1), then="claim"),
    "signal": Moment("signal", "commit", 1, ("running", 1), ("running", 2)),
    "finish": Moment("signal", "commit", 2, ("running", 2), ("succeeded", 3), lost="there"),
    "cancel": Moment("signal", "commit", 1, ("running", 1), ("running", 2), call="cancel"),
    "cancelled": Moment(
        "signal", "commit", 2, ("running", 2), ("cancelled", 3), lost="back", call="cancel"
    ),
}


@dataclass(slots=True)
class Injury:
    """A fault that waits for its moment. found: how the run stood when it was done."""

    found: list[State] = field(default_factory=list)
    called: bool = False
    """The client has had its answer."""
    armed: bool = False


class World:
    """One audited database and a client of it; who executes the runs is the test's matter.

    url: direct. client_url: what `client` uses, such as that of a proxy. The watcher always goes directly.
    """

    def __init__(self, url: str, folder: Path, *, client_url: str | None = None) -> None:
        self.url = url
        self.side_log = SideLog(folder / "side.log")
        self.client = Client(client_url or url, workflows=[crossing, unknown])
        self.watcher = Client(url, workflows=[crossing, unknown])
        self._numbers = itertools.count(1)
        self._checked = 0

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        await self.watcher.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watcher.__aexit__(None, None, None)
        await self.client.__aexit__(None, None, None)

    def fresh_id(self) -> str:
        return f"run-{next(self._numbers):03}"

    async def state(self, run_id: str) -> State:
        run = await self.watcher.get(run_id)
        return ABSENT if run is None else (run.status, len(await self.watcher.journal(run_id)))

    async def reaches(self, run_id: str, *statuses: str, deadline: float = 20.0) -> None:
        async def there() -> bool:
            return (await self.state(run_id))[0] in statuses

        what = f"{run_id} being {' or '.join(statuses)}"
        await until(there, what=what, deadline=deadline, interval=0.02)

    # ---- a run's life -------------------------------------------------------------------------

    async def cross(self, run_id: str, call: Call, *, deadline: float = 20.0) -> object:
        """Start a run, signal or cancel it while it waits, and return how it ended."""
        handle = await self.client.start(crossing, run_id=run_id)
        await self.reaches(run_id, RunStatus.SUSPENDED, deadline=deadline)
        await self.call(handle.run_id, call)
        return await self.outcome(run_id, deadline=deadline)

    async def call(self, run_id: str, call: Call) -> None:
        if call == "signal":
            await self.client.signal(run_id, "go", "on", id="go")
        else:
            await self.client.cancel(run_id, "enough")

    async def outcome(self, run_id: str, *, deadline: float = 20.0) -> object:
        handle: Handle[list[str]] = self.watcher.handle(run_id, crossing)
        try:
            return await handle.wait(deadline)
        except WorkflowCancelled:
            return RunStatus.CANCELLED

    # ---- faults -------------------------------------------------------------------------------

    def injure(
        self,
        run_id: str,
        moment: Moment,
        where: HangWhere,
        strike: Callable[[int], object],
        *,
        of: PostgresProxy,
        client: PostgresProxy,
    ) -> Injury:
        """Arm ``strike(backend)`` for a statement that passes the proxy ``of``, right before it reaches the server or
        right after the server has done it."""
        injury = Injury()

        def answered(_backend: int) -> None:
            injury.called = True
            injury.armed = moment.then is None

        def arm(_backend: int) -> None:
            injury.armed = True

        def follows(sql: str) -> bool:
            return injury.called and statement_name(sql) == moment.then

        def due(sql: str) -> bool:
            return injury.armed and statement_name(sql) == moment.statement

        async def do(backend: int) -> None:
            injury.found.append(await self.state(run_id))
            outcome = strike(backend)
            if inspect.isawaitable(outcome):
                await outcome

        client.call(answered, name=moment.after, where="answer")
        if moment.then is not None:
            of.call(arm, predicate=follows, where="answer")
        of.call(do, predicate=due, where=where, nth=moment.nth)
        return injury

    # ---- what must be true --------------------------------------------------------------------

    async def history(self, run_id: str) -> list[AuditRow]:
        """The lines about this run, and those about no run since the last check of one."""
        rows = await read_history(self.url, after=self._checked)
        return [row for row in rows if row.run_id in (None, run_id)]

    def executed(self, run_id: str) -> Counter[str]:
        """How often each word was marked."""
        return Counter(e.input.strip("'") for e in self.side_log.executions() if e.run == run_id)

    async def check(
        self,
        run_id: str,
        outcome: object,
        call: Call,
        *,
        faults: Sequence[Fault] = (),
        again: str | None = None,
    ) -> None:
        """The run ended as it should, each entry is there once, and each step was executed once (``again``: twice)."""
        words = WORDS[call]
        assert outcome == (["here", "on", "there"] if call == "signal" else RunStatus.CANCELLED)
        journal = await self.watcher.journal(run_id)
        assert tuple(entry.kind for entry in journal) == KINDS[call]
        rows = await self.history(run_id)
        assert check_history(rows) == []
        self._checked = rows[-1].id
        mine = [e for e in self.side_log.executions() if e.run == run_id]
        assert check_executions(mine, accounted_executions(rows), faults) == []
        expected = Counter([*words, *([again] if again else [])])
        assert self.executed(run_id) == expected, f"{mine}, expected {expected}"


def lose(proxy: PostgresProxy) -> Callable[[int], None]:
    """A strike that resets the connection of a backend, on both sides."""

    def reset(backend: int) -> None:
        for connection in _connections(proxy, backend):
            connection.reset()

    return reset


def _connections(proxy: PostgresProxy, backend: int) -> list[ProxiedConnection]:
    found = [c for c in proxy.connections if c.backend_pid == backend]
    assert found, f"no connection has backend {backend}"
    return found
