"""`RunStore` on SQLite: which function runs on which connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from perdure.storage.interface import MAILBOX_BYTES, PAGE_BYTES, PAGE_ENTRIES, RunStore
from perdure.storage.model import (
    ClaimRequest,
    Claims,
    JournalPage,
    Mailbox,
    Message,
    NewRun,
    OpenItems,
    RunEvent,
    RunFilter,
    RunRecord,
    RunWrite,
    SendOutcome,
    ShardHold,
    StartOutcome,
    StrayRequest,
    Verdict,
)
from perdure.storage.sqlite import claims, commits, reads, starts
from perdure.storage.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from perdure.storage.sqlite.database import SqliteDatabase


class SqliteRunStore(SqliteStore, RunStore):
    """Starts, claims, commits, messages, reads; see `RunStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__(database)
        self.capabilities = database.capabilities

    async def prepare(self) -> None:
        """Nothing: a file's connections are made when it is opened."""

    async def server_now(self) -> float:
        return self._database.clock.now()

    # -- starts and messages

    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        if not runs:
            return []
        return await self._database.writer.write(lambda tx: starts.start_runs(tx, runs))

    async def send_message(
        self, message: Message, *, mailbox_limit: int, mailbox_bytes: int = MAILBOX_BYTES
    ) -> SendOutcome:
        return await self._database.writer.write(
            lambda tx: starts.send_message(tx, message, mailbox_limit, mailbox_bytes),
            lock=self._database.settings.lock_timeout,
        )

    async def cancel_unentered(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        return await self._database.writer.write(
            lambda tx: starts.cancel_unentered(tx, run_id, batch_id, reason)
        )

    async def hold_run(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        return await self._database.writer.write(
            lambda tx: starts.hold_run(tx, run_id, batch_id, reason)
        )

    async def release_hold(self, run_id: str, *, batch_id: int) -> bool:
        return await self._database.writer.write(
            lambda tx: starts.release_hold(tx, run_id, batch_id)
        )

    # -- the runner's hot path

    async def claim_runs(self, request: ClaimRequest) -> Claims:
        randomness = self._database.randomness
        return await self._database.writer.write(
            lambda tx: claims.claim_runs(tx, request, randomness)
        )

    async def claim_strays(self, request: StrayRequest) -> Claims:
        """Asked often and seldom answered: nothing is written where a read finds nothing."""
        look = await self._database.reader.read(lambda tx: claims.strays_in_sight(tx, request))
        if look is not None:
            return look
        randomness = self._database.randomness
        return await self._database.writer.write(
            lambda tx: claims.claim_strays(tx, request, randomness)
        )

    async def read_mailboxes(self, run_ids: Sequence[str]) -> Mapping[str, Mailbox]:
        return await self._database.reader.read(lambda tx: starts.read_mailboxes(tx, run_ids))

    async def read_journal_page(
        self, after: Mapping[str, int], *, entries: int = PAGE_ENTRIES, size: int = PAGE_BYTES
    ) -> JournalPage:
        if not after:
            return JournalPage({}, frozenset())
        return await self._database.reader.read(
            lambda tx: reads.read_journal_page(tx, after, entries=entries, size=size)
        )

    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        if not writes:
            return {}
        return await self._database.writer.write(
            lambda tx: commits.commit_writes(tx, runner_id, batch_id, writes)
        )

    async def settle_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        if not writes:
            return {}
        # A write transaction on the connection that had the unknown one: it can only begin when that has ended.
        return await self._database.writer.write(
            lambda tx: commits.settle_writes(tx, batch_id, writes)
        )

    # -- upkeep of runs in memory

    async def due_in_memory(self, seen: Mapping[str, int]) -> Sequence[str]:
        if not seen:
            return []
        news, stale = await self._database.reader.read(lambda tx: claims.look_in_memory(tx, seen))
        if stale:
            await self._database.writer.write(lambda tx: claims.clear_due(tx, stale))
        return news

    async def upcoming(
        self, runner_id: int, holds: Sequence[ShardHold], until: float, limit: int
    ) -> Sequence[tuple[str, int, float]]:
        return await self._database.reader.read(
            lambda tx: claims.upcoming(tx, runner_id, holds, until, limit)
        )

    # -- reads for people and clients, retention

    async def read_run(self, run_id: str) -> RunRecord | None:
        return await self._database.reader.read(lambda tx: reads.read_run(tx, run_id))

    async def read_results(self, run_ids: Sequence[str]) -> Mapping[str, RunRecord]:
        return await self._database.reader.read(lambda tx: reads.read_results(tx, run_ids))

    async def list_runs(self, filter: RunFilter) -> Sequence[RunRecord]:
        return await self._database.reader.read(lambda tx: reads.list_runs(tx, filter))

    async def count_runs(self) -> Mapping[str, int]:
        return await self._database.reader.read(reads.count_runs)

    async def read_events(self, run_id: str) -> Sequence[RunEvent]:
        return await self._database.reader.read(lambda tx: reads.read_events(tx, run_id))

    async def read_open(self, run_id: str) -> OpenItems:
        return await self._database.reader.read(lambda tx: reads.read_open(tx, run_id))

    async def note_events(self, events: Sequence[tuple[str, RunEvent]]) -> None:
        if events:
            await self._database.writer.write(lambda tx: commits.note_events(tx, events))

    async def delete_finished(self, before: float, limit: int) -> int:
        return await self._database.writer.write(
            lambda tx: reads.delete_finished(tx, before, limit)
        )
