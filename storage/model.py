"""The values that cross the storage seam. No I/O, no SQL, no engine names.

Instants are floats, Unix seconds rounded to whole microseconds (see `clock.to_instant`); ``None`` means never.
Payloads, results and errors are text, encoded and decoded above this floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from perdure.storage.values import value

SLOTS = 65_536
"""A run's slot is ``xxh3_64(run_id) % SLOTS``, stored with the run; shards are ranges of slots."""

FLOOR_MARGIN = 10.0
"""Seconds by which a low-water mark stays behind the clock at least: a row shows only when its transaction has
committed, which takes no longer than a statement's deadline and a lock wait.
Who allows more than 5 s asks with lower ones."""

FORMAT = 1
"""Format number of journal entries and payload envelopes written by this code (R16)."""


class RunStatus(StrEnum):
    """Where a run stands. The last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED)


class Reason(StrEnum):
    """Why a run is suspended. The holds run no user code until `resume`."""

    TIMER = "timer"
    SIGNAL = "signal"
    UPDATE = "update"
    EVENT = "event"
    CHILD = "child"
    QUEUE = "queue"
    RETRY = "retry"
    OPERATOR = "operator"
    FAILURE = "failure"
    CRASH_LOOP = "crash-loop"
    NONDETERMINISM = "nondeterminism"

    @property
    def hold(self) -> bool:
        return self in (Reason.OPERATOR, Reason.FAILURE, Reason.CRASH_LOOP, Reason.NONDETERMINISM)

    @property
    def forced(self) -> bool:
        """A hold that no message refuses. An operator's yields to mail: the suspend may have been taken back."""
        return self.hold and self is not Reason.OPERATOR


class EntryKind(StrEnum):
    """What an entry of the journal records."""

    STEP = "step"
    ATTEMPT = "attempt"
    TIMER = "timer"
    SIGNAL = "signal"
    CANCEL = "cancel"
    # Named now, written by later releases:
    UPDATE = "update"
    CHILD = "child"
    NESTED = "nested"
    RESUME = "resume"


class MessageKind(StrEnum):
    """What a message in a run's mailbox asks for."""

    SIGNAL = "signal"
    CANCEL = "cancel"
    CHILD = "child"
    UPDATE = "update"
    SUSPEND = "suspend"
    """An operator wants the run on hold. Unread until `release_hold` takes it back or the run ends."""
    UNKNOWN = "unknown"
    """Read only: a message of a later release. It is left in its mailbox for code that knows it (R16)."""

    @classmethod
    def _missing_(cls, value: object) -> MessageKind:
        return cls.UNKNOWN


@value(frozen=True, slots=True)
class Entry:
    """One line of a run's journal. ``seq`` starts at 1; entry 0, "entered", is the fence's ``entered_at``.

    key: where the entry belongs in the body: task path + "/" + name + "#" + occurrence (R13); "" for a cancel.
    at: run time of the delivery (R14), never lower than that of the entry before it.
    status: "ok" or "error". attempt: number of attempts made, 1 for the first.
    output, error: encoded text; error is the recorded error as JSON.
    """

    seq: int
    kind: EntryKind
    key: str
    at: float
    status: str = "ok"
    attempt: int = 1
    input_hash: int | None = None
    input: str | None = None
    output: str | None = None
    error: str | None = None
    started_at: float | None = None
    format: int = FORMAT


@value(frozen=True, slots=True)
class Message:
    """One message in a run's mailbox, ordered by the wake_seq its sender was given (R6)."""

    run_id: str
    message_id: str
    kind: MessageKind
    name: str = ""
    body: str | None = None
    wake_seq: int = 0
    sent_at: float = 0.0
    format: int = FORMAT


@value(frozen=True, slots=True)
class RunEvent:
    """Something people want to see on the timeline that the journal itself does not say (``timer-set``, …)."""

    type: str
    at: float
    detail: str | None = None


@value(frozen=True, slots=True)
class OpenItems:
    """What a run has begun and not ended, for people. events: announced, without an entry since, newest first;
    attempts: the last failed attempt of each step that will be tried again."""

    events: Sequence[RunEvent] = ()
    attempts: Sequence[Entry] = ()


