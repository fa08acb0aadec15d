"""What sessions do. A part is one statement (or method); `lowered` makes operations of parts.

Parts are written once for both kinds of actors. On `PostgresActor`s a part is, by its mode,
``transaction``  BEGIN, the statement, COMMIT and the question after it, each an operation
``fused``        the same in two operations: BEGIN with the statement, COMMIT with the question
``gated``        the statement's snapshot and its row locks as two operations, and the question
``plain``        one operation
On `StoreActor`s each part is one operation: there the method is the unit.

One file because parts are read beside each other: a race is made of several of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from perdure.storage.errors import RunnerDeclaredDead
from perdure.storage.model import (
    Birth,
    ClaimRequest,
    Entry,
    EntryKind,
    Finish,
    Message,
    MessageKind,
    NewRun,
    Park,
    Reason,
    RunStatus,
    RunWrite,
    ShardHold,
    StrayRequest,
    Verdict,
)
from tests.harness.interleave import Case, Operation, Script
from tests.interleaving.actors import Actor, PostgresActor
from tests.interleaving.notes import (
    Asking,
    Attempt,
    Claiming,
    Notes,
    Sending,
    Starting,
    fresh_id,
    notes_of,
)

Mode: TypeAlias = Literal["transaction", "fused", "gated", "plain"]
Work: TypeAlias = Callable[[Any, Notes], Awaitable[object]]

ANOTHER = "tests.another"
"""A workflow that none of the runs has."""
MOMENT = 1_700_000_000.0
"""An instant in the past, for what is due."""
LATER = 4_000_000_000.0
"""An instant in the future."""
SLACK = 5.0
"""Seconds ahead of time that claims take runs: what is parked as due becomes so by the clock of its own statement,
which may be later than the snapshot of a claim that came before it."""


@dataclass(frozen=True, slots=True)
class Part:
    """ask: what is asked after the transaction (on statements only). at_once: in the operation of the
    COMMIT, for answers that nobody else can change."""

    name: str
    do: Work
    ask: Work | None = None
    mode: Mode = "transaction"
    at_once: bool = False


def together(name: str, *parts: Part) -> Part:
    """Several parts as one operation."""

    async def do(actor: Any, notes: Notes) -> None:
        for part in parts:
            await part.do(actor, notes)

    return Part(name, do, mode="plain")


@dataclass(frozen=True, slots=True)
class Draft:
    """A script before it is known what its sessions are."""

    name: str
    parts: Sequence[Part]

    def as_mode(self, mode: Mode) -> Draft:
        """The same with its transactions cut otherwise."""
        changed = [replace(p, mode=mode) if p.mode != "plain" else p for p in self.parts]
        return Draft(self.name, changed)

    def with_mode(self, name: str, mode: Mode) -> Draft:
        """The same with one part cut otherwise."""
        changed = [replace(p, mode=mode) if p.name == name else p for p in self.parts]
        return Draft(self.name, changed)

    def then(self, other: Draft) -> Draft:
        return Draft(self.name, [*self.parts, *other.parts])

    def lowered(self, *, split: bool) -> Script[Any]:
        if not split:
            return Script(self.name, [_operation(part.name, part.do) for part in self.parts])
        return Script(self.name, [op for part in self.parts for op in _operations(part)])


def _operation(name: str, *works: Work) -> Operation[Any]:
    async def run(actor: Any, case: Case) -> None:
        try:
            for work in works:
                await work(actor, notes_of(case))
        except BaseException as error:
            if isinstance(actor, PostgresActor):
                # As with the engine, whose transactions are statements: a failure ends it, and to be told
                # that one is dead is an answer and no failure.
                await actor.forget(commit=isinstance(error, RunnerDeclaredDead))
            raise

    return Operation(name, run)


async def _begin(actor: Any, _: Notes) -> None:
    await actor.begin()


async def _commit(actor: Any, _: Notes) -> None:
    await actor.commit()


async def _lock(actor: Any, _: Notes) -> None:
    await actor.lock()


def _operations(part: Part) -> list[Operation[Any]]:
    name, do = part.name, part.do
    ask = [part.ask] if part.ask else []

    async def look(actor: Any, notes: Notes) -> None:
        await actor.look(do(actor, notes))

    match part.mode:
        case "plain":
            return [_operation(name, do, *ask)]
        case "fused":
            return [_operation(name, _begin, do), _operation(f"{name}, commit", _commit, *ask)]
        case "gated":
            asked = [_operation(f"{name}, ask", *ask)] if ask else []
            return [_operation(f"{name}, look", look), _operation(f"{name}, lock", _lock), *asked]
        case "transaction":
            asked = [] if part.at_once or not ask else [_operation(f"{name}, ask", *ask)]
            last = _operation(f"{name}, commit", _commit, *(ask if part.at_once else []))
            framed = [_operation(f"{name}, begin", _begin), _operation(name, do), last]
            return [*framed, *asked]


# ---- writes of a holder -----------------------------------------------------------------------


def entry(seq: int, mark: str) -> Entry:
    """A step's entry that names who wrote it."""
    return Entry(seq, EntryKind.STEP, f"/{mark}#1", MOMENT, output=f'"{mark}"')


