"""What the scripts of one merge know and were told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.storage.model import (
    ClaimedRun,
    ClaimRequest,
    Entry,
    Finish,
    Message,
    NewRun,
    RunWrite,
    SendStatus,
    ShardHold,
    StartOutcome,
    StrayRequest,
    Verdict,
)
from perdure.storage.verdicts import FenceSeen
from tests.harness.interleave import Case

FRESH_IDS = itertools.count(1_000_000_007, 7_919)
DURABLE = frozenset({Verdict.COMMITTED, Verdict.PARKED, Verdict.PARK_REFUSED})


def fresh_id() -> int:
    """For batches, claims and start tokens: never the same twice in this process."""
    return next(FRESH_IDS)


@dataclass(slots=True)
class Attempt:
    """A write on its way. told: the verdicts in the order in which the caller got them."""

    runner_id: int
    write: RunWrite
    batch_id: int = field(default_factory=fresh_id)
    verdict: Verdict | None = None
    told: list[str] = field(default_factory=list)

    def tell(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.told.append(verdict.value)

    @property
    def ending(self) -> Finish | None:
        return self.write.outcome if isinstance(self.write.outcome, Finish) else None


@dataclass(slots=True)
class Sending:
    """A message on its way."""

    message: Message
    status: SendStatus | None = None


@dataclass(slots=True)
class Starting:
    """A start on its way."""

    run: NewRun
    outcome: StartOutcome | None = None


@dataclass(slots=True)
class Asking:
    """A yes-or-no answer of an operator's call: a cancel, a suspend, or the resume of a held run."""

    run_id: str
    resume: bool = False
    suspend: bool = False
    batch_id: int = field(default_factory=fresh_id)
    answer: bool | None = None


@dataclass(slots=True)
class Claiming:
    """A claim and what the new holder then read of the run's journal. later: not at the first scan."""

    request: ClaimRequest | StrayRequest
    later: bool = False
    run: ClaimedRun | None = None
    journal: Sequence[Entry] | None = None


@dataclass(slots=True)
class Notes:
    """Everything about one merge. a: the runner that holds the shard at first; b, c: its heirs.

    seen: wake_seq as last read, and how many messages came "before". said: what a script was told, in
    words. ghost: the session that was lost. fence: what the settlement has read of it.
    """

    key: str
    number: int
    held: dict[str, ClaimedRun] = field(default_factory=dict)
    holds: dict[int, list[ShardHold]] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    sendings: dict[str, Sending] = field(default_factory=dict)
    starts: dict[str, Starting] = field(default_factory=dict)
    askings: dict[str, Asking] = field(default_factory=dict)
    claims: dict[str, Claiming] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    ghost: object = None
    fence: FenceSeen | None = None

    @property
    def a(self) -> int:
        return self.runner(1)

    @property
    def b(self) -> int:
        return self.runner(2)

    @property
    def c(self) -> int:
        return self.runner(3)

    @property
    def workflow(self) -> str:
        """Of its runs alone, so that a lender of one merge takes nothing of another."""
        return f"tests.flow-{self.number}"

    def runner(self, place: int) -> int:
        return self.number * 10 + place

    def run_id(self, name: str = "") -> str:
        """The main run of the merge, or one of its children."""
        return f"{self.key}.{name}" if name else self.key


def notes_of(case: Case) -> Notes:
    found = case.state.get("notes")
    if found is None:
        number = int(case.key.rpartition("-")[2])
        found = case.state["notes"] = Notes(case.key, number)
    assert isinstance(found, Notes)
    return found
