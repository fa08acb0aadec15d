"""The storage seam, at domain height: values and batches in and out, no SQL crosses it.

Three interfaces by who uses them. `RunStore` is the hot path and the client's (main loop). `ClusterStore` is what
runners say to each other (the keeper has one of its own, on its own thread and connection). `HintChannel` carries
hints. An engine implements all three; `connect.py` is the only module that knows which engines exist.

Common to all methods: each has a deadline, and a cancelled or timed-out connection never returns to a pool (R10).
Raised: `DatabaseUnavailable` and `ConflictError` (nothing was written), `UnknownOutcome` (a write was under way: settle
it), `DataRefused`, `RunnerDeclaredDead` (from claims and commits, decided by a read of the runner's row). Nothing is
decided by affected-row counts (R9). Arrays are sorted by run_id by the engine before they are sent; a runner's
statement never waits for a row lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from perdure.storage.model import (
    ClaimRequest,
    Claims,
    Entry,
    Hint,
    JournalPage,
    LockFacts,
    Mailbox,
    Message,
    Meta,
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
    Topology,
    Verdict,
)

PAGE_ENTRIES = 500
"""Of a page of journals: 2 or 3 ms of work for whoever reads it."""
PAGE_BYTES = 1024 * 1024
MAILBOX_BYTES = 64 * 1024 * 1024
"""Of unread messages of one run, unless said otherwise: what a wake may have to read at once."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; ask these, never the engine's name.

    shared: several processes may use it at once. multi_host: from several machines.
    pushes_hints: hints reach other processes by themselves (else a change is noticed by polling).
    session_locks: a session can hold a lock that others see and that ends with it (`ClusterStore.hold_lock`).
    """

    dialect: str
    server_version: str
    shared: bool
    multi_host: bool
    pushes_hints: bool
    returning: bool
    session_locks: bool = False


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """What a runner says of itself when it registers."""

    runner_id: int
    replica_id: str
    address: str
    workflows: Sequence[str]
    info: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Renewal:
    """alive: False = declared dead (or the row is gone): never re-insert it.

    session: which of the server's sessions answered; None where there are none. renew_count: as it is now; it only
    grows, unless the database has lost commits."""

    alive: bool
    db_now: float
    session: int | None = None
    renew_count: int = 0


class RunStore(ABC):
    """Starts, claims, commits, messages, reads."""

    capabilities: Capabilities

    @abstractmethod
    async def open(self) -> Meta:
        """Connect (10 s at most), check the schema, return what the cluster agreed on.

        Raises `ConfigurationError` naming what to check, `SchemaError` naming the command to run."""

    @abstractmethod
    async def prepare(self) -> None:
        """Connect for all kinds of work now, so that a runner's first claim and first commit need not wait for it.

        Raises `DatabaseUnavailable`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def server_now(self) -> float:
        """The database's clock."""

    # -- starts and messages
    @abstractmethod
    async def start_runs(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome]:
        """Insert cold, fence and wake row of each in one commit; ids that exist are answered, not changed.

        Same order as given; one id twice in a call: the first creates, the others find it. After `UnknownOutcome`
        calling again with the same tokens settles it: a row with my token is `created`, and one that also bears the
        claim of the start's `Birth` is `claimed`."""

    @abstractmethod
    async def send_message(
        self, message: Message, *, mailbox_limit: int, mailbox_bytes: int = MAILBOX_BYTES
    ) -> SendOutcome:
        """Insert and bump the wake row in one transaction, in that row's order (R6). Waits for the row, 3 s at most
        (`ConflictError`). A duplicate message_id changes nothing. After `UnknownOutcome` sending again settles it."""

    @abstractmethod
    async def cancel_unentered(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        """End a run nobody ever entered, or one on hold, as `cancelled`; False: not in that state (send a cancel).

        True again for the same batch_id, so that an unknown outcome is settled by calling again."""

    @abstractmethod
    async def hold_run(self, run_id: str, *, batch_id: int, reason: str | None) -> bool:
        """An operator's suspend of a run nobody has: on hold at once, not due, its mailbox goes on collecting.

        True: it is on hold, by this or before (whatever for); again for the same batch_id. False: somebody has it (send
        a `SUSPEND` message), it has ended, or there is no such run. reason: for the timeline."""

    @abstractmethod
    async def release_hold(self, run_id: str, *, batch_id: int) -> bool:
        """An operator's resume of a held run nobody has: hold gone, crash count 0, due now. Of a run not yet on hold:
        its unread `SUSPEND` messages are taken back. False: there was neither.

        True again for the same batch_id, but for what was taken back."""

    # -- the runner's hot path
    @abstractmethod
    async def claim_runs(self, request: ClaimRequest) -> Claims:
        """Take due runs (and orphans) of my shards, skipping locked rows; mark those I do not know as strays.
        `RunnerDeclaredDead` if I am.

        After `UnknownOutcome` the next call, of this or the next method, begins when the lost one is certainly over: a
        statement that knows less of my memory than I do would claim anew what I have got since."""

    @abstractmethod
    async def claim_strays(self, request: StrayRequest) -> Claims:
        """Take strays of workflows I know, in any shard, under that shard's epoch (R15).
        `RunnerDeclaredDead` if I am."""

    @abstractmethod
    async def read_mailboxes(self, run_ids: Sequence[str]) -> Mapping[str, Mailbox]:
        """wake_seq and unread messages of each in one snapshot; runs without a wake row are missing."""

    @abstractmethod
    async def read_journal_page(
        self, after: Mapping[str, int], *, entries: int = PAGE_ENTRIES, size: int = PAGE_BYTES
    ) -> JournalPage:
        """What follows in these journals (run_id → seq read so far, 0 = from the beginning), run after run in the order
        given: at most so many entries, and as many as fit into ``size`` bytes, but one at least."""

    async def read_journals(self, run_ids: Sequence[str]) -> Mapping[str, Sequence[Entry]]:
        """All entries of each, by seq, page by page; a run without entries is an empty list."""
        journals: dict[str, list[Entry]] = {run_id: [] for run_id in run_ids}
        after = dict.fromkeys(journals, 0)
        while after:
            page = await self.read_journal_page(after)
            for run_id, entries in page.entries.items():
                journals[run_id] += entries
            after = {
                run_id: journals[run_id][-1].seq if journals[run_id] else 0
                for run_id in after
                if run_id in page.more
            }
        return journals

    @abstractmethod
    async def commit_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        """Apply the writes whose fence still matches, in one transaction; at most one write per run in a batch.

        Members that were not applied are read, never guessed: a verdict for every run. `UnknownOutcome`: call
        `settle_writes`. `DataRefused`: the whole batch is rolled back, halve it. `RunnerDeclaredDead` if I am."""

    @abstractmethod
    async def settle_writes(
        self, runner_id: int, batch_id: int, writes: Sequence[RunWrite]
    ) -> Mapping[str, Verdict]:
        """After an unknown outcome: a locking read on a new connection; then our own ghost session is ended, and what
        others keep locked is read without a lock. `last_batch` equal = committed."""

    # -- upkeep of runs in memory
    @abstractmethod
    async def due_in_memory(self, seen: Mapping[str, int]) -> Sequence[str]:
        """Of runs I hold in memory (run_id → seen): those with a wake_seq above it. Clears wake_at of due wake rows
        whose wake_seq equals seen, so that looping scans do not step over them."""

    @abstractmethod
    async def upcoming(
        self, runner_id: int, holds: Sequence[ShardHold], until: float, limit: int
    ) -> Sequence[tuple[str, int, float]]:
        """(run_id, slot, wake_at) of parked runs of these shards due before ``until``, soonest first."""

    # -- reads for people and clients
    @abstractmethod
    async def read_run(self, run_id: str) -> RunRecord | None: ...

    @abstractmethod
    async def read_results(self, run_ids: Sequence[str]) -> Mapping[str, RunRecord]:
        """Only those that have ended (at most 1,000 ids a call)."""

    @abstractmethod
    async def list_runs(self, filter: RunFilter) -> Sequence[RunRecord]: ...

    @abstractmethod
    async def count_runs(self) -> Mapping[str, int]:
        """status → number of runs not yet ended; where there are any, also "running elsewhere": those executed by
        another runner than the holder of their shard (pinned or lent)."""

    @abstractmethod
    async def read_events(self, run_id: str) -> Sequence[RunEvent]:
        """The timeline: recorded events, and those the run's row, journal and mailbox imply, by time."""

    @abstractmethod
    async def read_open(self, run_id: str) -> OpenItems:
        """What it waits for and which steps are running, as far as its events and its journal say."""

    @abstractmethod
    async def note_events(self, events: Sequence[tuple[str, RunEvent]]) -> None:
        """Add lines (run_id, event) to timelines, outside of any fence; runs that have ended get none."""

    # -- retention
    @abstractmethod
    async def delete_finished(self, before: float, limit: int) -> int:
        """Delete runs that ended before, oldest first, with journal and events; the number deleted."""


class ClusterStore(ABC):
    """Runners and shards. One connection, used from the keeper's own thread and loop (R3) or the main loop."""

    capabilities: Capabilities

    @abstractmethod
    async def open(self) -> Meta: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def forgo(self) -> None:
        """A keeper's store: there is no keeper any more that wants a connection. Others of the process that wait for it
        to come first go on at once. Also before `open`, and of a store that was never opened; `close` follows."""

    @abstractmethod
    async def agree(self, *, shard_count: int, lock_mode: str) -> Meta:
        """First boot writes topology and mode; later boots must ask for the same, else `DisagreementError`."""

    @abstractmethod
    async def hint_key(self, fresh: str) -> str:
        """The cluster's secret by which hints between processes are signed. ``fresh`` becomes it if there is none yet;
        whatever any process is told, all are told the same."""

    @abstractmethod
    async def read_lock_facts(self) -> LockFacts:
        """What decides over the lock mode. Opens five more connections for a moment where sessions can hold locks."""

    @abstractmethod
    async def change_lock_mode(self, lock_mode: str) -> None:
        """Another mode for a cluster without live runners: those whose lease is over are declared dead.

        `DisagreementError` naming the live ones, and what to do."""

    @property
    @abstractmethod
    def history(self) -> int:
        """Grows when the server behind a new connection of this process (of any store) turns out to be another one,
        or one that lacks commits that this process has seen. What was known of its rows is void then."""

    @abstractmethod
    def commits_lost(self, what: str) -> None:
        """The caller has found out by itself that commits are gone: `history` grows, and this is why."""

    @abstractmethod
    async def record_server(self) -> None:
        """Note in `meta` which server this is, and what was seen to have happened to it."""

    @abstractmethod
    async def register(self, me: RunnerIdentity, lease: float) -> None:
        """Insert my runner row; expires_at = database now + lease (seconds). A dead id: `RunnerDeclaredDead`."""

    @abstractmethod
    async def renew(self, runner_id: int, lease: float) -> Renewal:
        """expires_at = greatest(expires_at, database now + lease), but no later than database now + 2 leases (its clock
        may have been set back); renew_count + 1; only while not dead."""

    @abstractmethod
    async def set_draining(self, runner_id: int) -> None: ...

    @abstractmethod
    async def read_topology(self) -> Topology: ...

    @abstractmethod
    async def declare_dead(self, runner_id: int, renew_count: int) -> bool:
        """True if this runner is dead now (by this call or before): expired by the database's clock and renew_count
        unchanged. Patience (R2) is the caller's part."""

    # -- locks of sessions: only where `Capabilities.session_locks`
    @abstractmethod
    def on_lost(self, call: Callable[[], None]) -> None:
        """Call this on the store's loop as soon as its connection, and with it a lock held, goes away."""

    @abstractmethod
    async def hold_lock(self, runner_id: int) -> int | None:
        """Hold, for as long as this store's connection lives, the lock by which others see that the runner does.

        The session that holds it now (`Renewal.session` tells whether it still is the one); None: somebody else does,
        which can only be an earlier connection of the same runner. Holding it twice does no harm."""

    @abstractmethod
    async def end_lock_holder(self, runner_id: int) -> None:
        """End every other session that holds this runner's lock. They are gone a moment later."""

    @abstractmethod
    async def free_locks(self, runner_ids: Sequence[int]) -> Collection[int]:
        """Those of these runners whose lock nobody holds. Looks only: never in the way of one who takes it."""

    @abstractmethod
    async def declare_lost(self, runner_id: int, renew_count: int) -> bool:
        """As `declare_dead`, but the lease need not be over: nobody holds the lock, and renew_count is unchanged."""

    @abstractmethod
    async def declare_others_dead(self, runner_id: int) -> Sequence[int]:
        """Everybody but me is dead: only for a process that holds the database file's OS lock."""

    @abstractmethod
    async def take_shards(
        self, runner_id: int, shard_ids: Sequence[int], dead: Sequence[int]
    ) -> Sequence[ShardHold]:
        """Take shards that are free or belong to runners known dead; epoch + 1. Those taken; none if I am dead."""

    @abstractmethod
    async def release_shards(self, runner_id: int, holds: Sequence[ShardHold]) -> None:
        """Give shards up: runner_id NULL where row and epoch are still mine."""

    @abstractmethod
    async def leave(self, runner_id: int) -> None:
        """A clean end: release every shard still mine, mark my row dead."""

    @abstractmethod
    async def delete_dead_runners(self, before: float) -> int:
        """Rows dead and expired before, that no fence or shard row names."""


class HintChannel(ABC):
    """Hints between processes (R5). Send after the commit, coalesced; own hints do not come back."""

    @abstractmethod
    async def open(self, receive: Callable[[Sequence[Hint]], None]) -> None:
        """``receive`` is called on the loop that opened the channel; after a reconnect it gets an ANY hint."""

    @abstractmethod
    def send(self, hints: Sequence[Hint]) -> None:
        """Never blocks, never raises; dropped when the channel is down."""

    @abstractmethod
    async def close(self) -> None: ...
