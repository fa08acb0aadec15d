"""What only the SQLite engine promises: its file, its threads, its deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect, migrate
from perdure.storage.errors import (
    ConfigurationError,
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    SchemaError,
    UnknownOutcome,
)
from perdure.storage.model import HintKind, RunStatus, Verdict
from perdure.storage.sqlite import SqliteDatabase
from perdure.storage.sqlite.transaction import Transaction
from tests.contract.world import World, entry, write
from tests.harness.waiting import until

ENDLESS = "with recursive n(x) as (values (1) union all select x + 1 from n) select max(x) from n"


class StuckClock(SystemClock):
    """A clock that can make a transaction hang where it reads it: right after the write lock was taken."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()

    def now(self) -> float:
        self.entered.set()
        assert self.free.wait(30)
        return super().now()


class FileWorld(World):
    """A world on a file whose deadlines are short."""

    def __init__(self, url: str, *, deadline: float = 1.0, lock_timeout: float = 0.5) -> None:
        super().__init__(url)
        self.settings = DatabaseSettings(url, deadline=deadline, lock_timeout=lock_timeout)
        self.clock = StuckClock()
        self.file = SqliteDatabase(self.settings, clock=self.clock)
        self.database = self.file
        self.runs, self.cluster = self.file.runs(), self.file.cluster()


@pytest.fixture
async def hasty(sqlite_file_url: str) -> AsyncIterator[FileWorld]:
    opened = FileWorld(sqlite_file_url)
    await opened.open()
    yield opened
    opened.clock.free.set()
    await opened.close()


@contextlib.contextmanager
def write_lock(url: str) -> Iterator[sqlite3.Connection]:
    """Another program in the middle of a transaction."""
    other = sqlite3.connect(path_of(url), isolation_level=None)
    try:
        other.execute("begin immediate")
        yield other
    finally:
        other.close()


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def worker_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("perdure-sqlite")
    ]


# -- deadlines and unknown outcomes


@pytest.mark.req("CL11")
async def test_a_lock_held_beyond_the_deadline_means_nothing_was_written(hasty: FileWorld) -> None:
    with write_lock(hasty.settings.url):
        with pytest.raises(DatabaseUnavailable, match="nothing was written"):
            await hasty.start("r1")
        assert await hasty.runs.read_run("r1") is None
    assert (await hasty.start("r1"))[0].created


async def test_what_was_given_up_while_waiting_is_never_written_later(hasty: FileWorld) -> None:
    with write_lock(hasty.settings.url):
        answers = await asyncio.gather(
            *(hasty.start(f"r{number}") for number in range(5)), return_exceptions=True
        )
    assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 5
    await hasty.start("last")
    assert await hasty.runs.count_runs() == {"pending": 1}


async def test_a_sender_waits_for_the_lock_time_out_only(hasty: FileWorld) -> None:
    await hasty.start("r1")
    with write_lock(hasty.settings.url), pytest.raises(ConflictError):
        await hasty.send("r1")
    assert await hasty.mailbox("r1") == []


async def test_reads_go_on_while_somebody_writes(hasty: FileWorld) -> None:
    await hasty.start("r1")
    with write_lock(hasty.settings.url):
        assert (await hasty.record("r1")).status is RunStatus.PENDING


@pytest.mark.req("CL11")
async def test_a_commit_that_hangs_is_unknown_and_is_settled_after_its_end(
    hasty: FileWorld,
) -> None:
    runner = await hasty.runner()
    await hasty.start("r1")
    sent = write(await runner.claim_one("r1"), entries=[entry(1)])
    hasty.clock.free.clear()
    with pytest.raises(UnknownOutcome):
        await runner.commit(sent, batch_id=77)
    with pytest.raises(DatabaseUnavailable):
        await runner.settle(sent, batch_id=77)
    hasty.clock.free.set()
    assert await runner.settle(sent, batch_id=77) == {"r1": Verdict.COMMITTED}
    assert len(await hasty.journal("r1")) == 1