def park(
    seen: int = 0, *, wake_at: float | None = None, reason: Reason = Reason.SIGNAL
) -> Callable[[Notes], Park]:
    return lambda notes: Park(wake_at, notes.seen.get("park", seen), reason)


def finish(parent: bool = False) -> Callable[[Notes], Finish]:
    return lambda notes: Finish(
        RunStatus.SUCCEEDED, '"done"', parent_id=notes.run_id() if parent else None
    )


def child_finishing(name: str = "c1") -> Draft:
    """A child ends and tells its parent."""
    return writing(name, run=name, outcome=finish(parent=True))


def writing(
    key: str = "commit",
    *,
    run: str = "",
    runner: int = 1,
    entries: int = 1,
    outcome: Callable[[Notes], Park | Finish] | None = None,
    after: str | None = None,
) -> Draft:
    """A write of a run the runner holds. after: key of an earlier write of the same script; if that has
    to be sent again, it is, in place of this one."""

    async def do(actor: Actor, notes: Notes) -> None:
        attempt = _next_attempt(key, after, notes)
        if attempt is None:
            return
        try:
            await actor.write(attempt)
        except RunnerDeclaredDead:
            attempt.told.append("declared dead")
            raise

    def _next_attempt(key: str, after: str | None, notes: Notes) -> Attempt | None:
        earlier = None if after is None else notes.attempts[after]
        if earlier is not None and earlier.verdict is Verdict.AGAIN:
            return earlier
        if earlier is not None and earlier.verdict is not Verdict.COMMITTED:
            return None
        held, done = notes.held[run], 0 if earlier is None else 1
        first = held.next_seq + (0 if earlier is None else len(earlier.write.entries))
        taken = messages_read(notes, run) if outcome else []
        made = [entry(first + n, f"{key}{n}") for n in range(entries)]
        write = RunWrite(
            held.run_id,
            held.claim_id,
            held.revision + done,
            entries=made,
            consumed=[(message, first) for message in taken],
            outcome=outcome(notes) if outcome else None,
        )
        return notes.attempts.setdefault(key, Attempt(notes.runner(runner), write))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        for name in (key, after):
            if name is not None and name in notes.attempts:
                await actor.ask_write(notes.attempts[name])

    return Draft(key, [Part(key, do, ask)])


def messages_read(notes: Notes, run: str) -> Sequence[str]:
    """The messages a script has read and will take with its next write."""
    return notes.said.get(f"read {run}", "").split()


