"""What a body promises its engine: delivery, cancel, messages, retries, parking, mismatches, ends.

One file because all of it is one contract, checked with the same small bodies and the same port.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace as changed
from typing import Any

import pytest

from perdure.runtime.body import Body, Idle, JournalMismatch, MessageWait, StepCall
from perdure.runtime.body.body import CANCEL_TEXT
from perdure.storage.model import EntryKind, Message, MessageKind, Reason
from tests.unit.body.driving import EPOCH, Life, Sent, StepFailed, Timing, Work, call_of, replay

Main = Callable[[Body], Coroutine[Any, Any, Any]]


def step(body: Body, name: str, *, mode: str = "ok", seconds: float = 1.0) -> Any:
    return body.step(call_of(name, Work(name, mode, seconds)))


def wait(body: Body, name: str, timeout: float | None = None) -> Any:
    return body.wait_message(MessageWait(name, str, timeout))


def since(instant: float) -> float:
    return round(instant - EPOCH, 6)


def kinds(life: Life) -> list[str]:
    return [entry.kind.value for entry in life.entries]


def every_prefix(main: Main, life: Life, **more: Any) -> None:
    """Each prefix of the journal leads to the same end, the whole one without a new entry."""
    for upto in range(len(life.entries) + 1):
        again = replay(main, life, upto, **more).run()
        assert again.ending is not None
        assert (again.ending.kind, again.ending.value) == (life.ending.kind, life.ending.value)  # type: ignore[union-attr]
    assert again.entries == life.entries


# -- steps


@pytest.mark.req("WF5", "WF6")
def test_steps_overlap_and_replay_without_running() -> None:
    async def main(body: Body) -> Any:
        return await asyncio.gather(step(body, "a", seconds=3), step(body, "b", seconds=2))

    life = Life(main).run()
    assert life.result() == ["r(a)", "r(b)"]
    assert since(life.host.now) == 3
    again = replay(main, life).run()
    assert again.result() == ["r(a)", "r(b)"]
    assert again.started == []


@pytest.mark.req("WF6")
def test_only_what_has_no_entry_runs_again() -> None:
    async def main(body: Body) -> Any:
        return await asyncio.gather(step(body, "a", seconds=3), step(body, "b", seconds=2))

    life = Life(main).run()
    again = replay(main, life, 1).run()
    assert [key for key, _ in again.started] == ["0.0/a#0"]


@pytest.mark.req("WF7")
def test_keys_are_path_name_and_occurrence() -> None:
    async def branch(body: Body) -> None:
        await step(body, "a")
        await asyncio.gather(step(body, "a"), step(body, "b"))

    async def main(body: Body) -> None:
        await step(body, "a")
        await step(body, "a")
        async with asyncio.TaskGroup() as group:
            group.create_task(branch(body))
            group.create_task(branch(body))

    keys = set(Life(main).run().keys())
    branches = {f"0.{i}{rest}" for i in (0, 1) for rest in ("/a#0", ".0/a#0", ".1/b#0")}
    assert keys == {"0/a#0", "0/a#1", *branches}


@pytest.mark.req("WF7")
def test_a_step_takes_its_key_where_it_is_awaited() -> None:
    async def main(body: Body) -> None:
        second, first = step(body, "a"), step(body, "a", seconds=2)
        await first
        await asyncio.create_task(second)

    assert Life(main).run().keys() == ["0/a#0", "0.0/a#0"]


def test_keys_stay_short_however_deep_tasks_nest() -> None:
    async def nest(body: Body, depth: int) -> str:
        if depth == 0:
            return str(await step(body, "a"))
        return str(await asyncio.create_task(nest(body, depth - 1)))

    async def main(body: Body) -> Any:
        return await asyncio.gather(nest(body, 150), nest(body, 150))

    life = Life(main).run()
    assert list(life.result()) == ["r(a)", "r(a)"]
    assert len(set(life.keys())) == 2
    assert max(map(len, life.keys())) < 140
    assert replay(main, life).run().result() == life.result()


def test_a_recorded_error_is_a_new_exception_for_each_wait() -> None:
    async def main(body: Body) -> list[BaseException]:
        caught: list[BaseException] = []
        for _ in range(2):
            try:
                await step(body, "a", mode="fail")
            except StepFailed as error:
                caught.append(error)
        return caught

    life = Life(main).run()
    one, other = life.result()
    assert one is not other
    assert str(one) == str(other) == "a"
    assert [str(error) for error in replay(main, life).run().result()] == ["a", "a"]


def test_a_result_that_does_not_decode_is_raised_at_the_wait_in_both_lives() -> None:
    def decode(text: str | None) -> Any:
        raise ValueError(f"no number: {text}")

    async def main(body: Body) -> str:
        call = call_of("a", Work("a"))
        try:
            await body.step(changed(call, decode=decode))
        except ValueError as error:
            return str(error)
        return "decoded"

    life = Life(main).run()
    assert life.result() == "no number: r(a)"
    assert replay(main, life).run().result() == "no number: r(a)"


@pytest.mark.parametrize("error", [StopIteration("over"), SystemExit(3), asyncio.CancelledError()])
def test_any_recorded_error_can_be_raised(error: BaseException) -> None:
    async def main(body: Body) -> str:
        call = changed(call_of("a", Work("a", "fail")), recorded_error=lambda text: error)
        try:
            await body.step(call)
        except BaseException as caught:
            return f"{type(caught).__name__} {caught}"
        return ""

    expected = "RuntimeError StopIteration was raised: over"
    if not isinstance(error, StopIteration):
        expected = f"{type(error).__name__} {error}"
    life = Life(main).run()
    assert life.result() == replay(main, life).run().result() == expected


@pytest.mark.parametrize("error", [KeyError("decode"), SystemExit(3)])
def test_whatever_decoding_raises_is_raised_at_the_wait(error: BaseException) -> None:
    def fail(text: str | None) -> Any:
        raise error

    async def main(body: Body) -> None:
        await body.step(changed(call_of("a", Work("a")), decode=fail))

    life = Life(main).run()
    assert life.ending is not None
    assert life.ending.error is error


def test_a_failing_exception_handler_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def handler(loop: Any, context: Any) -> None:
        raise SystemExit(3)

    def bad() -> None:
        raise KeyError("callback")

    async def main(body: Body) -> str:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(handler)
        loop.call_soon(bad)
        return str(await step(body, "a"))

    assert Life(main).run().result() == "r(a)"
    assert "its exception handler failed" in caplog.text


def test_steps_start_only_when_what_came_before_the_call_is_durable() -> None:
    async def main(body: Body) -> None:
        await step(body, "a", seconds=0)
        await asyncio.gather(step(body, "b"), step(body, "c"))

    life = Life(main, timing=Timing(slow_commits=(5.0,)))
    life.until(lambda: len(life.entries) == 1)
    life.host.run(until=lambda: False, horizon=EPOCH + 4)
    assert [key for key, _ in life.started] == ["0/a#0"]
    assert life.body.idle() is None
    life.run()
    assert since(life.host.now) == 6
    assert sorted(key for key, _ in life.started) == ["0.0/b#0", "0.1/c#0", "0/a#0"]


# -- abandoned steps


@pytest.mark.req("WF17")
def test_a_late_result_is_recorded_and_skipped_in_both_lives() -> None:
    async def main(body: Body) -> str:
        try:
            async with asyncio.timeout(2):
                await step(body, "slow", mode="stubborn", seconds=50)
        except TimeoutError:
            return str(await step(body, "after", seconds=10))
        return ""

    life = Life(main).run()
    assert life.keys() == ["0/timer#0", "0/slow#0", "0/after#0"]
    assert life.abandoned == ["0/slow#0"]
    assert life.result() == "r(after)"
    assert [since(entry.at) for entry in life.entries] == [2, 3, 12]
    every_prefix(main, life)


def test_a_late_failed_attempt_is_recorded_and_skipped_in_both_lives() -> None:
    async def main(body: Body) -> str:
        try:
            async with asyncio.timeout(2):
                await step(body, "slow", mode="flaky", seconds=50)
        except TimeoutError:
            return str(await step(body, "after", seconds=10))
        return ""

    life = Life(main).run()
    assert kinds(life) == ["timer", "attempt", "step"]
    assert life.result() == "r(after)"
    every_prefix(main, life)


def test_a_step_called_and_cancelled_in_one_turn_never_starts() -> None:
    async def main(body: Body) -> None:
        task = asyncio.create_task(step(body, "a"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    life = Life(main).run()
    life.result()
    assert (life.started, life.abandoned, life.entries) == ([], [], [])


def test_a_result_nobody_waits_for_is_the_engines_mistake() -> None:
    life = Life(lambda body: step(body, "a"))
    life.until(lambda: bool(life.started))
    with pytest.raises(LookupError, match="0/b#0, which is not running"):
        life.body.step_done("0/b#0", attempt=1, output="1", error=None, started_at=EPOCH)


# -- retries


@pytest.mark.req("ST1")
def test_a_recorded_attempt_delays_the_next_and_counts_on_in_a_later_life() -> None:
    async def main(body: Body) -> Any:
        return await step(body, "a", mode="flaky")

    life = Life(main).run()
    assert life.result() == "r(a)"
    assert kinds(life) == ["attempt", "attempt", "step"]
    assert [attempt for _, attempt in life.started] == [1, 2, 3]
    assert since(life.host.now) == 1 + 1 + 1 + 2 + 1
    again = replay(main, life, 2)
    idle = again.until(lambda: again.quiet > 0).body.idle()
    assert idle == Idle(wake_at=EPOCH + 5, untimed=False, reason=Reason.RETRY)
    assert again.run().result() == "r(a)"
    assert [attempt for _, attempt in again.started] == [3]
    every_prefix(main, life)


# -- time


@pytest.mark.req("SL1", "WF11")
def test_run_time_is_that_of_the_last_entry() -> None:
    async def main(body: Body) -> list[float]:
        times = [body.now()]
        for seconds in (1, 2.5):
            await step(body, "a", seconds=seconds)
            times.append(body.now())
        await body.sleep(10)
        return [since(t) for t in (*times, asyncio.get_running_loop().time())]

    life = Life(main).run()
    assert life.result() == [0, 1, 3.5, 13.5]
    every_prefix(main, life)


@pytest.mark.req("SL1")
def test_sleeps_side_by_side_each_wake_at_their_own_time() -> None:
    async def nap(body: Body, seconds: float) -> float:
        await body.sleep(seconds)
        return since(body.now())

    async def main(body: Body) -> Any:
        return await asyncio.gather(*(nap(body, seconds) for seconds in (3, 1, 2, 1, 0, -5)))

    life = Life(main).run()
    assert life.result() == [3, 1, 2, 1, 0, 0]
    assert life.keys() == ["0.1/timer#0", "0.3/timer#0", "0.2/timer#0", "0.0/timer#0"]
    every_prefix(main, life)


@pytest.mark.req("SL1")
def test_a_past_instant_is_no_wait_and_a_future_one_wakes_at_it() -> None:
    async def main(body: Body) -> list[float]:
        await body.sleep_until(EPOCH - 100)
        early = since(body.now())
        await body.sleep_until(EPOCH + 7.5)
        return [early, since(body.now())]

    life = Life(main).run()
    assert life.result() == [0, 7.5]
    assert kinds(life) == ["timer"]


@pytest.mark.req("SL1")
def test_a_sleep_is_told_of_once_and_carries_its_name() -> None:
    async def main(body: Body) -> None:
        await body.sleep(60, "cool down")
        await asyncio.sleep(60)

    life = Life(main).run()
    assert [event.type for event in life.events] == ["timer-set"]
    told = json.loads(life.events[0].detail or "")
    assert told == {"key": "0/timer#0", "due": EPOCH + 60, "name": "cool down"}
    assert [entry.input for entry in life.entries] == ["cool down", None]
    assert replay(main, life).run().events == []


def test_a_timer_never_fires_early_and_its_time_can_be_stored() -> None:
    async def main(body: Body) -> float:
        before = body.now()
        await asyncio.sleep(0.0000004)
        return body.now() - before

    life = Life(main).run()
    assert life.result() >= 0.0000004
    assert life.entries[0].output == str(round(EPOCH * 1_000_000) + 1)


def test_a_timer_for_ever_is_no_time_to_wake_at() -> None:
    async def main(body: Body) -> None:
        await asyncio.wait_for(step(body, "a"), timeout=1e18)
        await asyncio.sleep(float("inf"))

    life = Life(main).run()
    idle = life.body.idle()
    assert idle is not None
    assert (idle.wake_at, idle.stuck) == (None, False)


def test_nan_is_no_time() -> None:
    async def main(body: Body) -> None:
        await asyncio.sleep(float("nan"))

    ending = Life(main).run().ending
    assert ending is not None
    assert isinstance(ending.error, ValueError)


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main(body: Body) -> int:
        for _ in range(1000):
            async with asyncio.timeout(60):
                await step(body, "a", seconds=0)
        return len(body._loop._heap)

    assert Life(main).run().result() < 100


def test_a_result_that_ends_when_its_timeout_is_due_comes_too_late() -> None:
    async def main(body: Body) -> str:
        try:
            async with asyncio.timeout(5):
                return str(await step(body, "a", seconds=5))
        except TimeoutError:
            return "too late"

    assert Life(main).run().result() == "too late"


# -- messages


@pytest.mark.req("SL2")
def test_messages_are_taken_when_waited_for_oldest_first() -> None:
    async def main(body: Body) -> list[str]:
        await step(body, "a", seconds=10)
        return [await wait(body, "s"), await wait(body, "s"), await wait(body, "other")]

    life = Life(main, sent=[Sent(1, "s"), Sent(2, "nobody"), Sent(3, "s"), Sent(20, "other")]).run()
    assert life.result() == ["m1", "m3", "m4"]
    assert life.keys() == ["0/a#0", "0/signal:s#0", "0/signal:s#1", "0/signal:other#0"]
    assert set(life.consumed) == {"id-1", "id-3", "id-4"}
    assert replay(main, life).run().result() == ["m1", "m3", "m4"]


@pytest.mark.req("SL2")
def test_the_wait_that_began_first_gets_the_message() -> None:
    async def main(body: Body) -> Any:
        return await asyncio.gather(wait(body, "s"), wait(body, "s"))

    assert Life(main, sent=[Sent(1, "s"), Sent(2, "s")]).run().result() == ["m1", "m2"]


@pytest.mark.req("SL2")
def test_a_wait_times_out_at_its_deadline_in_both_lives() -> None:
    async def main(body: Body) -> float:
        try:
            await wait(body, "s", 5)
        except TimeoutError:
            return since(body.now())
        return -1

    life = Life(main, sent=[Sent(6, "s")]).run()
    assert life.result() == 5
    assert kinds(life) == ["timer"]
    every_prefix(main, life)
    assert life.consumed == {}


@pytest.mark.req("SL2")
def test_a_message_sent_before_the_deadline_wins_however_late_it_is_read() -> None:
    async def main(body: Body) -> str:
        try:
            return str(await wait(body, "s", 5))
        except TimeoutError:
            return "too late"

    life = Life(main, sent=[Sent(4.9, "s")])
    life._read_mail = lambda: None  # type: ignore[method-assign]  # no hint arrives
    asked: list[float] = []

    def want_mail() -> None:
        asked.append(since(life.host.now))
        life.body.mail(life._stored, life.host.now)

    life.want_mail = want_mail  # type: ignore[method-assign]
    assert life.run().result() == "m1"
    assert asked == [5]
    assert since(life.entries[0].at) == 4.9


@pytest.mark.req("SL2")
def test_a_timer_waits_for_the_mailbox_of_its_time() -> None:
    """The database's clock is behind ours: its mailbox is read again once it has reached the deadline, not at once."""

    async def main(body: Body) -> str:
        try:
            return str(await wait(body, "s", 5))
        except TimeoutError:
            return "too late"

    life = Life(main)
    asked: list[float] = []

    def want_mail() -> None:
        asked.append(since(life.host.now))
        life.body.mail([], life.host.now - 2)

    life.want_mail = want_mail  # type: ignore[method-assign]
    assert life.run().result() == "too late"
    assert asked == [5, 7]


