"""Mailboxes: order, duplicates, limits, and what sending does to a run (R6)."""

from __future__ import annotations

import asyncio

import pytest

from perdure.storage.clock import to_instant
from perdure.storage.errors import DataRefused
from perdure.storage.model import Message, MessageKind, Reason, SendStatus, Verdict
from tests.contract.world import World, entry, write

ODD_TEXTS = [
    "plain",
    "",
    " ",
    'it\'s "quoted" \\ 100 %s $1 :name',
    '{"json": ["x", null, 1e5]}',
    "naïve 🏁\u200d\u2028",
    "line\r\nbreak\ttab",
    "null",
    "1",
    "x" * 100_000,
]


async def test_a_message_arrives_as_it_was_sent(world: World) -> None:
    new = world.new_run("r1")
    await world.runs.start_runs([new])
    before = await world.now()
    outcome = await world.send("r1", "m1", name="approve", body='{"ok": true}')
    assert (outcome.status, outcome.slot) == (SendStatus.DELIVERED, new.slot)
    mailbox = (await world.runs.read_mailboxes(["r1"]))["r1"]
    (message,) = mailbox.messages
    assert (message.run_id, message.message_id, message.kind) == ("r1", "m1", MessageKind.SIGNAL)
    assert (message.name, message.body, message.wake_seq) == ("approve", '{"ok": true}', 1)
    assert message.format == Message("r1", "m", MessageKind.SIGNAL).format
    assert before <= message.sent_at <= mailbox.db_now <= await world.now()
    assert mailbox.wake_seq == 1


@pytest.mark.parametrize("text", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
async def test_odd_texts_come_through(world: World, text: str) -> None:
    await world.start("r1")
    await world.send("r1", "m" + text[:100], name=text[:100], body=text)
    (message,) = (await world.runs.read_mailboxes(["r1"]))["r1"].messages
    assert (message.message_id, message.name, message.body) == ("m" + text[:100], text[:100], text)


async def test_messages_keep_the_order_in_which_they_were_stored(world: World) -> None:
    await world.start("r1")
    names = [f"m{number}" for number in (5, 3, 9, 1, 7)]
    await world.deliver("r1", *names)
    mailbox = (await world.runs.read_mailboxes(["r1"]))["r1"]
    assert [message.message_id for message in mailbox.messages] == names
    assert [message.wake_seq for message in mailbox.messages] == [1, 2, 3, 4, 5]
    assert mailbox.wake_seq == 5


async def test_messages_sent_at_once_get_different_places(world: World) -> None:
    await world.start("r1")
    await asyncio.gather(*(world.send("r1", f"m{number}") for number in range(20)))
    mailbox = (await world.runs.read_mailboxes(["r1"]))["r1"]
    assert [message.wake_seq for message in mailbox.messages] == list(range(1, 21))


async def test_a_duplicate_changes_nothing(world: World) -> None:
    await world.start("r1")
    await world.send("r1", "m1", body="first")
    outcome = await world.send("r1", "m1", name="other", body="second")
    assert outcome.status is SendStatus.DUPLICATE
    assert outcome.slot is not None
    mailbox = (await world.runs.read_mailboxes(["r1"]))["r1"]
    assert [(message.name, message.body) for message in mailbox.messages] == [("go", "first")]
    assert mailbox.wake_seq == 1


async def test_a_duplicate_is_known_after_it_was_consumed(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1")
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)], consumed=[("m1", 1)]))
    assert (await world.send("r1", "m1")).status is SendStatus.DUPLICATE
    assert await world.mailbox("r1") == []
    assert await world.wake_seq("r1") == 1


