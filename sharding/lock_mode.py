"""Which lock mode a pod uses: row leases alone, or with an advisory lock beside them. Pure.

Both modes keep the same leases. In advisory mode each runner also holds a lock of its keeper's session, and whoever
finds that lock free need not wait for the lease to run out. All pods of a cluster use one mode, kept in `meta`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perdure.storage.errors import ConfigurationError
from perdure.storage.model import LockFacts

LockMode = Literal["row", "advisory"]


@dataclass(frozen=True, slots=True)
class LockChoice:
    """The mode of this pod, and why, in words for people."""

    mode: LockMode
    why: str


def choose(wanted: str, agreed: str | None, facts: LockFacts) -> LockChoice:
    """wanted: auto, row or advisory, as set. agreed: what the cluster uses; None: nobody has booted yet.

    A mode set by hand that differs from the agreed one is returned as it is: whether the cluster can change is for
    the database to say. Raises `ConfigurationError` when advisory locks are asked for and cannot be had.
    """
    hindrance = _hindrance(facts)
    if wanted == "row":
        return LockChoice("row", "set by shard_lock")
    if wanted == "advisory":
        if hindrance is not None:
            raise ConfigurationError(
                f"PERDURE_SHARD_LOCK=advisory is not possible here: {hindrance}; {_remedy(facts)}"
            )
        return LockChoice("advisory", "set by shard_lock")
    if agreed == "advisory":
        if hindrance is not None:
            raise ConfigurationError(
                f"this cluster holds its shards with advisory locks, which this pod cannot: {hindrance}; "
                f"{_remedy(facts)} (with all pods stopped)"
            )
        return LockChoice("advisory", "auto: what this cluster agreed on")
    if hindrance is not None:
        return LockChoice("row", f"auto: {hindrance}")
    if agreed == "row":
        return LockChoice(
            "row",
            "auto: what this cluster agreed on (advisory would do: stop all pods, start one with "
            "PERDURE_SHARD_LOCK=advisory)",
        )
    return LockChoice("advisory", "auto: a lock ends with its session, and others see it")


def _hindrance(facts: LockFacts) -> str | None:
    """Why a session's lock cannot tell that a runner lives."""
    if facts.several_writers is not None:
        return f"{facts.several_writers}: several servers take writes, and none sees the locks of another"
    if not facts.session_locks:
        return "this database has no locks of sessions"
    if facts.rotated is not None:
        return f"a pooler rotates sessions ({facts.rotated})"
    return None


def _remedy(facts: LockFacts) -> str:
    if facts.session_locks and facts.several_writers is None:
        return "connect directly or through a pooler in session mode, or set PERDURE_SHARD_LOCK=row"
    return "set PERDURE_SHARD_LOCK=row"