@pytest.mark.req("SL2")
def test_a_timeout_of_zero_looks_into_the_mailbox() -> None:
    async def main(body: Body) -> list[str]:
        await step(body, "a", seconds=3)
        found = []
        for _ in range(2):
            try:
                found.append(await wait(body, "s", 0))
            except TimeoutError:
                found.append("nothing")
        return found

    sent = [Sent(1, "s"), Sent(9, "s")]
    life = Life(main, sent=sent).run()
    assert life.result() == ["m1", "nothing"]
    every_prefix(main, life, sent=sent)


def test_a_message_read_again_before_it_is_durable_is_not_taken_twice() -> None:
    async def main(body: Body) -> list[str]:
        return [await wait(body, "s"), await wait(body, "s")]

    life = Life(main, sent=[Sent(1, "s")], timing=Timing(slow_commits=(50.0,)))
    life.until(lambda: len(life.entries) == 1)
    life._stored.append(changed(life._stored[0], message_id="id-9", body="next"))
    life.body.mail(life._stored, life.host.now)
    assert life.run().result() == ["m1", "next"]


def test_a_message_that_does_not_decode_is_raised_at_the_wait() -> None:
    async def main(body: Body) -> str:
        try:
            await body.wait_message(MessageWait("s", lambda text: int(text or "")))
        except ValueError:
            return "no number"
        return "number"

    life = Life(main, sent=[Sent(1, "s")]).run()
    assert life.result() == replay(main, life).run().result() == "no number"