@value(frozen=True, slots=True)
class NewRun:
    """A start. ``start_token`` is new per call, so that a start of unknown outcome can be settled (R9).

    fresh: the id was made for this call, so that only an earlier sending of it can have it. A store may insert without
    asking first; what comes of a start is the same.
    """

    run_id: str
    slot: int
    workflow: str
    start_token: int
    payload: str
    seed: int
    version: int = 1
    source: str = "app"
    tenant: str | None = None
    parent_id: str | None = None
    trace: str | None = None
    subject: str | None = None
    tags: str | None = None
    format: int = FORMAT
    birth: Birth | None = None
    fresh: bool = False

    def born(self, birth: Birth) -> NewRun:
        """The same start with that wish. (`dataclasses.replace` takes twice as long, and each start comes here.)"""
        return NewRun(
            self.run_id,
            self.slot,
            self.workflow,
            self.start_token,
            self.payload,
            self.seed,
            self.version,
            self.source,
            self.tenant,
            self.parent_id,
            self.trace,
            self.subject,
            self.tags,
            self.format,
            birth,
            self.fresh,
        )


@value(frozen=True, slots=True)
class Birth:
    """A start's wish that its run be born claimed: by which runner, in which shard as that one holds it, and under
    which fresh claim. Granted if the shard's row still says so and the runner is not dead; else the run is born
    pending. Whoever asks has a slot reserved for the run."""

    runner_id: int
    hold: ShardHold
    claim_id: int


@value(frozen=True, slots=True)
class StartOutcome:
    """``created`` by this start (also when an earlier send of it had arrived), else what already has the id.

    claimed: the run as the runner of the start's `Birth` holds it, if that was granted and the claim still stands."""

    run_id: str
    created: bool
    workflow: str
    status: RunStatus
    claimed: ClaimedRun | None = None


class SendStatus(StrEnum):
    DELIVERED = "delivered"
    DUPLICATE = "duplicate"
    ENDED = "ended"
    UNKNOWN_RUN = "unknown-run"
    FULL = "full"
    """Too many unread messages."""
    HEAVY = "heavy"
    """Their bodies, with this one, are too large together."""


@value(frozen=True, slots=True)
class SendOutcome:
    status: SendStatus
    slot: int | None = None
    """Of the run, for hints; None when there is no such run."""


@value(frozen=True, slots=True)
class ShardHold:
    """A shard as its holder knows it."""

    shard_id: int
    epoch: int


@value(frozen=True, slots=True)
class ClaimRequest:
    """What a runner offers to take.

    runner_id: me. holds: the shards to look into (hinted ones first; all of mine for a safety scan).
    workflows: the names I know (R15). in_memory: claims of runs I am executing, never claimed again.
    limit: free slots, the most runs this claim may take. per_shard: the most candidates per shard.
    orphans: also take ``running`` runs whose runner is dead, or mine and not in memory.
    ahead: seconds; runs due within them are taken now, their timer fires on the runner's own clock.
    floor: low-water mark, instants below it are known to hold nothing claimable (None: look at all). It never counts
    above the database's clock less `FLOOR_MARGIN`.
    suspects: how many runs with a ``reclaim_count`` above 0 may be taken, those that fell with a runner once and have
    written nothing since (None: any number; 0: they are not even looked at).
    Due runs and orphans of workflows I do not know are marked as strays (R15). With a limit of 0 only those are looked
    for, and the answer's ``more`` and ``complete`` speak of them alone.
    """

    runner_id: int
    holds: Sequence[ShardHold]
    workflows: Sequence[str]
    in_memory: Sequence[int]
    limit: int
    per_shard: int = 50
    orphans: bool = False
    ahead: float = 0.0
    floor: float | None = None
    suspects: int | None = None