def reading(run: str = "") -> Draft:
    """Read wake_seq and mailbox in one snapshot; the next write takes what was found."""

    async def do(actor: Actor, notes: Notes) -> None:
        mailbox = await actor.mailbox(notes.run_id(run))
        notes.seen["park"] = mailbox.wake_seq
        notes.said[f"read {run}"] = " ".join(m.message_id for m in mailbox.messages)

    return Draft("read", [Part("read", do, mode="plain")])


def reading_twice() -> Draft:
    """The mistake: the messages in one read, wake_seq in another."""

    async def messages(actor: Actor, notes: Notes) -> None:
        mailbox = await actor.mailbox(notes.run_id())
        notes.said["read "] = " ".join(m.message_id for m in mailbox.messages)

    async def wake_seq(actor: Actor, notes: Notes) -> None:
        notes.seen["park"] = (await actor.mailbox(notes.run_id())).wake_seq

    parts = [Part(work.__name__, work, mode="plain") for work in (messages, wake_seq)]
    return Draft("read", parts)


def parking_again(run: str = "") -> Draft:
    """After a refusal: read the mailbox, take what is there, park once more."""

    async def do(actor: Actor, notes: Notes) -> None:
        first = notes.attempts["park"]
        if first.verdict is not Verdict.PARK_REFUSED:
            return
        mailbox = await actor.mailbox(notes.run_id(run))
        await actor.write(_second_park(notes, first, mailbox.wake_seq, mailbox.messages))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        if "park again" in notes.attempts:
            await actor.ask_write(notes.attempts["park again"])

    return Draft("park again", [Part("park again", do, ask, mode="plain")])


def _second_park(notes: Notes, first: Attempt, seen: int, messages: Sequence[Message]) -> Attempt:
    assert isinstance(first.write.outcome, Park)
    seq = first.write.entries[-1].seq + 1
    write = replace(
        first.write,
        revision=first.write.revision + 1,
        entries=[entry(seq + n, message.message_id) for n, message in enumerate(messages)],
        consumed=[(message.message_id, seq + n) for n, message in enumerate(messages)],
        outcome=replace(first.write.outcome, seen=seen),
    )
    return notes.attempts.setdefault("park again", Attempt(first.runner_id, write))


def parking_blindly() -> Draft:
    """The mistake: after a refusal `seen` is moved without reading the mailbox."""

    async def do(actor: Actor, notes: Notes) -> None:
        first = notes.attempts["park"]
        if first.verdict is Verdict.PARK_REFUSED:
            assert isinstance(first.write.outcome, Park)
            seen = first.write.outcome.seen + 1
            await actor.write(_second_park(notes, first, seen, []))

    return Draft("park again", [Part("park again", do, mode="plain")])


def due_in_memory(seen: int = 1) -> Draft:
    """Housekeeping of the runs in memory."""

    async def do(actor: Actor, notes: Notes) -> None:
        news = await actor.due_in_memory(notes.run_id(), seen)
        notes.said["look"] = "news" if news else "no news"

    return Draft("look", [Part("look", do)])


# ---- senders and operators --------------------------------------------------------------------


def sending(
    key: str = "signal", *, message: str = "m1", kind: MessageKind = MessageKind.SIGNAL
) -> Draft:
    async def do(actor: Actor, notes: Notes) -> None:
        body = Message(notes.run_id(), message, kind, name="go", body='"hello"')
        await actor.send(notes.sendings.setdefault(key, Sending(body)))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_send(notes.sendings[key])

    return Draft(key, [Part(key, do, ask, at_once=True)])