def test_a_wait_that_lasts_is_told_of() -> None:
    async def main(body: Body) -> None:
        await wait(body, "s", 60)
        await wait(body, "s")

    life = Life(main, sent=[Sent(1, "s"), Sent(1, "s")]).run()
    assert [event.type for event in life.events] == ["signal-awaited"]
    told = json.loads(life.events[0].detail or "")
    assert told == {"key": "0/signal:s#0", "due": EPOCH + 60, "name": "s"}


# -- cancel


@pytest.mark.req("SL5", "ST7")
def test_a_cancel_is_an_entry_and_its_handler_may_run_steps() -> None:
    async def main(body: Body) -> str:
        try:
            await step(body, "slow", seconds=100)
        except asyncio.CancelledError as error:
            await step(body, "undo")
            await body.sleep(3)
            return f"{error}; undone at {since(body.now())}"
        return ""

    life = Life(main, sent=[Sent(5, "cancel"), Sent(6, "cancel"), Sent(7, "cancel")]).run()
    assert life.result() == f"{CANCEL_TEXT}; undone at 9.0"
    assert life.body.cancelled
    assert life.ending is not None
    assert life.ending.kind == "returned"
    assert kinds(life) == ["cancel", "step", "timer"]
    assert (life.entries[0].key, life.entries[0].output) == ("", "m1")
    assert life.abandoned == ["0/slow#0"]
    for upto in range(1, 4):
        again = replay(main, life, upto, sent=[Sent(0, "cancel"), Sent(6, "cancel")]).run()
        assert again.result() == f"{CANCEL_TEXT}; undone at 9.0"
        assert kinds(again).count("cancel") == 1


