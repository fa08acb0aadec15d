"""What is looked at to judge the health of a database and of the runs in it. Values only; who judges is above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A transaction that somebody has open. seconds: for how long. state: as the server calls it."""

    pid: int
    application: str
    user: str
    state: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Rows of a table, as counted by the server; autovacuum: whether it may clean it."""

    name: str
    live: int
    dead: int
    autovacuum: bool


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """settings: those that decide whether a commit is kept, and whether rows are cleaned up, as the server says them.

    server: whether there is a server with sessions, connections and tables to look at; else the rest is empty.
    rotated: how a pooler was seen to give a session another server connection; None: it was not.
    connections: in use now. connections_most: for roles without privileges. hidden: sessions this role cannot see into.
    """

    settings: Mapping[str, str]
    server: bool
    rotated: str | None = None
    connections: int = 0
    connections_most: int = 0
    hidden: int = 0
    sessions: Sequence[SessionFacts] = ()
    tables: Sequence[TableFacts] = ()


@dataclass(frozen=True, slots=True)
class StuckRun:
    """why: "due" (nobody took it), "running" (no entry since), "timer" (it waits for an instant that is not set).

    idle: seconds."""

    run_id: str
    workflow: str
    why: str
    idle: float


@dataclass(frozen=True, slots=True)
class HeldRun:
    run_id: str
    workflow: str
    hold: str


@dataclass(frozen=True, slots=True)
class RunFacts:
    """workflows: how many runs of each have not ended. stuck: the longest idle first. held: on hold, some of them;
    held_count: all."""

    workflows: Mapping[str, int]
    stuck: Sequence[StuckRun]
    held: Sequence[HeldRun]
    held_count: int