async def test_a_duplicate_wakes_nobody(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.deliver("r1", "m1")
    run = await runner.claim_one("r1")
    assert await runner.park(run, wake_at=None, seen=1) is Verdict.PARKED
    await world.send("r1", "m1")
    assert (await world.record("r1")).wake_at is None
    assert await runner.claim() == {}


async def test_one_id_may_be_sent_to_two_runs(world: World) -> None:
    await world.start("r1", "r2")
    await world.deliver("r1", "m1")
    await world.deliver("r2", "m1")
    await world.deliver("r2", "M1", "m1 ")
    assert await world.mailbox("r2") == ["m1", "M1", "m1 "]


async def test_an_ended_and_an_unknown_run_are_told_apart(world: World) -> None:
    runner = await world.runner()
    new = world.new_run("r1")
    await world.runs.start_runs([new])
    await runner.finish(await runner.claim_one("r1"))
    outcome = await world.send("r1")
    assert (outcome.status, outcome.slot) == (SendStatus.ENDED, new.slot)
    unknown = await world.send("r2")
    assert (unknown.status, unknown.slot) == (SendStatus.UNKNOWN_RUN, None)
    assert await world.runs.read_mailboxes(["r1", "r2"]) == {}


async def test_a_full_mailbox_refuses_until_something_was_taken(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    assert (await world.send("r1", "m1", limit=2)).status is SendStatus.DELIVERED
    assert (await world.send("r1", "m2", limit=2)).status is SendStatus.DELIVERED
    outcome = await world.send("r1", "m3", limit=2)
    assert outcome.status is SendStatus.FULL
    assert await world.wake_seq("r1") == 2
    assert (await world.send("r1", "m2", limit=2)).status is SendStatus.DUPLICATE
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)], consumed=[("m1", 1)]))
    assert (await world.send("r1", "m3", limit=2)).status is SendStatus.DELIVERED
    assert await world.mailbox("r1") == ["m2", "m3"]


async def test_a_message_pulls_a_timer_forward_and_never_back(world: World) -> None:
    runner = await world.runner()
    await world.start("early", "late")
    now = await world.now()
    for run_id, run in (await runner.claim()).items():
        await runner.park(run, wake_at=to_instant(now + 60 if run_id == "late" else now))
    early = (await world.record("early")).wake_at
    await world.deliver("early", "m1")
    await world.deliver("late", "m1")
    assert (await world.record("early")).wake_at == early
    late = (await world.record("late")).wake_at
    assert late is not None
    assert now <= late <= await world.now()


async def test_a_held_run_collects_without_becoming_due(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.park(await runner.claim_one("r1"), reason=Reason.OPERATOR)
    await world.deliver("r1", "m1", "m2")
    record = await world.record("r1")
    assert (record.wake_at, record.unread, record.hold) == (None, 2, "operator")


@pytest.mark.parametrize("body", ["a\0b", "\udfff"], ids=["nul", "surrogate"])
async def test_a_body_that_cannot_be_stored_is_refused(world: World, body: str) -> None:
    await world.start("r1")
    with pytest.raises(DataRefused):
        await world.send("r1", "m1", body=body)
    assert await world.mailbox("r1") == []
    assert await world.wake_seq("r1") == 0
    await world.deliver("r1", "m1")


async def test_many_mailboxes_in_one_read(world: World) -> None:
    names = [f"r{number}" for number in range(200)]
    await world.start(*names)
    for name in names[::50]:
        await world.deliver(name, "m1", "m2")
    mailboxes = await world.runs.read_mailboxes([*names, "unknown"])
    assert sorted(mailboxes) == sorted(names)
    assert [name for name in names if mailboxes[name].messages] == names[::50]
    assert await world.runs.read_mailboxes([]) == {}


async def test_a_mailbox_has_a_limit_in_bytes(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")

    async def send(message_id: str, body: str | None, **limits: int) -> SendStatus:
        message = Message("r1", message_id, MessageKind.SIGNAL, name="go", body=body)
        limits = {"mailbox_limit": 10, "mailbox_bytes": 1_000} | limits
        return (await world.runs.send_message(message, **limits)).status

    assert await send("m1", "ü" * 300) is SendStatus.DELIVERED  # 600 bytes
    assert await send("m2", "x" * 401) is SendStatus.HEAVY
    assert await send("m1", "x" * 401) is SendStatus.DUPLICATE
    assert await send("m2", "x" * 400) is SendStatus.DELIVERED
    assert await send("m3", None) is SendStatus.DELIVERED
    assert await send("m4", "x") is SendStatus.HEAVY
    assert await send("m4", "x", mailbox_limit=3) is SendStatus.FULL
    assert await world.wake_seq("r1") == 3
    run = await runner.claim_one("r1")
    await runner.commit(write(run, entries=[entry(1)], consumed=[("m1", 1)]))
    assert await send("m4", "x" * 600) is SendStatus.DELIVERED
    assert await world.mailbox("r1") == ["m2", "m3", "m4"]