async def test_a_start_of_unknown_outcome_is_settled_by_starting_again(hasty: FileWorld) -> None:
    new = hasty.new_run("r1")
    hasty.clock.free.clear()
    with pytest.raises(UnknownOutcome):
        await hasty.runs.start_runs([new])
    hasty.clock.free.set()
    assert (await hasty.runs.start_runs([new]))[0].created
    assert await hasty.runs.count_runs() == {"pending": 1}


async def test_a_statement_is_stopped_at_the_deadline(hasty: FileWorld) -> None:
    def endless(tx: Transaction) -> None:
        tx.select(ENDLESS, {})

    def half_written(tx: Transaction) -> None:
        tx.run("agree", {"key": "half", "value": "written"})
        tx.select(ENDLESS, {})

    with pytest.raises(DatabaseUnavailable, match="deadline"):
        await hasty.file.reader.read(endless)
    with pytest.raises(DatabaseUnavailable, match="deadline"):
        await hasty.file.writer.write(half_written)
    rows = await hasty.file.reader.read(lambda tx: tx.rows("read_meta"))
    assert "half" not in [row[0] for row in rows]
    assert (await hasty.start("r1"))[0].created


@pytest.mark.req("CL11")
async def test_a_cancelled_caller_does_not_stop_its_transaction(hasty: FileWorld) -> None:
    hasty.clock.entered.clear()
    hasty.clock.free.clear()
    starting = asyncio.create_task(hasty.start("r1"))
    await until(hasty.clock.entered.is_set, what="the transaction begun")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    hasty.clock.free.set()

    async def started() -> bool:
        return await hasty.runs.read_run("r1") is not None

    await until(started, what="the run of a cancelled start")


async def test_leases_go_ahead_of_queued_writes(hasty: FileWorld) -> None:
    runner = await hasty.runner([])
    order: list[str] = []

    async def noted(name: str, work: Awaitable[object]) -> None:
        await work
        order.append(name)

    hasty.clock.entered.clear()
    hasty.clock.free.clear()
    first = asyncio.create_task(noted("first", hasty.start("r0")))
    await until(hasty.clock.entered.is_set, what="the first write begun")
    queued = [
        asyncio.create_task(noted("queued", hasty.start(f"r{number}"))) for number in (1, 2, 3)
    ]
    await asyncio.sleep(0)
    renewal = asyncio.create_task(noted("renewal", hasty.cluster.renew(runner.runner_id, 10.0)))
    await asyncio.sleep(0)
    hasty.clock.free.set()
    await asyncio.gather(first, renewal, *queued)
    assert order == ["first", "renewal", "queued", "queued", "queued"]


# -- writes that share a transaction


@contextlib.asynccontextmanager
async def queued_together(world: FileWorld) -> AsyncIterator[None]:
    """What is asked for in here waits behind a write that hangs, and then shares its transaction."""
    world.clock.entered.clear()
    world.clock.free.clear()
    first = asyncio.create_task(world.start("first"))
    await until(world.clock.entered.is_set, what="the first write begun")
    yield
    await asyncio.sleep(0)  # lets the tasks made in here reach the queue
    world.clock.free.set()
    await asyncio.gather(first, return_exceptions=True)


async def test_queued_writes_share_one_commit(hasty: FileWorld) -> None:
    commits: list[str] = []
    await hasty.file.writer.write(lambda tx: tx.trace(commits.append))
    async with queued_together(hasty):
        starts = [asyncio.create_task(hasty.start(f"r{number}")) for number in range(30)]
    assert all(
        outcome.created for outcomes in await asyncio.gather(*starts) for outcome in outcomes
    )
    assert await hasty.runs.count_runs() == {"pending": 31}
    assert commits.count("commit") < 16
    assert len([text for text in commits if text.startswith("-- name: start.run")]) == 31