@pytest.mark.req("SL5")
def test_a_cancel_nobody_handles_ends_the_run_as_cancelled() -> None:
    life = Life(lambda body: wait(body, "s"), sent=[Sent(5, "cancel")]).run()
    assert life.ending is not None
    assert life.ending.kind == "cancelled"
    assert replay(lambda body: wait(body, "s"), life).run().ending == life.ending


def test_cancelled_error_of_a_run_nobody_cancelled_is_a_failure() -> None:
    async def main(body: Body) -> None:
        raise asyncio.CancelledError

    ending = Life(main).run().ending
    assert ending is not None
    assert ending.kind == "raised"
    assert isinstance(ending.error, asyncio.CancelledError)
    assert "nobody cancelled the run" in str(ending.error)


def test_another_error_after_a_cancel_is_a_failure() -> None:
    async def main(body: Body) -> None:
        try:
            await wait(body, "s")
        finally:
            raise KeyError("clean-up")

    life = Life(main, sent=[Sent(5, "cancel")]).run()
    with pytest.raises(KeyError):
        life.result()


# -- mismatches (R14)


def mismatch(main: Main, other: Main, **fields: Any) -> str:
    """The journal of ``main`` replayed by ``other``; ``fields`` change its first entry."""
    life = Life(main).run()
    life.entries[0] = changed(life.entries[0], **fields)
    again = replay(other, life).run()
    assert again.ending is not None
    assert again.ending.kind == "nondeterminism"
    assert isinstance(again.ending.error, JournalMismatch)
    assert again.entries == life.entries
    assert again.started == []
    return str(again.ending.error)


