"""What people and clients read, and retention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.storage.clock import to_instant
from perdure.storage.model import (
    Entry,
    EntryKind,
    Finish,
    OpenItems,
    Park,
    Reason,
    RunEvent,
    RunFilter,
    RunStatus,
    SendStatus,
    Verdict,
)
from tests.contract.world import WORKFLOW, World, entry, write


async def names(world: World, **wanted: object) -> list[str]:
    found = await world.runs.list_runs(RunFilter(**wanted))  # type: ignore[arg-type]
    return [record.run_id for record in found]


async def varied(world: World) -> None:
    """A run in each state, oldest first: succeeded, failed, cancelled, running, timed, held, pending."""
    runner = await world.runner()
    for run_id in ("succeeded", "failed", "cancelled", "running", "timed", "held"):
        await world.start(run_id, source="cron" if run_id == "failed" else "app")
    runs = await runner.claim()
    await runner.commit(
        write(runs["succeeded"], outcome=Finish(RunStatus.SUCCEEDED, result="1")),
        write(runs["failed"], outcome=Finish(RunStatus.FAILED, error='{"type": "E"}')),
        write(runs["cancelled"], outcome=Finish(RunStatus.CANCELLED, reason="user")),
        write(runs["timed"], outcome=Park(None, 0, Reason.TIMER)),
        write(runs["held"], outcome=Park(None, 0, Reason.OPERATOR)),
    )
    await world.start("pending", workflow="tests.other")


async def test_the_servers_clock_goes_on(world: World) -> None:
    first = await world.now()
    second = await world.now()
    assert first == to_instant(first)
    assert second >= first


async def test_an_unknown_run_is_none(world: World) -> None:
    assert await world.runs.read_run("unknown") is None


async def test_results_are_those_of_ended_runs_only(world: World) -> None:
    await varied(world)
    ended = ["succeeded", "failed", "cancelled"]
    found = await world.runs.read_results([*ended, "running", "held", "pending", "unknown"])
    assert sorted(found) == sorted(ended)
    assert found["succeeded"].result == "1"
    assert found["failed"].error == '{"type": "E"}'
    assert found["cancelled"].status is RunStatus.CANCELLED
    assert all(record.finished_at is not None for record in found.values())
    assert await world.runs.read_results([]) == {}


async def test_a_thousand_results_in_one_call(world: World) -> None:
    runner = await world.runner()
    run_ids = [f"run-{number}" for number in range(1_000)]
    await world.start(*run_ids)
    runs = await runner.claim()
    ends = [
        write(run, outcome=Finish(RunStatus.SUCCEEDED, result=f'"{run.run_id}"'))
        for run in runs.values()
    ]
    await runner.commit(*ends[:500])
    await runner.commit(*ends[500:])
    found = await world.runs.read_results(run_ids)
    assert {run_id: found[run_id].result for run_id in run_ids} == {
        run_id: f'"{run_id}"' for run_id in run_ids
    }


async def test_lists_are_newest_first_and_paged(world: World) -> None:
    await varied(world)
    everything = ["pending", "held", "timed", "running", "cancelled", "failed", "succeeded"]
    assert await names(world) == everything
    assert await names(world, limit=2) == everything[:2]
    assert await names(world, limit=2, offset=3) == everything[3:5]
    assert await names(world, limit=5, offset=7) == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"statuses": [RunStatus.SUCCEEDED]}, ["succeeded"]),
        ({"statuses": [RunStatus.FAILED, RunStatus.CANCELLED]}, ["cancelled", "failed"]),
        ({"statuses": [RunStatus.PENDING]}, ["pending"]),
        ({"statuses": [RunStatus.RUNNING]}, ["running"]),
        ({"statuses": [RunStatus.SUSPENDED]}, ["held", "timed"]),
        ({"statuses": [RunStatus.RUNNING, RunStatus.FAILED]}, ["running", "failed"]),
        ({"workflow": "tests.other"}, ["pending"]),
        ({"workflow": "tests"}, []),
        ({"workflow": WORKFLOW, "statuses": [RunStatus.PENDING]}, []),
        ({"source": "cron"}, ["failed"]),
        ({"reason": "operator"}, ["held"]),
        ({"reason": "user"}, ["cancelled"]),
        ({"id_prefix": "f"}, ["failed"]),
        ({"id_prefix": "F"}, []),
        ({"id_prefix": "%"}, []),
        ({"id_prefix": "_"}, []),
        ({"since": 4_000_000_000.0}, []),
        ({"since": 0.0, "source": "cron", "workflow": WORKFLOW, "id_prefix": "fail"}, ["failed"]),
    ],
)
async def test_each_filter_finds_its_runs(
    world: World, wanted: dict[str, object], found: list[str]
) -> None:
    await varied(world)
    assert await names(world, **wanted) == found


async def test_since_includes_its_own_instant(world: World) -> None:
    await world.start("old")
    await world.start("new")
    created = (await world.record("new")).created_at
    assert await names(world, since=created) == ["new"]
    assert await names(world, since=to_instant(created + 0.000001)) == []


async def test_prefixes_are_compared_byte_for_byte(world: World) -> None:
    await world.start("a", "aä", "a%b", "a\U0010ffff", "A")
    assert sorted(await names(world, id_prefix="a")) == sorted(["a", "aä", "a%b", "a\U0010ffff"])
    assert await names(world, id_prefix="a%") == ["a%b"]
    assert await names(world, id_prefix="aä") == ["aä"]


async def test_counts_are_of_runs_that_have_not_ended(world: World) -> None:
    await varied(world)
    assert await world.runs.count_runs() == {"pending": 1, "running": 1, "suspended": 2}


@pytest.mark.req("DB1")
async def test_the_timeline_says_what_happened_in_order(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await world.send("r1", "m1", name="approval")
    run = await runner.claim_one("r1")
    set_at, fired_at, taken_at = (
        to_instant(run.entered_at + seconds) for seconds in (0.000001, 0.000002, 0.000003)
    )
    await runner.commit(
        write(
            run,
            entries=[
                Entry(1, EntryKind.TIMER, "/nap#0", at=fired_at),
                Entry(2, EntryKind.SIGNAL, "/approval#0", at=taken_at),
            ],
            consumed=[("m1", 2)],
            events=[RunEvent("timer-set", set_at, "nap")],
        )
    )
    await runner.commit(write(run, revision=run.revision + 1, outcome=Finish(RunStatus.SUCCEEDED)))
    events = await world.runs.read_events("r1")
    # The message went with the mailbox, its entry stays.
    assert [event.type for event in events if event.type != "signal-sent"] == [
        "run-started",
        "timer-set",
        "timer-fired",
        "signal-received",
        "run-succeeded",
    ]
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert RunEvent("timer-set", set_at, "nap") in events
    assert [event.at for event in events if event.type == "run-started"] == [run.entered_at]
    assert await world.runs.read_events("unknown") == []


async def test_a_message_in_the_mailbox_is_on_the_timeline(world: World) -> None:
    await world.start("r1")
    await world.send("r1", "m1", name="approval")
    (event,) = await world.runs.read_events("r1")
    assert (event.type, event.detail) == ("signal-sent", "approval")


async def test_finished_runs_are_deleted_oldest_first_with_all_they_left(world: World) -> None:
    runner = await world.runner()
    await world.start("a", "b", "c", "live")
    runs = await runner.claim()
    for run_id in ("b", "a", "c"):
        await runner.commit(
            write(
                runs[run_id],
                entries=[entry(1)],
                events=[RunEvent("timer-set", 1.0)],
                outcome=Finish(RunStatus.SUCCEEDED),
            )
        )
    await runner.commit(write(runs["live"], entries=[entry(1)]))
    later = await world.now() + 1
    assert await world.runs.delete_finished(runs["a"].entered_at, 10) == 0
    assert await world.runs.delete_finished(later, 2) == 2
    assert sorted(await names(world)) == ["c", "live"]
    assert await world.runs.delete_finished(later, 10) == 1
    assert await world.runs.delete_finished(later, 10) == 0
    assert await names(world) == ["live"]
    journals = await world.runs.read_journals(["a", "b", "c", "live"])
    assert [len(journals[run_id]) for run_id in ("a", "b", "c", "live")] == [0, 0, 0, 1]
    assert await world.runs.read_events("a") == []


async def test_the_id_of_a_deleted_run_is_free_again(world: World) -> None:
    runner = await world.runner()
    await world.start("r1")
    await runner.finish(await runner.claim_one("r1"))
    await world.runs.delete_finished(await world.now() + 1, 10)
    assert (await world.send("r1")).status is SendStatus.UNKNOWN_RUN
    assert (await world.start("r1"))[0].created


async def journals_of(world: World, **lengths: int) -> None:
    """Runs with so many entries, each of about 300 bytes."""
    runner = await world.runner()
    await world.start(*lengths)
    claimed = await runner.claim()
    for run_id, length in lengths.items():
        entries = [entry(seq, output="x" * 100) for seq in range(1, length + 1)]
        await runner.commit(write(claimed[run_id], entries=entries))


async def pages(
    world: World, *run_ids: str, **limits: int
) -> tuple[list[dict[str, list[int]]], dict[str, list[int]]]:
    """The seqs of each page until there is no more, and of all together."""
    found: list[dict[str, list[int]]] = []
    whole: dict[str, list[int]] = {run_id: [] for run_id in run_ids}
    after = dict.fromkeys(run_ids, 0)
    while after:
        page = await world.runs.read_journal_page(after, **limits)
        found.append({run_id: [e.seq for e in entries] for run_id, entries in page.entries.items()})
        for run_id, seqs in found[-1].items():
            whole[run_id] += seqs
        assert page.more <= set(after)
        after = {run_id: (whole[run_id] or [0])[-1] for run_id in after if run_id in page.more}
        assert len(found) < 50, "it does not end"
    return found, whole


async def test_journals_come_in_pages_of_so_many_entries(world: World) -> None:
    await journals_of(world, long=7, short=2, none=0)
    found, whole = await pages(world, "short", "none", "long", entries=4)
    assert found == [{"short": [1, 2], "long": [1, 2]}, {"long": [3, 4, 5, 6]}, {"long": [7]}]
    assert whole == {"long": list(range(1, 8)), "short": [1, 2], "none": []}
    exact, whole = await pages(world, "long", entries=7)
    assert exact == [
        {"long": list(range(1, 8))},
        {},
    ]  # the full page cannot know that it was the last
    assert (await pages(world, "none", "nobody"))[0] == [{}]
    assert await world.runs.read_journals(["long", "none"]) == {
        "long": [entry(seq, output="x" * 100) for seq in range(1, 8)],
        "none": [],
    }


async def test_journals_come_in_pages_of_so_many_bytes(world: World) -> None:
    await journals_of(world, a=3, b=3)
    found, whole = await pages(world, "b", "a", size=700)
    assert found == [{"b": [1, 2, 3]}, {"a": [1, 2, 3]}]
    found, whole = await pages(world, "a", "b", size=1)
    assert [list(page.values()) for page in found[:2]] == [[[1]], [[2]]], "one at least"
    assert whole == {"a": [1, 2, 3], "b": [1, 2, 3]}


async def test_a_page_begins_after_what_was_read(world: World) -> None:
    await journals_of(world, a=3, b=3)
    page = await world.runs.read_journal_page({"a": 2, "b": 3})
    assert {run_id: [e.seq for e in read] for run_id, read in page.entries.items()} == {"a": [3]}
    assert page.more == frozenset()
    assert (await world.runs.read_journal_page({})).entries == {}


def told(kind: str, key: str) -> RunEvent:
    return RunEvent(kind, 1_700_000_000.5, f'{{"key": "{key}"}}')


async def test_lines_for_people_are_noted_of_runs_that_live(world: World) -> None:
    runner = await world.runner()
    await world.start("live", "ended")
    claimed = await runner.claim()
    await runner.finish(claimed["ended"])
    line = told("step-started", "0/a#0")
    await world.runs.note_events(
        [("live", line), ("ended", line), ("nobody", line), ("live", line)]
    )
    await world.runs.note_events([])
    assert [e for e in await world.runs.read_events("live") if e.type == "step-started"] == [
        line
    ] * 2
    assert "step-started" not in [e.type for e in await world.runs.read_events("ended")]
    assert (await runner.commit(write(claimed["live"], entries=[entry(1)])))[
        "live"
    ] is Verdict.COMMITTED


async def test_what_is_open_is_what_no_entry_has_ended(world: World) -> None:
    runner = await world.runner()
    await world.start("r1", "r2")
    run = (await runner.claim())["r1"]
    failed = [
        entry(seq, key=key, kind=EntryKind.ATTEMPT, attempt=n, output="5")
        for seq, key, n in ((1, "a", 1), (2, "a", 2), (3, "b", 1))
    ]
    failed = [replace(each, key=f"/{key}#0") for each, key in zip(failed, "aab", strict=True)]
    ended = replace(entry(4), key="/b#0")
    events = [told("signal-awaited", "/b#0"), told("timer-set", "/c#0"), told("other", "/d#0")]
    events += [told("step-started", "/a#0")]
    await runner.commit(write(run, entries=[*failed, ended], events=events))
    items = await world.runs.read_open("r1")
    assert items.events == [events[3], events[1]]
    assert items.attempts == [failed[1]]
    assert await world.runs.read_open("r2") == OpenItems([], [])