@value(frozen=True, slots=True)
class StrayRequest:
    """What a runner offers to take outside its own shards: strays of workflows it knows (R15).

    from_slot: where in the range of slots to begin, so that several runners do not all ask for the same ones.
    lost: also take what is ``running`` under this very runner, in whatever shard, and not in its memory.
    The rest as in `ClaimRequest`.
    """

    runner_id: int
    workflows: Sequence[str]
    in_memory: Sequence[int]
    limit: int
    suspects: int | None = None
    from_slot: int = 0
    lost: bool = False


@value(frozen=True, slots=True)
class ClaimedRun:
    """A run this runner now holds, with what a body needs to begin.

    revision: after the claim. next_seq: of the next entry, 1 for a run without a journal.
    entered_at: run time at which the body was first entered, the same in each life.
    reclaim_count: involuntary changes of claim since the last journal commit.
    wake_seq: of the locked wake row; 0 proves an empty mailbox, anything else: read it.
    last_batch: of the last write before this claim. Together with the revision it says whether anybody wrote since a
    park of mine: revisions alone may meet again after a fail-over that lost commits.
    """

    run_id: str
    slot: int
    claim_id: int
    epoch: int
    revision: int
    next_seq: int
    entered_at: float
    reclaim_count: int
    wake_seq: int
    workflow: str
    version: int
    payload: str
    payload_format: int
    seed: int
    created_at: float
    source: str
    parent_id: str | None
    trace: str | None
    taken_over: bool
    """The run was ``running`` under a runner that died."""
    tenant: str | None = None
    last_batch: int | None = None


@value(frozen=True, slots=True)
class Claims:
    """The answer to a claim. db_now: the database's clock. more: runs were taken or marked and a limit was reached, of
    the claim or per bucket: claim again.
    complete: nothing that may be claimed was left behind but suspects, neither locked nor over a limit.
    suspects_left: suspects were passed over for want of places. strays: workflows of the runs marked as strays.
    """

    runs: Sequence[ClaimedRun]
    db_now: float
    more: bool
    complete: bool = False
    suspects_left: bool = False
    strays: Sequence[str] = ()


@value(frozen=True, slots=True)
class Mailbox:
    """wake_seq and the unread messages in one snapshot: the only thing that may move ``seen`` (R6)."""

    wake_seq: int
    messages: Sequence[Message]
    db_now: float
    """The database's clock at the read: every message stored before it is in here."""


@value(frozen=True, slots=True)
class JournalPage:
    """The next part of some journals. entries: by run, by seq.

    more: runs whose journal may go on after these, and those that this page had no room for."""

    entries: Mapping[str, Sequence[Entry]]
    more: frozenset[str]


@value(frozen=True, slots=True)
class Park:
    """Leave memory until ``wake_at`` (None: only a message wakes it), unless a message arrived after ``seen``.

    A reason that is a hold keeps wake_at NULL until an operator acts; a forced one is never refused.
    """

    wake_at: float | None
    seen: int
    reason: Reason


@value(frozen=True, slots=True)
class Finish:
    """The end of a run. parent_id: whose mailbox is told."""

    status: RunStatus
    result: str | None = None
    error: str | None = None
    reason: str | None = None
    parent_id: str | None = None


@value(frozen=True, slots=True)
class RunWrite:
    """One durable write of one run, applied whole or not at all, behind the fence (R1).

    entries: seq must continue the fence's next_seq without a gap (another first seq: RELOAD; a gap within:
    DataRefused). consumed: message ids with the seq of the entry that took each.
    """

    run_id: str
    claim_id: int
    revision: int
    entries: Sequence[Entry] = ()
    consumed: Sequence[tuple[str, int]] = ()
    events: Sequence[RunEvent] = ()
    outcome: Park | Finish | None = None


class Verdict(StrEnum):
    """What became of a run's write.

    COMMITTED, PARKED: it is durable (PARKED: and the run left this runner).
    PARK_REFUSED: entries are durable, the run stays claimed: a message had arrived, or somebody had its wake row locked
    and may be leaving one: read the mailbox.
    AGAIN: certainly not written, claim and revision are as expected: send the same write again.
    RELOAD: the claim is mine but the revision is not: drop the body, load the run anew.
    FENCED: the run has another holder or has ended otherwise: drop the body.
    """

    COMMITTED = "committed"
    PARKED = "parked"
    PARK_REFUSED = "park-refused"
    AGAIN = "again"
    RELOAD = "reload"
    FENCED = "fenced"


