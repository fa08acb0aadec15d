"""The interleaving tester runs every merge, sees who waits, and finds planted races."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.harness.interleave import (
    Case,
    Judgement,
    Operation,
    PostgresConnections,
    Report,
    Script,
    SqliteConnections,
    SqliteSession,
    StoreSessions,
    count_merges,
    merges,
    run_merges,
)

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((1, 1), 2), ((3, 3), 20), ((4, 4), 70), ((2, 2, 2), 90), ((3, 4, 0), 35), ((3, 3, 3), 1680)],
)
def test_the_number_of_merges_is_the_multinomial_coefficient(
    lengths: tuple[int, ...], expected: int
) -> None:
    names = "abc"[: len(lengths)]
    found = merges(names, lengths)
    assert len(found) == len(set(found)) == count_merges(lengths) == expected
    for order in found:
        assert [order.count(name) for name in names] == list(lengths)


def sql(name: str, statement: str) -> Operation[Connection]:
    async def run(session: Connection, case: Case) -> object:
        return await session.fetch(statement.replace("KEY", f"'{case.key}'"))

    return Operation(name, run)


def in_transaction(name: str, *statements: str) -> Script[Connection]:
    inner = [sql(f"s{n}", statement) for n, statement in enumerate(statements, 1)]
    return Script(name, [sql("begin", "begin"), *inner, sql("commit", "commit")])


class Counters:
    """One counter row (or two) per merge; right when every script has added one to it."""

    def __init__(self, sessions: PostgresConnections, rows: int = 1) -> None:
        self.sessions, self.rows = sessions, rows

    async def prepare(self, case: Case) -> None:
        for row in range(1, self.rows + 1):
            await self.sessions.observer.execute(
                "insert into counters values ($1, $2, 0)", case.key, row
            )

    async def judge(self, case: Case) -> Judgement:
        total = await self.sessions.observer.fetchval(
            "select sum(n) from counters where key = $1", case.key
        )
        failed = [name for name in set(case.order) if case.error(name)]
        expected = self.rows * (len(set(case.order)) - len(failed))
        kind = type(case.error(failed[0])).__name__ if failed else "all committed"
        return Judgement(kind, [] if total == expected else [f"{total} instead of {expected}"])

    async def run(self, *scripts: Script[Connection], **options: Any) -> Report:
        return await run_merges(
            self.sessions, scripts, prepare=self.prepare, judge=self.judge, **options
        )


@pytest.fixture
async def counters(postgres_url: str) -> Any:
    quick_deadlocks = ["set deadlock_timeout = '20ms'"]
    async with PostgresConnections(postgres_url, setup=quick_deadlocks) as sessions:
        await sessions.observer.execute("create table counters (key text, row int, n int)")
        await sessions.observer.execute("create unique index on counters (key, row)")
        yield Counters(sessions)


ADD = "update counters set n = n + 1 where key = KEY"


async def test_lock_waits_are_seen_and_the_waiter_goes_on(
    counters: Counters, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await counters.run(in_transaction("a", ADD), in_transaction("b", ADD))
    assert report.merges == 20
    assert report.bad == 0
    # Four orders of twenty have one script's commit before the other's update, four the reverse.
    assert report.waits == {"a": 6, "b": 6}
    assert report.outcomes == {"all committed": 20}
    assert "a|b: 20 merges, 0 bad; waited: a 6, b 6; all committed 20" in capsys.readouterr().out


async def test_a_lost_update_is_found_in_each_order_that_has_it(counters: Counters) -> None:
    async def read(session: Connection, case: Case) -> object:
        return await session.fetchval("select n from counters where key = $1", case.key)

    def read_then_write(name: str) -> Script[Connection]:
        async def write(session: Connection, case: Case) -> object:
            seen = case.answer(name, "read")
            return await session.execute(
                "update counters set n = $2 where key = $1", case.key, seen + 1
            )

        return Script(name, [Operation("read", read), Operation("write", write)])

    report = await counters.run(read_then_write("a"), read_then_write("b"))
    assert (report.merges, report.bad) == (6, 4)
    assert {order for order, _ in report.violations} == set(merges("ab", (2, 2))) - {
        tuple("aabb"),
        tuple("bbaa"),
    }


async def test_deadlocks_end_and_their_victims_are_known(counters: Counters) -> None:
    counters.rows = 2
    first, second = (f"{ADD} and row = {row}" for row in (1, 2))
    forth, back = in_transaction("a", first, second), in_transaction("b", second, first)
    report = await counters.run(forth, back)
    assert report.merges == 70
    assert report.bad == 0
    # A deadlock is certain when both first updates come before both second ones: 6 × 6 orders.
    assert report.outcomes == {"DeadlockDetectedError": 36, "all committed": 34}


async def test_three_sessions_and_an_operation_that_loses_its_connection(
    counters: Counters,
) -> None:
    async def lose(session: Connection, case: Case) -> None:
        session.terminate()

    lost = Script("lost", [sql("begin", "begin"), sql("add", ADD), Operation("lose", lose)])

    async def judge(case: Case) -> Judgement:
        total = await counters.sessions.observer.fetchval(
            "select n from counters where key = $1", case.key
        )
        return Judgement("done", [] if total == 2 else [f"{total} instead of 2"])

    one, two = Script("one", [sql("add", ADD)]), Script("two", [sql("add", ADD)])
    report = await run_merges(
        counters.sessions, [lost, one, two], prepare=counters.prepare, judge=judge
    )
    assert report.merges == 20
    assert report.bad == 0
    assert report.waits["one"] == report.waits["two"] > 0


async def test_an_operation_that_never_ends_is_a_violation(counters: Counters) -> None:
    async def never(session: Connection, case: Case) -> None:
        await asyncio.Event().wait()

    stubborn = Script("stubborn", [Operation("never", never)])
    report = await counters.run(stubborn, Script("one", [sql("add", ADD)]), deadline=0.3)
    assert report.bad == 2
    assert [what for _, what in report.violations].count("stubborn is stuck") == 2


async def test_an_error_ends_its_script_and_not_the_others(counters: Counters) -> None:
    broken = Script("broken", [sql("bad", "select 1/0"), sql("add", ADD)])
    report = await counters.run(broken, Script("one", [sql("add", ADD)]))
    assert (report.merges, report.bad) == (3, 0)
    assert report.outcomes == {"DivisionByZeroError": 3}


async def test_stores_without_a_witness_count_as_waiting_by_patience(counters: Counters) -> None:
    url = counters.sessions
    stores: StoreSessions[Connection] = StoreSessions(url.open, url.close, patience=0.03)
    report = await run_merges(
        stores,
        [in_transaction("a", ADD), in_transaction("b", ADD)],
        prepare=counters.prepare,
        judge=counters.judge,
    )
    assert (report.merges, report.bad) == (20, 0)
    assert min(report.waits["a"], report.waits["b"]) >= 6


async def test_sqlite_writers_wait_for_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "counters.db")
    observer = SqliteSession(path)
    await observer.execute("pragma journal_mode = wal")
    await observer.execute("create table counters (key text primary key, n int)")

    def script(name: str, begin: str, statement: str) -> Script[SqliteSession]:
        def operation(name: str, text: str) -> Operation[SqliteSession]:
            async def run(session: SqliteSession, case: Case) -> object:
                return await session.execute(text.replace("KEY", f"'{case.key}'"))

            return Operation(name, run)

        texts = {"begin": begin, "write": statement, "commit": "commit"}
        return Script(name, [operation(name, text) for name, text in texts.items()])

    async def prepare(case: Case) -> None:
        await observer.execute("insert into counters values (?, 0)", [case.key])

    async def judge(case: Case) -> Judgement:
        rows = await observer.execute("select n from counters where key = ?", [case.key])
        total, lost = rows[0][0], sum(case.error(name) is not None for name in "ab")
        wrong = [] if total == 2 - lost else [f"{total} instead of {2 - lost}"]
        return Judgement("refused" if lost else "all committed", wrong)

    sessions = SqliteConnections(path)
    pair = [script(name, "begin immediate", ADD) for name in "ab"]
    report = await run_merges(sessions, pair, prepare=prepare, judge=judge)
    assert (report.merges, report.bad) == (20, 0)
    assert report.waits == {"a": 9, "b": 9}  # all but the two orders without any overlap
    assert report.outcomes == {"all committed": 20}
    # A deferred transaction waits at its first write, or is refused if it has read before.
    stale = "update counters set n = n + 1 where key = KEY"
    pair = [script("a", "begin", stale), script("b", "begin immediate", ADD)]
    report = await run_merges(sessions, pair, prepare=prepare, judge=judge)
    assert (report.merges, report.bad) == (20, 0)
    observer.close()


@pytest.mark.slow
async def test_sixteen_hundred_merges_take_well_under_two_minutes(counters: Counters) -> None:
    started = time.monotonic()
    report = await counters.run(*(in_transaction(name, ADD) for name in "abc"))
    assert (report.merges, report.bad) == (1680, 0)
    assert time.monotonic() - started < 60