@pytest.mark.req("WF7")
def test_another_input_under_the_same_key_names_both() -> None:
    async def before(body: Body) -> None:
        await body.step(call_of("charge", Work("five")))

    async def after(body: Body) -> None:
        await body.step(call_of("charge", Work("six")))

    said = mismatch(before, after)
    assert 'step 0/charge#0 was recorded with input "five"' in said
    assert 'calls it with input "six"' in said
    assert "resume" in said
    assert "input of hash" in mismatch(before, after, input=None)


@pytest.mark.req("WF7")
def test_a_step_that_is_not_called_any_more_is_named() -> None:
    async def before(body: Body) -> None:
        await step(body, "old")

    async def after(body: Body) -> None:
        await asyncio.gather(step(body, "new"), wait(body, "s", 60))

    said = mismatch(before, after)
    assert 'entry 1 of the journal is step 0/old#0 with input "old"' in said
    assert "it waits for step 0.0/new#0, signal wait 0.1/signal:s#0, timer 0.1/timer#0." in said


def test_a_body_that_ends_before_its_journal_is_named() -> None:
    async def after(body: Body) -> str:
        return "nothing"

    said = mismatch(lambda body: step(body, "old"), after)
    assert "the body ended before entry 1 of its journal, step 0/old#0" in said


