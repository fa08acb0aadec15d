"""Runs on PostgreSQL: starts, claims, commits, messages, reads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg

from perdure.storage import births
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import (
    ConfigurationError,
    ConflictError,
    DatabaseUnavailable,
    DataRefused,
    RunnerDeclaredDead,
    UnknownOutcome,
)
from perdure.storage.interface import (
    MAILBOX_BYTES,
    PAGE_BYTES,
    PAGE_ENTRIES,
    Capabilities,
    RunStore,
)
from perdure.storage.model import (
    ClaimRequest,
    Claims,
    JournalPage,
    Mailbox,
    Message,
    Meta,
    NewRun,
    OpenItems,
    Park,
    RunEvent,
    RunFilter,
    RunRecord,
    RunWrite,
    SendOutcome,
    SendStatus,
    ShardHold,
    StartOutcome,
    StrayRequest,
    Verdict,
)
from perdure.storage.paging import journal_page
from perdure.storage.postgres import columns, queries
from perdure.storage.postgres.lists import list_statement
from perdure.storage.postgres.meta import capabilities_of, read_agreed
from perdure.storage.postgres.pool import Calls, Lane, lane_sizes
from perdure.storage.postgres.queries import Row
from perdure.storage.postgres.server import Server
from perdure.storage.postgres.session import Backend, Session, name_of
from perdure.storage.postgres.settlement import Settlement, end_session
from perdure.storage.verdicts import check_batch, judge

T = TypeVar("T")
BITS63 = (1 << 63) - 1

REMEMBERED_GHOSTS = 1000
CAREFUL = 60.0
"""Seconds for which no finish waits for its cold row: since a commit has waited for a lock in vain, or since one has
last met a locked row after that."""


class PostgresRunStore(RunStore):
    """One process's way to its runs, over `settings.pool` connections in three lanes."""

    def __init__(self, server: Server, *, clock: Clock, randomness: Randomness) -> None:
        self._server = server
        self._settings = settings = server.settings
        self._clock = clock
        self._randomness = randomness
        self._address = server.address
        commits, runner, clients = lane_sizes(settings.pool)
        self._commit_lane = Lane(commits, self._open_hot)
        self._runner_lane = Lane(runner, self._open_hot)
        self._client_lane = Lane(clients, self._open_hot)
        self._calls = Calls()
        self._ghosts: dict[int, Backend] = {}
        self._lost_claim: Backend | None = None
        self._careful_until = -math.inf
        self.capabilities: Capabilities = capabilities_of(None)

    # -- opening and closing
    async def open(self) -> Meta:
        return await self._calls.shielded(self._open())

    async def _open(self) -> Meta:
        session = await self._server.open_session(hot=True)
        try:
            meta = await read_agreed(session, self._settings, self._address)
        except BaseException:
            await session.close()
            raise
        self.capabilities = capabilities_of(session)
        await self._client_lane.offer(session)
        return meta

    async def prepare(self) -> None:
        commits, deadline = self._commit_lane, self._settings.deadline
        first = (
            commits.run(self._first_commit, what="connecting", patience=deadline)
            for _ in range(commits.size)
        )
        await self._calls.shielded(_all([self._runner_lane.prepare(), *first]))

    async def _first_commit(self, session: Session) -> None:
        """Commits of nothing, so that the statements are planned. Else the second connection would be opened when a
        large write has the first, and small ones wait for that."""
        deadline = self._settings.deadline
        for sql, nothing in (
            (queries.COMMIT, columns.commit_columns(0, 0, ())),
            (queries.COMMIT_ENDS, columns.commit_ends_columns(0, 0, ())),
            (queries.COMMIT_STEPS, columns.commit_steps_columns(0, 0, ())),
        ):
            await session.fetch(sql, *nothing, writes=False, deadline=deadline)

    async def close(self) -> None:
        try:
            await self._calls.settled(self._settings.deadline)
        finally:  # whoever does not wait that long leaves nothing open all the same
            lanes = (self._commit_lane, self._runner_lane, self._client_lane)
            await asyncio.gather(*(lane.close() for lane in lanes))

    async def _open_hot(self) -> Session:
        return await self._server.open_session(hot=True, seconds=self._settings.deadline)

    # -- how statements are run
    async def _fetch(self, lane: Lane, sql: str, *args: object, writes: bool = False) -> list[Row]:
        """One statement on a connection of the lane. Not shielded: for use inside shielded work."""

        async def use(session: Session) -> list[Row]:
            return await session.fetch(sql, *args, writes=writes, deadline=self._settings.deadline)

        return await lane.run(use, what=name_of(sql), patience=self._settings.deadline)

    async def _read(self, lane: Lane, sql: str, *args: object) -> list[Row]:
        return await self._calls.shielded(self._fetch(lane, sql, *args))

    async def _write(self, lane: Lane, sql: str, *args: object) -> list[Row]:
        return await self._calls.shielded(self._fetch(lane, sql, *args, writes=True))

    async def server_now(self) -> float:
        rows = await self._read(self._client_lane, queries.SERVER_NOW)
        return float(rows[0][0])

    # -- starts and messages
    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        return await self._calls.shielded(self._start_runs(runs)) if runs else []

    async def _start_runs(self, runs: Sequence[NewRun]) -> list[StartOutcome]:
        first: dict[str, NewRun] = {}
        for run in runs:
            first.setdefault(run.run_id, run)
        ordered = [first[run_id] for run_id in sorted(first)]
        created = await self._make(ordered)
        others = sorted(
            {r.run_id for r in runs if r is not first[r.run_id] or r.run_id not in created}
        )
        found: dict[str, Row] = {}
        if others:
            read = self._fetch(self._client_lane, queries.FIND_RUNS, others)
            found = {row["run_id"]: row for row in await _after_write(read, "start")}
        return [_start_outcome(run, created, first, found) for run in runs]

    async def _make(self, runs: Sequence[NewRun]) -> dict[str, float | None]:
        """The ids of the runs that were made, each with the time of its birth if it was born claimed."""
        if all(run.fresh and run.birth is None for run in runs):
            try:
                return await self._make_fresh(runs)
            except DataRefused as error:  # nothing was written
                if not isinstance(error.__cause__, asyncpg.UniqueViolationError):
                    raise  # else this very start was sent before, and its answer lost
        rows = await self._fetch(
            self._client_lane, queries.START, *columns.start_columns(runs), writes=True
        )
        return {row["run_id"]: row["born_at"] for row in rows}

    async def _make_fresh(self, runs: Sequence[NewRun]) -> dict[str, float | None]:
        args = columns.fresh_columns(runs)
        await self._fetch(self._client_lane, queries.START_FRESH, *args, writes=True)
        return dict.fromkeys((run.run_id for run in runs), None)

    async def send_message(
        self, message: Message, *, mailbox_limit: int, mailbox_bytes: int = MAILBOX_BYTES
    ) -> SendOutcome:
        return await self._calls.shielded(self._send_message(message, mailbox_limit, mailbox_bytes))

    async def _send_message(
        self, message: Message, mailbox_limit: int, mailbox_bytes: int
    ) -> SendOutcome:
        for _ in range(
            2
        ):  # a run found open below had no wake row only because it had not started yet
            rows = await self._fetch(
                self._client_lane,
                queries.SIGNAL,
                message.run_id,
                message.message_id,
                message.kind.value,
                message.name,
                message.body,
                message.format,
                mailbox_limit,
                mailbox_bytes,
                writes=True,
            )
            row = rows[0]
            if row["stored"] is not None:
                return SendOutcome(SendStatus.DELIVERED, row["slot"])
            if row["given"] is not None:
                status = SendStatus.DUPLICATE  # also of one whose first send this one waited for
                if not row["known"] and not row["room"]:
                    status = SendStatus.FULL
                elif not row["known"] and not row["light"]:
                    status = SendStatus.HEAVY
                return SendOutcome(status, row["slot"])
            found = await self._fetch(self._client_lane, queries.FIND_RUN, message.run_id)
            if not found:
                return SendOutcome(SendStatus.UNKNOWN_RUN)
            if found[0]["status"] != "open":
                return SendOutcome(SendStatus.ENDED, found[0]["slot"])
        return SendOutcome(SendStatus.UNKNOWN_RUN)

    async def cancel_unentered(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        return await self._calls.shielded(self._cancel_unentered(run_id, batch_id, reason))

    async def _cancel_unentered(self, run_id: str, batch_id: int, reason: str | None) -> bool:
        lane, deadline = self._client_lane, self._settings.deadline

        async def end(connection: asyncpg.Connection) -> list[Row]:
            async with connection.transaction():
                await connection.fetch(queries.LOCK_UNENTERED, run_id)
                return await connection.fetch(queries.CANCEL_UNENTERED, run_id, batch_id, reason)

        async def use(session: Session) -> list[Row]:
            return await session.run(end, what="cancel_unentered", writes=True, deadline=deadline)

        if await lane.run(use, what="cancel_unentered", patience=deadline):
            return True
        found = await self._fetch(
            lane, queries.FIND_RUN, run_id
        )  # an earlier send of this may have arrived
        return (
            bool(found) and found[0]["status"] == "cancelled" and found[0]["last_batch"] == batch_id
        )

    async def hold_run(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        return await self._calls.shielded(self._hold_run(run_id, batch_id, reason))

    async def _hold_run(self, run_id: str, batch_id: int, reason: str | None) -> bool:
        lane = self._client_lane
        if await self._fetch(lane, queries.HOLD_RUN, run_id, batch_id, reason, writes=True):
            return True
        return await self._last_written(run_id, batch_id)

    async def release_hold(self, run_id: str, *, batch_id: int) -> bool:
        return await self._calls.shielded(self._release_hold(run_id, batch_id))

    async def _release_hold(self, run_id: str, batch_id: int) -> bool:
        lane = self._client_lane
        if await self._fetch(lane, queries.RELEASE_HOLD, run_id, batch_id, writes=True):
            return True
        if await self._last_written(run_id, batch_id):
            return True
        return bool(await self._fetch(lane, queries.WITHDRAW_SUSPEND, run_id, writes=True))

    async def _last_written(self, run_id: str, batch_id: int) -> bool:
        """An earlier send of this very call is the last that was written to the run's fence."""
        found = await self._fetch(self._client_lane, queries.SETTLE_REST, [run_id])
        return bool(found) and found[0]["last_batch"] == batch_id

    # -- the runner's hot path
    async def claim_runs(self, request: ClaimRequest) -> Claims:
        values = columns.claim_columns(request, self._claim_ids(request.limit))
        return await self._claim(request.runner_id, queries.CLAIM, values)

    async def claim_strays(self, request: StrayRequest) -> Claims:
        values = columns.stray_columns(request, self._claim_ids(request.limit))
        return await self._claim(request.runner_id, queries.CLAIM_STRAYS, values)

    def _claim_ids(self, count: int) -> list[int]:
        """Each is random, any two independent of each other (R1): from two draws, since most are for nobody."""
        first, stride = self._randomness.bits63(), self._randomness.bits63() | 1
        return [(first + n * stride) & BITS63 or 1 for n in range(count)]

    async def _claim(self, runner_id: int, sql: str, values: Sequence[object]) -> Claims:
        rows = await self._calls.shielded(self._claimed(sql, values))
        if not rows[0]["alive"]:
            raise _declared_dead(runner_id)
        return columns.claims_of(rows)

    async def _claimed(self, sql: str, values: Sequence[object]) -> list[Row]:
        """The statement, once no earlier one whose answer was lost can still be on its way: that one knows nothing of
        what was claimed since, and would take it for an orphan of its own runner."""
        deadline = self._settings.deadline

        async def use(session: Session) -> list[Row]:
            if self._lost_claim is not None:
                ends = asyncio.get_running_loop().time() + deadline
                await end_session(session, self._lost_claim, deadline=deadline, ends=ends)
                self._lost_claim = None
            try:
                return await session.fetch(sql, *values, writes=True, deadline=deadline)
            except UnknownOutcome:
                self._lost_claim = session.backend
                raise

        return await self._runner_lane.run(use, what=name_of(sql), patience=deadline)

    async def read_mailboxes(self, run_ids: Sequence[str]) -> Mapping[str, Mailbox]:
        rows = await self._read(self._runner_lane, queries.MAILBOX, sorted(set(run_ids)))
        messages: dict[str, list[Message]] = {row["run_id"]: [] for row in rows}
        heads: dict[str, Row] = {}
        for row in rows:
            heads[row["run_id"]] = row
            if row["message_id"] is not None:
                messages[row["run_id"]].append(columns.message_of(row))
        return {
            run_id: Mailbox(
                wake_seq=row["wake_seq"], messages=messages[run_id], db_now=row["db_now"]
            )
            for run_id, row in heads.items()
        }

    async def read_journal_page(
        self, after: Mapping[str, int], *, entries: int = PAGE_ENTRIES, size: int = PAGE_BYTES
    ) -> JournalPage:
        if not after:
            return JournalPage({}, frozenset())
        run_ids, seqs = list(after), list(after.values())
        rows = await self._read(self._runner_lane, queries.JOURNAL, run_ids, seqs, size, entries)
        read = [(row["run_id"], columns.entry_of(row)) for row in rows]
        return journal_page(run_ids, read, found=rows[0]["found"] if rows else 0, limit=entries)

    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        ordered = sorted(writes, key=lambda write: write.run_id)
        check_batch(ordered)
        return (
            await self._calls.shielded(self._commit(runner_id, batch_id, ordered))
            if ordered
            else {}
        )

    async def _commit(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> dict[str, Verdict]:
        sql, columns_of = _variant_for(writes, careful=self._careful)
        args = columns_of(runner_id, batch_id, writes)
        deadline = self._settings.deadline

        async def use(session: Session) -> dict[str, Verdict]:
            try:
                rows = await session.fetch(sql, *args, writes=True, deadline=deadline)
                if not rows[0]["alive"]:
                    raise _declared_dead(runner_id)
                missed, refused = set(rows[0]["missing"] or ()), set(rows[0]["refused"] or ())
                missing = [w for w in writes if w.run_id in missed] if missed else []
                states = await self._states(session, missing)
            except UnknownOutcome:
                self._remember_ghost(batch_id, session.backend)
                raise
            except ConflictError:
                self._careful_until = self._clock.monotonic() + CAREFUL
                raise
            seen = {row["run_id"]: row for row in states}
            self._watch_history(missing, seen)
            applied = {w.run_id: _applied(w, refused) for w in writes if w.run_id not in missed}
            judged = {w.run_id: _judged(w, batch_id, seen.get(w.run_id)) for w in missing}
            if self._careful and Verdict.AGAIN in judged.values():
                self._careful_until = self._clock.monotonic() + CAREFUL
            return applied | judged

        return await self._commit_lane.run(use, what="commit", patience=deadline)

    @property
    def _careful(self) -> bool:
        return self._clock.monotonic() < self._careful_until

    def _watch_history(self, missing: Sequence[RunWrite], seen: Mapping[str, Row]) -> None:
        """A claim that is still mine at a revision from before what was confirmed to me: those commits are gone."""
        for write in missing:
            row = seen.get(write.run_id)
            if row is None or not row["fenced"]:
                continue
            fence = columns.fence_of(row)
            if fence.claim_id == write.claim_id and fence.revision < write.revision:
                self._server.commits_lost(
                    f"an older copy of the server: run {write.run_id!r} is back at revision {fence.revision}, "
                    f"{write.revision} had been confirmed"
                )
                return

    async def _states(self, session: Session, missing: Sequence[RunWrite]) -> list[Row]:
        """Fence and cold row of members that were not applied: zero rows is no verdict yet."""
        if not missing:
            return []
        ids = [write.run_id for write in missing]
        read = session.fetch(
            queries.SETTLE_REST, ids, writes=False, deadline=self._settings.deadline
        )
        return await _after_write(read, "commit")

    def _remember_ghost(self, batch_id: int, backend: Backend) -> None:
        while len(self._ghosts) >= REMEMBERED_GHOSTS:
            self._ghosts.pop(next(iter(self._ghosts)))
        self._ghosts[batch_id] = backend

    async def settle_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        return await self._calls.shielded(self._settle(batch_id, writes)) if writes else {}

    async def _settle(self, batch_id: int, writes: Sequence[RunWrite]) -> dict[str, Verdict]:
        try:
            session = await self._open_hot()
        except ConfigurationError as error:
            raise DatabaseUnavailable(f"settle: {error}") from error
        try:
            settlement = Settlement(
                session, self._ghosts.get(batch_id), deadline=self._settings.deadline
            )
            verdicts = await settlement.verdicts(batch_id, writes)
        finally:
            await session.close()
        self._ghosts.pop(batch_id, None)
        return verdicts

    # -- upkeep of runs in memory
    async def due_in_memory(self, seen: Mapping[str, int]) -> Sequence[str]:
        if not seen:
            return []
        ids = sorted(seen)
        rows = await self._write(
            self._runner_lane, queries.DUE_IN_MEMORY, ids, [seen[run_id] for run_id in ids]
        )
        return [row["run_id"] for row in rows]

    async def upcoming(
        self, runner_id: int, holds: Sequence[ShardHold], until: float, limit: int
    ) -> Sequence[tuple[str, int, float]]:
        shards, epochs = [hold.shard_id for hold in holds], [hold.epoch for hold in holds]
        rows = await self._read(
            self._runner_lane, queries.UPCOMING, runner_id, shards, epochs, until, limit
        )
        return [(row["run_id"], row["slot"], row["wake_at"]) for row in rows]

    # -- reads for people and clients
    async def read_run(self, run_id: str) -> RunRecord | None:
        rows = await self._read(self._client_lane, queries.READ_RUNS, [run_id])
        return columns.live_record(rows[0]) if rows else None

    async def read_results(self, run_ids: Sequence[str]) -> Mapping[str, RunRecord]:
        rows = await self._read(self._client_lane, queries.READ_RESULTS, sorted(set(run_ids)))
        return {row["run_id"]: columns.ended_record(row) for row in rows}

    async def list_runs(self, filter: RunFilter) -> Sequence[RunRecord]:
        text, args = list_statement(filter)
        return [
            columns.live_record(row) for row in await self._read(self._client_lane, text, *args)
        ]

    async def count_runs(self) -> Mapping[str, int]:
        rows = await self._read(self._client_lane, queries.COUNT_RUNS)
        return {row["status"]: row["n"] for row in rows}

    async def read_events(self, run_id: str) -> Sequence[RunEvent]:
        rows = await self._read(self._client_lane, queries.READ_EVENTS, run_id)
        return [RunEvent(row["type"], row["at"], row["detail"]) for row in rows]

    async def read_open(self, run_id: str) -> OpenItems:
        events = await self._read(self._client_lane, queries.OPEN_EVENTS, run_id)
        attempts = await self._read(self._client_lane, queries.OPEN_ATTEMPTS, run_id)
        return OpenItems(
            [RunEvent(row["type"], row["at"], row["detail"]) for row in events],
            [columns.entry_of(row) for row in attempts],
        )

    async def note_events(self, events: Sequence[tuple[str, RunEvent]]) -> None:
        if events:
            rows = [(run_id, e.type, e.at, e.detail) for run_id, e in events]
            arrays = [list(column) for column in zip(*rows, strict=True)]
            await self._write(self._runner_lane, queries.NOTE_EVENTS, *arrays)

    # -- retention
    async def delete_finished(self, before: float, limit: int) -> int:
        rows = await self._write(self._client_lane, queries.DELETE_FINISHED, before, limit)
        return int(rows[0][0])


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*works)


async def _after_write(read: Coroutine[Any, Any, T], what: str) -> T:
    """A read that tells what a committed write did: if it fails, the write's outcome is what is unknown."""
    try:
        return await read
    except DatabaseUnavailable as error:
        raise UnknownOutcome(
            f"{what}: it may be committed, its answer was lost ({error})"
        ) from error


def _start_outcome(
    run: NewRun,
    created: Mapping[str, float | None],
    first: Mapping[str, NewRun],
    found: Mapping[str, Row],
) -> StartOutcome:
    if run is first[run.run_id] and run.run_id in created:
        return births.created(run, born_at=created[run.run_id])
    return columns.start_found(run, found[run.run_id])


def _variant_for(
    writes: Sequence[RunWrite], *, careful: bool
) -> tuple[str, Callable[[int, int, Sequence[RunWrite]], Sequence[object]]]:
    """The shortest statement for a batch, and what makes its arguments. careful: no end waits for its cold row."""
    if columns.only_entries(writes):
        return queries.COMMIT_STEPS, columns.commit_steps_columns
    if careful:
        return queries.COMMIT_CAREFUL, columns.commit_columns
    if columns.only_ends(writes):
        return queries.COMMIT_ENDS, columns.commit_ends_columns
    return queries.COMMIT, columns.commit_columns


def _applied(write: RunWrite, refused: set[str]) -> Verdict:
    if not isinstance(write.outcome, Park):
        return Verdict.COMMITTED
    return Verdict.PARK_REFUSED if write.run_id in refused else Verdict.PARKED


def _judged(write: RunWrite, batch_id: int, state: Row | None) -> Verdict:
    if state is None:
        return judge(write, batch_id, None, None)
    return judge(
        write, batch_id, columns.fence_of(state) if state["fenced"] else None, state["run_batch"]
    )


def _declared_dead(runner_id: int) -> RunnerDeclaredDead:
    return RunnerDeclaredDead(
        f"runner {runner_id} has been declared dead (or its row is gone): its runs are void, "
        "the process comes back as a new runner"
    )