@value(frozen=True, slots=True)
class RunnerRow:
    """One boot of one process."""

    runner_id: int
    replica_id: str
    address: str
    started_at: float
    expires_at: float
    renew_count: int
    dead: bool
    draining: bool = False
    workflows: Sequence[str] = ()
    placement_version: int = 1
    info: Mapping[str, str] = field(default_factory=dict)
    """Facts of the boot line, for `cluster status`."""


@value(frozen=True, slots=True)
class ShardRow:
    shard_id: int
    slot_lo: int
    slot_hi: int
    runner_id: int | None
    epoch: int


@value(frozen=True, slots=True)
class LockFacts:
    """What a database was found to be, for the choice of the lock mode.

    session_locks: others can see a lock that a session holds, and it ends with the session. rotated: how it was
    noticed that statements of one connection run in several sessions (a pooler); None: they do not.
    several_writers: what makes several servers take writes, each with locks of its own; None: there is one.
    """

    session_locks: bool
    rotated: str | None = None
    several_writers: str | None = None


@value(frozen=True, slots=True)
class Topology:
    """Runners and shards in one snapshot, with the database's clock."""

    runners: Sequence[RunnerRow]
    shards: Sequence[ShardRow]
    db_now: float


@value(frozen=True, slots=True)
class RunRecord:
    """A run as people and clients see it. ``reason``: of a suspension or a cancel."""

    run_id: str
    workflow: str
    version: int
    status: RunStatus
    slot: int
    source: str
    created_at: float
    payload: str
    payload_format: int
    started_at: float | None = None
    finished_at: float | None = None
    result: str | None = None
    error: str | None = None
    reason: str | None = None
    wake_at: float | None = None
    hold: str | None = None
    runner_id: int | None = None
    claim_id: int | None = None
    epoch: int | None = None
    reclaim_count: int = 0
    next_seq: int = 1
    unread: int = 0
    """Messages in the mailbox that no entry has taken. The wish to suspend the run is no message to it."""
    parent_id: str | None = None
    tenant: str | None = None
    trace: str | None = None
    subject: str | None = None
    tags: str | None = None
    stray: bool = False
    """Due, but the holder of its shard does not know its workflow: another runner may take it (R15)."""


@value(frozen=True, slots=True)
class RunFilter:
    """Newest first. Several statuses are alternatives; ``since`` compares created_at."""

    workflow: str | None = None
    statuses: Sequence[RunStatus] = ()
    reason: str | None = None
    source: str | None = None
    id_prefix: str | None = None
    since: float | None = None
    limit: int = 50
    offset: int = 0


class HintKind(StrEnum):
    """START: a run of this slot is due. WAKE: this run has mail. DONE: this run has ended.
    SHARDS: shards were released or a runner came or left. ANY: something changed.
    STRAY: runs of this workflow (`Hint.run_id`) are due where nobody knows them.
    PARKED: a run of this slot was parked, to fall due soon, by somebody who does not hold its shard."""

    START = "s"
    WAKE = "w"
    DONE = "d"
    SHARDS = "p"
    ANY = "*"
    STRAY = "stray"
    PARKED = "parked"


@value(frozen=True, slots=True)
class Hint:
    """Never the truth (R5): may be lost, doubled or late."""

    kind: HintKind
    run_id: str = ""
    slot: int = -1


@value(frozen=True, slots=True)
class Meta:
    """What all processes of one cluster agree on. Read at boot; another shard count refuses to boot."""

    schema_version: int
    min_code_version: int
    shard_count: int
    hash_name: str
    lock_mode: str | None
    cluster_id: str
    server_identity: str | None = None
    server: str | None = None
    """Which server runners last booted on (identifier/time line), as they wrote it down."""
    server_change: str | None = None
    """When and how that changed last."""
