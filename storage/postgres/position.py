"""Where a server stands in its history, and what two looks at it say about what happened in between."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Position:
    """system: identifier of the cluster of databases, "unknown" where the role may not read it. timeline, flushed:
    which of its histories, and how far that is on disk (bytes); None where the server does not say."""

    system: str
    timeline: int | None
    flushed: int | None

    def __str__(self) -> str:
        return f"{self.system}/{self.timeline if self.timeline is not None else UNKNOWN}"

    def may_be(self, written: str) -> bool:
        """Whether ``written``, a position as text, may be where this is: what either does not know tells nothing."""
        pairs = zip(written.split("/"), str(self).split("/"), strict=False)
        return all(UNKNOWN in pair or pair[0] == pair[1] for pair in pairs)


def what_changed(known: Position, found: Position) -> str | None:
    """In words, what must have happened between two looks; None: nothing that matters."""
    if UNKNOWN not in (known.system, found.system) and known.system != found.system:
        return f"another server: system identifier {found.system}, before {known.system}"
    flushed = None not in (known.flushed, found.flushed)
    lost = flushed and (found.flushed or 0) < (known.flushed or 0)
    ends = f"its log ends at {found.flushed}, {known.flushed} had been flushed before"
    if None not in (known.timeline, found.timeline) and known.timeline != found.timeline:
        rest = (
            f"commits are lost: {ends}" if lost else "its log is no shorter than what was seen here"
        )
        return f"a fail-over: time line {found.timeline}, before {known.timeline}; {rest}"
    return f"an older copy of the server: commits are lost: {ends}" if lost else None