async def test_a_refused_write_is_undone_alone(hasty: FileWorld) -> None:
    async with queued_together(hasty):
        starts = [
            asyncio.create_task(
                hasty.start(run_id, f"{run_id}-2", payload="\0" if run_id == "bad" else "{}")
            )
            for run_id in ("before", "bad", "after")
        ]
    answers = await asyncio.gather(*starts, return_exceptions=True)
    assert isinstance(answers[1], DataRefused)
    assert await hasty.runs.count_runs() == {"pending": 5}
    assert await hasty.runs.read_run("bad-2") is None


@pytest.mark.req("CL11")
async def test_when_sqlite_rolls_all_back_everybody_is_told(hasty: FileWorld) -> None:
    """An interrupted INSERT ends the whole transaction."""

    def endless(tx: Transaction) -> None:
        tx.select(f"insert into perdure_meta {ENDLESS.replace('select max(x)', 'select x, x')}", {})

    async with queued_together(hasty):
        before = asyncio.create_task(hasty.start("before"))
        stopped = asyncio.create_task(hasty.file.writer.write(endless))
        after = asyncio.create_task(hasty.start("after"))
    answers = await asyncio.gather(before, stopped, after, return_exceptions=True)
    assert isinstance(answers[1], DatabaseUnavailable)
    for run_id, answer in (("before", answers[0]), ("after", answers[2])):
        kept = await hasty.runs.read_run(run_id) is not None
        assert kept != isinstance(answer, DatabaseUnavailable), f"{run_id}: {answer!r}"
    assert isinstance(answers[0], DatabaseUnavailable)
    await hasty.start("next")


# -- trouble with the disk


@pytest.mark.req("CL11")
async def test_a_full_disk_stops_writes_and_says_so(sqlite_file_url: str) -> None:
    world = FileWorld(sqlite_file_url, deadline=5.0)
    await world.open()
    await world.start("r1")
    await world.file.writer.write(lambda tx: tx.select("pragma max_page_count = 1", {}))
    with pytest.raises(DatabaseUnavailable, match="make room"):
        await world.start("r2", payload="x" * 1_000_000)
    assert await world.runs.read_run("r2") is None
    await world.file.writer.write(lambda tx: tx.select("pragma max_page_count = 1000000", {}))
    assert (await world.start("r2", payload="x" * 1_000_000))[0].created
    await world.close()


async def test_numbers_beyond_64_bits_are_refused(hasty: FileWorld) -> None:
    with pytest.raises(DataRefused, match="64 bits"):
        await hasty.start("r1", seed=1 << 64)
    assert await hasty.runs.read_run("r1") is None


async def test_a_run_that_ended_leaves_no_hot_rows(hasty: FileWorld) -> None:
    runner = await hasty.runner()
    for number in range(3):
        await hasty.start(f"r{number}")
        await hasty.deliver(f"r{number}", "m1")
        await runner.finish(await runner.claim_one(f"r{number}"))

    def rows(tx: Transaction) -> list[int]:
        tables = ("fences", "wakes", "messages")
        return [tx.select(f"select count(*) from perdure_{table}", {})[0][0] for table in tables]

    assert await hasty.file.reader.read(rows) == [0, 0, 0]


# -- opening


async def opened(url: str) -> None:
    world = World(url)
    try:
        await world.runs.open()
    finally:
        await world.runs.close()


@pytest.mark.req("OP4")
async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no/such does not exist: create it"):
        await opened(f"sqlite:///{tmp_path}/no/such/file.db")


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this is a folder"):
        await opened(f"sqlite:///{tmp_path}")


async def test_something_else_is_no_database(tmp_path: Path) -> None:
    for number, content in enumerate((b"hello", b"hello" * 1_000)):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="not a SQLite database"):
            await opened(f"sqlite:///{path}")
        assert path.read_bytes() == content


async def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    with pytest.raises(ConfigurationError, match="restore it from a backup"):
        await opened(f"sqlite:///{path}")


@pytest.mark.req("OP3")
async def test_a_file_that_does_not_exist_names_the_command_and_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with pytest.raises(SchemaError, match=rf"perdure migrate --db sqlite:///{path}"):
        await opened(f"sqlite:///{path}")
    assert not path.exists()