def cancelling(key: str = "cancel", *, same_call_as: str | None = None) -> Draft:
    """As the client does: end a run nobody entered, else send it a message.

    same_call_as: the same call, sent again because its answer was lost.
    """

    async def do(actor: Actor, notes: Notes) -> None:
        asking = Asking(notes.run_id())
        if same_call_as is not None:
            first = notes.askings.setdefault(same_call_as, Asking(notes.run_id()))
            asking.batch_id = first.batch_id
        await actor.cancel(notes.askings.setdefault(key, asking))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_cancel(notes.askings[key])

    name = f"{key} message"
    (send,) = sending(name, message="cancel", kind=MessageKind.CANCEL).parts

    async def send_if_entered(actor: Actor, notes: Notes) -> None:
        if not notes.askings[key].answer:
            await send.do(actor, notes)

    async def ask_send(actor: PostgresActor, notes: Notes) -> None:
        if name in notes.sendings:
            await actor.ask_send(notes.sendings[name])

    second = Part(name, send_if_entered, ask_send, mode="plain")
    return Draft(key, [Part(key, do, ask, at_once=True), second])


def suspending(key: str = "suspend", *, same_call_as: str | None = None) -> Draft:
    """As the client does: hold a run nobody has, else send it a message and look once more.

    same_call_as: the same call, sent again because its answer was lost.
    """

    async def do(actor: Actor, notes: Notes) -> None:
        asking = Asking(notes.run_id(), suspend=True)
        if same_call_as is not None:
            first = notes.askings.setdefault(same_call_as, Asking(notes.run_id(), suspend=True))
            asking.batch_id = first.batch_id
        await actor.hold_run(notes.askings.setdefault(key, asking))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_hold(notes.askings[key])

    name = f"{key} message"
    (send,) = sending(name, message="suspend", kind=MessageKind.SUSPEND).parts

    async def send_if_held(actor: Actor, notes: Notes) -> None:
        if not notes.askings[key].answer:
            await send.do(actor, notes)

    async def ask_send(actor: PostgresActor, notes: Notes) -> None:
        if name in notes.sendings:
            await actor.ask_send(notes.sendings[name])

    async def look_again(actor: Actor, notes: Notes) -> None:
        if not notes.askings[key].answer:
            await do(actor, notes)

    first = Part(key, do, ask, at_once=True)
    message = Part(name, send_if_held, ask_send, mode="plain")
    return Draft(key, [first, message, Part(f"{key} again", look_again, mode="plain")])


def releasing_hold(key: str = "resume", *, same_call_as: str | None = None) -> Draft:
    async def do(actor: Actor, notes: Notes) -> None:
        asking = Asking(notes.run_id(), resume=True)
        if same_call_as is not None:
            first = notes.askings.setdefault(same_call_as, Asking(notes.run_id(), resume=True))
            asking.batch_id = first.batch_id
        await actor.release_hold(notes.askings.setdefault(key, asking))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_release(notes.askings[key])

    return Draft(key, [Part(key, do, ask, at_once=True)])


def new_run(notes: Notes, name: str = "", **changes: Any) -> NewRun:
    plain = NewRun(
        run_id=notes.run_id(name),
        slot=notes.number << 8,
        workflow=notes.workflow,
        start_token=fresh_id(),
        payload="{}",
        seed=7,
        parent_id=notes.run_id() if name else None,
    )
    return replace(plain, **changes)


def starting(key: str, *, same_call_as: str | None = None) -> Draft:
    """same_call_as: it is the same start, sent again because its answer was lost."""

    async def do(actor: Actor, notes: Notes) -> None:
        run = new_run(notes, tags=f'"{key}"')
        if same_call_as is not None:
            run = notes.starts.setdefault(same_call_as, Starting(run)).run
        await actor.start(notes.starts.setdefault(key, Starting(run)))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_start(notes.starts[key])

    return Draft(key, [Part(key, do, ask, at_once=True)])


def birthing(key: str, *, same_call_as: str | None = None, lost: bool = False) -> Draft:
    """Runner a starts the run in the shard it holds, to be born claimed.

    same_call_as: it is the same start, sent again because its answer was lost; lost: that one.
    """

    def wanted(notes: Notes) -> Starting:
        birth = Birth(notes.a, ShardHold(notes.number, 1), fresh_id())
        first = Starting(new_run(notes, birth=birth))
        return notes.starts.setdefault(same_call_as or key, first)

    async def do(actor: Actor, notes: Notes) -> None:
        mine = Starting(wanted(notes).run)
        if not lost:
            notes.starts[key] = mine
        await actor.start(mine)

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        if not lost:
            await actor.ask_start(notes.starts[key])

    return Draft(key, [Part(key, do, ask, at_once=True)])


