"""Where a merge begins: what the runs are before the scripts start."""

from __future__ import annotations

from perdure.storage.model import Message, MessageKind, Reason
from tests.interleaving.arena import Arena
from tests.interleaving.notes import Notes
from tests.interleaving.scripts import MOMENT


async def nothing(arena: Arena, notes: Notes) -> None:
    """Nobody has started the run yet."""


async def pending(arena: Arena, notes: Notes) -> None:
    """The run has been started and waits for somebody."""
    await arena.start(notes, "")


async def running(arena: Arena, notes: Notes) -> None:
    """Runner a has the run."""
    await arena.start(notes, "")
    await arena.claim(notes)


async def running_and_due(arena: Arena, notes: Notes) -> None:
    """Runner a has the run, whose wake row is due for a message that it has taken already."""
    await running(arena, notes)
    await arena.send_and_take(notes)


async def parked(arena: Arena, notes: Notes) -> None:
    """The run waits for a message and nobody has it."""
    await running(arena, notes)
    await arena.park(notes)


async def on_hold(arena: Arena, notes: Notes) -> None:
    """The run waits for an operator."""
    await running(arena, notes)
    await arena.park(notes, reason=Reason.CRASH_LOOP)


async def asked_to_hold(arena: Arena, notes: Notes) -> None:
    """Runner a has the run, with a suspend in its mailbox."""
    await running(arena, notes)
    message = Message(notes.key, "asked", MessageKind.SUSPEND)
    await arena.store.runs.send_message(message, mailbox_limit=10)
    notes.seen["before"] = 1


async def parked_and_due(arena: Arena, notes: Notes) -> None:
    """The run's timer is due and nobody has it."""
    await running(arena, notes)
    await arena.park(notes, reason=Reason.TIMER, wake_at=MOMENT)


async def family(arena: Arena, notes: Notes) -> None:
    """Runner a has the run and two children of it."""
    await arena.start(notes, "", "c1", "c2")
    await arena.claim(notes)


async def stray(arena: Arena, notes: Notes) -> None:
    """The run has been started, and runner a, who holds its shard, does not know its workflow."""
    await pending(arena, notes)
    await arena.mark(notes)


async def stray_with_mail(arena: Arena, notes: Notes) -> None:
    """The same, and a message has made it due again."""
    await stray(arena, notes)
    message = Message(notes.key, "early", MessageKind.SIGNAL)
    await arena.store.runs.send_message(message, mailbox_limit=10)
    notes.seen["before"] = 1


async def lent(arena: Arena, notes: Notes) -> None:
    """Runner a has the run, whose shard runner b holds without knowing its workflow."""
    await pending(arena, notes)
    await arena.move(notes)
    await arena.mark(notes, 2)
    await arena.lend(notes, 1)