@pytest.mark.req("OP3")
async def test_a_database_without_tables_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    sqlite3.connect(path).close()
    with pytest.raises(SchemaError, match="perdure migrate"):
        await opened(f"sqlite:///{path}")


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """As root everything may be written: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65_534, 65_534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


async def test_a_read_only_file_and_folder_are_told(migrated_file: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="perdure-read-only-"))
    path = folder / "perdure.db"
    shutil.copy(migrated_file, path)
    try:
        for folder_mode, file_mode, named in ((0o777, 0o444, path), (0o555, 0o666, folder)):
            folder.chmod(folder_mode)
            path.chmod(file_mode)
            with (
                somebody_else(),
                pytest.raises(ConfigurationError, match=rf"{named} cannot be read and written"),
            ):
                await opened(f"sqlite:///{path}")
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


async def test_an_old_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 37, 2))
    with pytest.raises(ConfigurationError, match=r"needs 3\.38\.0"):
        connect(DatabaseSettings("sqlite:///:memory:"), clock=SystemClock())


async def test_a_failed_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    database = SqliteDatabase(DatabaseSettings(f"sqlite:///{path}"), clock=SystemClock())
    with pytest.raises(ConfigurationError):
        await database.runs().open()
    with pytest.raises(ConfigurationError):
        await database.hints().open(lambda hints: None)
    assert worker_threads() == []
    path.unlink()
    migrate(database.settings)
    runs = database.runs()
    await runs.open()
    await runs.close()


async def test_the_last_store_that_closes_closes_the_file(sqlite_file_url: str) -> None:
    world = World(sqlite_file_url)
    hints = world.database.hints()
    await world.open()
    await hints.open(lambda heard: None)
    await world.runs.close()
    await world.runs.close()
    await world.cluster.read_topology()
    await world.close()
    assert sorted(worker_threads()) == ["perdure-sqlite-reader", "perdure-sqlite-writer"]
    await hints.close()
    assert worker_threads() == []
    with pytest.raises(DatabaseUnavailable, match="not open"):
        await world.cluster.read_topology()
    await world.open()
    await world.start("r1")
    await world.close()


async def test_commits_reach_the_disk(sqlite_file_url: str) -> None:
    world = FileWorld(sqlite_file_url)
    await world.open()
    level = await world.file.writer.read(lambda tx: tx.select("pragma synchronous", {}))
    mode = await world.file.writer.read(lambda tx: tx.select("pragma journal_mode", {}))
    await world.close()
    assert (level, mode) == ([(2,)], [("wal",)])


# -- memory


async def test_stores_of_one_memory_database_share_it_and_others_do_not() -> None:
    world, stranger = World("sqlite:///:memory:"), World("sqlite:///:memory:")
    await world.open()
    await stranger.open()
    await world.start("r1")
    second = world.database.runs()
    await second.open()
    assert await second.read_run("r1") is not None
    assert await stranger.runs.read_run("r1") is None
    await world.close()
    await second.open()
    assert await second.read_run("r1") is not None
    assert worker_threads() == []


async def test_memory_may_be_used_from_another_threads_loop() -> None:
    world = World("sqlite:///:memory:")
    await world.open()

    def start(run_id: str) -> None:
        asyncio.run(world.start(run_id))

    await asyncio.gather(*(asyncio.to_thread(start, f"r{number}") for number in range(20)))
    assert await world.runs.count_runs() == {"pending": 20}


# -- hints


async def test_a_foreign_programs_commit_is_noticed(sqlite_file_url: str) -> None:
    world = World(sqlite_file_url)
    await world.open()
    channel = world.database.hints()
    heard: list[HintKind] = []
    await channel.open(lambda hints: heard.extend(hint.kind for hint in hints))
    other = sqlite3.connect(path_of(sqlite_file_url), isolation_level=None)
    other.execute("insert into perdure_meta (key, value) values ('x', 'y')")
    other.close()
    await until(lambda: heard, what="the commit noticed", deadline=2.0)
    assert set(heard) == {HintKind.ANY}
    await channel.close()
    await world.close()