# ---- claims and shards ------------------------------------------------------------------------


def claim_request(notes: Notes, runner: int, **changes: Any) -> ClaimRequest:
    me = notes.runner(runner)
    plain = ClaimRequest(
        me, notes.holds.get(me, []), [notes.workflow], [], limit=1, per_shard=5, ahead=SLACK
    )
    return replace(plain, **changes)


def claiming(
    key: str = "claim",
    *,
    runner: int = 1,
    orphans: bool = False,
    load: bool = False,
    knows: str | None = None,
) -> Draft:
    """load: and read the journal of what was claimed. knows: the only workflow, default that of the run."""

    async def do(actor: Actor, notes: Notes) -> None:
        request = claim_request(notes, runner, orphans=orphans, workflows=[knows or notes.workflow])
        await actor.claim(notes.claims.setdefault(key, Claiming(request)))

    async def read(actor: Actor, notes: Notes) -> None:
        found = notes.claims[key]
        if found.run is not None:
            found.journal = await actor.journal(found.run.run_id)

    loading = [Part(f"{key}, load", read, mode="plain")] if load else []
    return Draft(key, [Part(key, do), *loading])


def marking(key: str = "holder", *, runner: int = 1, orphans: bool = False) -> Draft:
    """The holder of the shard does not know the workflow: its claim marks the run as a stray."""
    return claiming(key, runner=runner, orphans=orphans, knows=ANOTHER)


def lending(key: str = "lender", *, runner: int = 2, load: bool = False) -> Draft:
    """A runner takes strays of workflows that it knows, in whatever shard."""

    async def do(actor: Actor, notes: Notes) -> None:
        request = StrayRequest(notes.runner(runner), [notes.workflow], [], limit=1)
        await actor.claim(notes.claims.setdefault(key, Claiming(request)))

    async def read(actor: Actor, notes: Notes) -> None:
        found = notes.claims[key]
        if found.run is not None:
            found.journal = await actor.journal(found.run.run_id)

    loading = [Part(f"{key}, load", read, mode="plain")] if load else []
    return Draft(key, [Part(key, do), *loading])


def declaring_dead(*, runner: int = 1) -> Part:
    async def do(actor: Actor, notes: Notes) -> None:
        dead = await actor.declare_dead(notes.runner(runner), 0)
        if not dead and isinstance(actor, PostgresActor):
            dead = await actor.ask_dead(notes.runner(runner))
        assert dead, "its lease is over and it never renews"

    return Part("declare dead", do, mode="plain")


def taking(runner: int, *, dead: int | None = None) -> Part:
    async def do(actor: Actor, notes: Notes) -> None:
        me = notes.runner(runner)
        gone = [] if dead is None else [notes.runner(dead)]
        notes.holds[me] = await actor.take_shards(me, notes.number, gone)

    return Part("take", do, mode="plain")


def releasing(runner: int = 1) -> Part:
    async def do(actor: Actor, notes: Notes) -> None:
        me = notes.runner(runner)
        await actor.release_shards(me, notes.holds[me])

    return Part("release", do, mode="plain")


def giving_back(key: str, *, runner: int = 2, wake_at: float = MOMENT) -> Part:
    """Park the run that a claim got, due at once unless said otherwise."""

    async def do(actor: Actor, notes: Notes) -> None:
        run = notes.claims[key].run
        if run is not None:
            outcome = Park(wake_at, run.wake_seq, Reason.TIMER)
            write = RunWrite(run.run_id, run.claim_id, run.revision, outcome=outcome)
            attempt = Attempt(notes.runner(runner), write)
            await actor.write(notes.attempts.setdefault("give back", attempt))

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        if "give back" in notes.attempts:
            await actor.ask_write(notes.attempts["give back"])

    return Part("give back", do, ask, mode="plain")