def test_a_timer_that_is_not_set_any_more_is_named() -> None:
    said = mismatch(lambda body: body.sleep(5), lambda body: wait(body, "s"))
    assert (
        "timer 0/timer#0, but the body does not wait for that; it waits for signal wait 0/signal:s#0"
        in said
    )


def test_a_signal_that_is_not_awaited_any_more_is_named() -> None:
    life = Life(lambda body: wait(body, "s"), sent=[Sent(1, "s")]).run()
    again = replay(lambda body: step(body, "a"), life).run()
    assert again.ending is not None
    assert "signal wait 0/signal:s#0" in str(again.ending.error)


def test_an_entry_of_a_kind_not_written_yet_is_not_guessed_at() -> None:
    said = mismatch(
        lambda body: step(body, "a"), lambda body: step(body, "a"), kind=EntryKind.CHILD
    )
    assert "'child'" in said


def test_a_body_with_a_mismatch_is_unwound_without_its_handlers() -> None:
    ran: list[str] = []

    async def after(body: Body) -> None:
        try:
            await step(body, "new")
        except (Exception, asyncio.CancelledError):
            ran.append("handler")

    mismatch(lambda body: step(body, "old"), after)
    assert ran == []


# -- parking


def idle_of(main: Main, **more: Any) -> Idle | None:
    life = Life(main, **more)
    life.until(lambda: life.quiet > 0)
    return life.body.idle()


@pytest.mark.req("SL7")
def test_idle_says_until_when_and_for_what() -> None:
    async def both(body: Body) -> None:
        await asyncio.gather(body.sleep(60), body.sleep(30))

    assert idle_of(both) == Idle(EPOCH + 30, untimed=False, reason=Reason.TIMER)
    assert idle_of(lambda body: wait(body, "s")) == Idle(None, untimed=True, reason=Reason.SIGNAL)
    assert idle_of(lambda body: wait(body, "s", 9)) == Idle(EPOCH + 9, True, Reason.SIGNAL)
    assert idle_of(lambda body: step(body, "a")) is None