def claiming_and_parking_for_later(key: str = "other") -> Draft:
    """Another claim of runner a gets the run, and parks it until much later."""
    (scan,) = claiming(key).as_mode("fused").parts
    return Draft(key, [scan, giving_back(key, runner=1, wake_at=LATER)])


def moving(key: str = "heir", *, claim: Mode = "transaction", back: bool = False) -> Draft:
    """The holder releases its shard, another takes it and claims; back: and parks what it got."""
    (scan,) = claiming(key, runner=2).parts
    rest = [giving_back(key)] if back else []
    return Draft(key, [releasing(), taking(2), replace(scan, mode=claim), *rest])


def taking_over(
    key: str = "take-over", *, runner: int = 2, claim: Mode = "transaction", brief: bool = False
) -> Draft:
    """Declare the holder dead, take its shard, claim what it left, read the journal.

    brief: the first two as one operation, and the last two if the claim is a plain one.
    """
    scan, load = claiming(key, runner=runner, orphans=True, load=True).parts
    shard = [declaring_dead(), taking(runner, dead=1)]
    runs = [replace(scan, mode=claim), load]
    if brief:
        shard = [together("take the shard", *shard)]
        runs = [together(key, *runs)] if claim == "plain" else runs
    return Draft(key, [*shard, *runs])


# ---- keepers ----------------------------------------------------------------------------------


def renewing() -> Draft:
    async def do(actor: Actor, notes: Notes) -> None:
        alive = await actor.renew(notes.a)
        notes.said["renew"] = "alive" if alive else "dead"

    return Draft("renew", [Part("renew", do)])


def declaring() -> Draft:
    async def do(actor: Actor, notes: Notes) -> None:
        dead = await actor.declare_dead(notes.a, 0)
        notes.said["declare"] = "dead" if dead else "alive"

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        if notes.said["declare"] == "alive" and await actor.ask_dead(notes.a):
            notes.said["declare"] = "dead"

    return Draft("declare", [Part("declare", do, ask, at_once=True)])


# ---- locks of sessions ------------------------------------------------------------------------


def coming_back(*, first: str = "renew") -> Draft:
    """The keeper of runner a has a new session: it renews first of all, then takes its lock again."""

    async def lock(actor: PostgresActor, notes: Notes) -> None:
        if notes.said.get("renew") != "dead":
            notes.said["lock"] = "held" if await actor.hold_lock(notes.a) else "busy"

    parts = [*renewing().parts, Part("lock", lock, mode="plain")]
    return Draft("renew", parts if first == "renew" else parts[::-1])


def losing_the_session() -> Draft:
    """Runner a's session, which holds the lock, ends."""

    async def hold(actor: PostgresActor, notes: Notes) -> None:
        assert await actor.hold_lock(notes.a)

    async def end(actor: PostgresActor, notes: Notes) -> None:
        await actor.let_lock_go(notes.a)

    return Draft("session", [Part("hold", hold, mode="plain"), Part("end", end, mode="plain")])


def taking_for_lost(key: str = "declare") -> Draft:
    """Two tests of runner a's lock, then the shortcut if it was free at both and no renewal came between."""

    async def test(actor: PostgresActor, notes: Notes) -> None:
        count = await actor.suspected(notes.a)
        notes.seen.setdefault(f"{key} first", -1 if count is None else count)
        notes.seen[f"{key} last"] = -1 if count is None else count

    async def do(actor: PostgresActor, notes: Notes) -> None:
        first, last = notes.seen[f"{key} first"], notes.seen[f"{key} last"]
        if first == -1 or first != last:
            notes.said[key] = "spared"
            return
        lost = await actor.declare_lost(notes.a, last)
        notes.said[key] = f"dead at {last}" if lost else "alive"

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        if notes.said[key] == "alive" and await actor.ask_dead(notes.a):
            notes.said[key] = "dead already"

    tests = [Part(name, test, mode="plain") for name in ("test 1", "test 2")]
    return Draft(key, [*tests, Part(key, do, ask, at_once=True)])