def test_a_body_that_waits_for_nothing_the_journal_knows_says_where() -> None:
    async def locked() -> None:
        await asyncio.Event().wait()

    async def main(body: Body) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(locked(), name="the lock")
            group.create_task(step(body, "a"))

    life = Life(main, sent=[Sent(50, "cancel")])
    life.until(lambda: since(life.host.now) >= 1 and life.quiet > 1)
    assert life.body.idle() == Idle(None, untimed=True, reason=Reason.SIGNAL, stuck=True)
    first, second = life.body.stuck_at()
    assert first.startswith("body at ")
    assert ".main (test_body.py:" in first
    assert second.startswith("the lock at ")
    assert ".locked (test_body.py:" in second
    ending = life.run().ending
    assert ending is not None
    assert ending.kind == "cancelled"


def test_frozen_bodies_hear_nothing() -> None:
    life = Life(lambda body: wait(body, "s"))
    life.until(lambda: life.quiet > 0)
    life.body.freeze()
    life.send("s")
    life.host.run(until=lambda: False, horizon=EPOCH + 9)
    assert life.entries == []
    life.body.thaw()
    assert life.run().result() == "m1"


def test_held_starts_are_reported_and_can_be_released() -> None:
    async def main(body: Body) -> None:
        await body.sleep(1)
        await step(body, "a")

    life = Life(main)
    life.body.hold_starts(True)
    life.run(horizon=50)
    idle = life.body.idle()
    assert idle == Idle(None, untimed=False, reason=Reason.RETRY, pending_starts=True)
    assert life.started == []
    life.body.hold_starts(False)
    life.run().result()


def test_a_body_is_not_idle_before_it_has_begun_or_in_replay() -> None:
    life = Life(lambda body: body.sleep(9))
    assert life.body.idle() is None
    life.body.begin()
    assert life.body.idle() is None


# -- ends


@pytest.mark.req("WF19")
def test_what_the_end_cuts_off_is_named() -> None:
    kept = []

    async def main(body: Body) -> str:
        kept.append(step(body, "forgotten"))
        kept.append(asyncio.create_task(step(body, "running", seconds=50), name="left over"))
        kept.append(asyncio.create_task(wait(body, "s"), name="listener"))
        await step(body, "a")
        return "done"

    life = Life(main).run()
    ending = life.ending
    assert ending is not None
    assert ending.value == "done"
    text = "\n".join(ending.warnings)
    assert "step 'forgotten' was called and never awaited" in text
    assert "step 'running' (0.0/running#0) was still running when the body ended" in text
    assert "'left over' was still pending" in text
    assert "'listener' was still pending" in text
    assert life.abandoned == ["0.0/running#0"]
    kept[0].close()
    life.body.step_done("0.0/running#0", attempt=1, output="1", error=None, started_at=EPOCH)
    life.host.run(until=lambda: False, horizon=EPOCH + 99)
    assert life.keys() == ["0/a#0"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), KeyError("x")])
def test_whatever_the_body_raises_is_its_failure(error: BaseException) -> None:
    async def main(body: Body) -> None:
        await step(body, "a")
        raise error

    ending = Life(main).run().ending
    assert ending is not None
    assert (ending.kind, ending.error) == ("raised", error)


def test_system_exit_in_a_child_reaches_who_awaits_it() -> None:
    async def child() -> None:
        raise SystemExit(3)

    async def main(body: Body) -> None:
        await asyncio.gather(child(), step(body, "a"))

    ending = Life(main).run().ending
    assert ending is not None
    assert isinstance(ending.error, SystemExit)


@pytest.mark.parametrize("error", [TypeError("takes no arguments"), SystemExit(3)])
def test_a_body_that_cannot_be_made_has_failed(error: BaseException) -> None:
    def main(body: Body) -> Any:
        raise error

    ending = Life(main).run().ending
    assert ending is not None
    assert ending.error is error


def test_after_the_end_every_call_is_harmless() -> None:
    life = Life(lambda body: step(body, "a")).run()
    body = life.body
    body.begin()
    body.kick()
    body.mail([Message("run-1", "id-1", MessageKind.CANCEL)], EPOCH)
    body.committed(7)
    body.freeze()
    body.thaw()
    body.hold_starts(True)
    body.step_done("0/a#0", attempt=1, output="1", error=None, started_at=EPOCH)
    body.attempt_failed("0/a#0", attempt=1, error="x", retry_at=EPOCH)
    life.host.run(until=lambda: False, horizon=EPOCH + 99)
    assert body.idle() is None
    assert body.unwind() == []
    assert len(life.entries) == 1


# -- turns


def test_a_long_turn_is_cut_into_slices() -> None:
    async def main(body: Body) -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    turns = []
    life = Life(main, timing=Timing(slice_seconds=-1.0))
    go = life.body._go

    def counted() -> None:
        turns.append(1)
        go()

    life.body._go = counted  # type: ignore[method-assign]
    life.run().result()
    assert len(turns) > 5


def test_a_body_that_turns_for_ever_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main(body: Body) -> None:
        while not done:  # noqa: ASYNC110
            await asyncio.sleep(0)

    done: list[bool] = []
    life = Life(main, timing=Timing(slice_seconds=-1.0))
    turns = []
    go = life.body._go

    def counted() -> None:
        turns.append(1)
        if len(turns) == 2100:
            done.append(True)
        go()

    life.body._go = counted  # type: ignore[method-assign]
    life.run()
    assert [r for r in caplog.records if "keeps turning" in r.getMessage()]


@pytest.mark.parametrize("turns", [0, 3000])
def test_a_cancel_waits_for_the_end_of_a_long_replay(
    caplog: pytest.LogCaptureFixture, turns: int
) -> None:
    """A replay delivers all the time, in slices; that is not spinning, nor is it to work between two entries."""

    async def main(body: Body) -> None:
        try:
            for _ in range(steps):
                await step(body, "a")
            for _ in range(turns * 16 if body.replaying else 0):
                await asyncio.sleep(0)
            await step(body, "last")
            await body.sleep(1000)
        except asyncio.CancelledError:
            await step(body, "compensate")
            raise

    steps = 10 if turns else 10_500
    life = Life(main).run(horizon=steps + 50)
    assert len(life.entries) == steps + 1
    sent = [Sent(life.entries[-1].at - EPOCH, "cancel")]
    second = replay(main, life, timing=Timing(slice_seconds=-1.0), sent=sent).run(20_000)
    assert second.ending is not None
    assert second.ending.kind == "cancelled"
    assert not second.ending.warnings
    assert second.keys()[-1] == "0/compensate#0"
    assert not [r for r in caplog.records if "keeps turning" in r.getMessage()]


def test_errors_in_callbacks_are_logged_once_and_not_on_replay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(body: Body) -> None:
        def bad() -> None:
            raise KeyError("callback")

        asyncio.get_running_loop().call_soon(bad)
        await step(body, "a")

    life = Life(main).run()
    assert len([r for r in caplog.records if "exception in callback" in r.getMessage()]) == 1
    replay(main, life).run()
    assert len([r for r in caplog.records if "exception in callback" in r.getMessage()]) == 1


def test_context_variables_reach_a_step_and_do_not_come_back() -> None:
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span", default="none")
    seen: list[str] = []

    async def main(body: Body) -> str:
        span.set("body")
        await step(body, "a", mode="flaky")
        return span.get()

    life = Life(main)
    start = life.start_step

    def start_step(key: str, call: StepCall, attempt: int, context: contextvars.Context) -> None:
        seen.append(context.run(span.get))
        context.run(span.set, "step")
        start(key, call, attempt, context)

    life.start_step = start_step  # type: ignore[method-assign]
    assert life.run().result() == "body"
    assert seen == ["body"] * 3