# ---- a lost connection ------------------------------------------------------------------------


def prepared_attempt(notes: Notes, outcome: Callable[[Notes], Park | Finish] | None) -> Attempt:
    """The write whose answer is lost, known to both: who sent it and who settles it."""
    held = notes.held[""]
    write = RunWrite(
        held.run_id,
        held.claim_id,
        held.revision,
        entries=[entry(held.next_seq, "lost")],
        outcome=outcome(notes) if outcome else None,
    )
    return notes.attempts.setdefault("lost", Attempt(notes.a, write))


def ghost_write(outcome: Callable[[Notes], Park | Finish] | None = None) -> Draft:
    """A write whose connection was cut after it had been sent."""

    async def do(actor: PostgresActor, notes: Notes) -> None:
        notes.ghost = actor
        lost = prepared_attempt(notes, outcome)
        copy = Attempt(lost.runner_id, lost.write, lost.batch_id)
        await actor.write(copy)

    return Draft("ghost", [Part("ghost", do)])


def _resend(outcome: Callable[[Notes], Park | Finish] | None) -> Part:
    async def do(actor: Actor, notes: Notes) -> None:
        lost = prepared_attempt(notes, outcome)
        if lost.verdict is Verdict.AGAIN:
            await actor.write(lost)

    async def ask(actor: PostgresActor, notes: Notes) -> None:
        await actor.ask_write(prepared_attempt(notes, outcome))

    return Part("send again", do, ask, mode="plain")


def settling(outcome: Callable[[Notes], Park | Finish] | None = None) -> Draft:
    """The engine's settlement as a whole, then the same write again if it says so."""

    async def do(actor: Actor, notes: Notes) -> None:
        lost = prepared_attempt(notes, outcome)
        await actor.settle(lost, notes.ghost)

    return Draft("settle", [Part("settle", do, mode="plain"), _resend(outcome)])


def settling_slowly(
    outcome: Callable[[Notes], Park | Finish] | None = None, *, hasty: bool = False
) -> Draft:
    """The settlement statement by statement. hasty: the mistake of taking zero rows for "fenced"."""

    async def locking(actor: PostgresActor, notes: Notes) -> None:
        lost = prepared_attempt(notes, outcome)
        fence = await actor.locked_fence(lost)
        if hasty and fence is None:
            lost.tell(Verdict.FENCED)
            return
        notes.fence = fence

    async def rest(actor: PostgresActor, notes: Notes) -> None:
        lost = prepared_attempt(notes, outcome)
        if lost.verdict is not None:
            return
        verdict = await actor.plain_state(lost, notes.fence)
        if verdict is not None and verdict is not Verdict.AGAIN:
            lost.tell(verdict)

    async def end_ghost(actor: PostgresActor, notes: Notes) -> None:
        ghost = notes.ghost
        if prepared_attempt(notes, outcome).verdict is None and ghost is not None:
            assert isinstance(ghost, PostgresActor)
            await actor.end(ghost)

    async def decide(actor: PostgresActor, notes: Notes) -> None:
        lost = prepared_attempt(notes, outcome)
        if lost.verdict is None:
            fence = await actor.waited_fence(lost)
            verdict = await actor.plain_state(lost, fence)
            assert verdict is not None
            lost.tell(verdict)

    works = {"settle": locking, "settle the rest": rest, "end ghost": end_ghost, "decide": decide}
    parts = [Part(name, work, mode="plain") for name, work in works.items()]
    return Draft("settle", [*parts, _resend(outcome)])
