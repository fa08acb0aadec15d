"""Sentences for a body that does not fit its journal (R14): what was recorded, what is done now, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.runtime.body.port import StepCall
from perdure.storage.model import Entry, EntryKind

_SHOWN = 5
_TEXT_LIMIT = 500

REMEDY = (
    "The code of the workflow has changed in a way this run cannot follow, or does something that differs between "
    "lives (time, randomness, sets of strings). Restore the earlier code and resume the run."
)


def not_awaited(entry: Entry, awaited: Sequence[str]) -> str:
    """The journal has a key that this body never asked for."""
    now = ", ".join(awaited[:_SHOWN]) or "nothing"
    more = f" and {len(awaited) - _SHOWN} more" if len(awaited) > _SHOWN else ""
    return (
        f"entry {entry.seq} of the journal is {_named(entry)}{_recorded_input(entry)}, but the body does not wait "
        f"for that; it waits for {now}{more}. {REMEDY}"
    )


def other_input(entry: Entry, call: StepCall) -> str:
    """The same step is called with another input."""
    before = _text(entry.input, entry.input_hash)
    return (
        f"entry {entry.seq} of the journal: {_named(entry)} was recorded with input {before}, now the body calls it "
        f"with input {_text(call.input_text, call.input_hash)}. {REMEDY}"
    )


def ended_early(entry: Entry) -> str:
    """The body has ended before the journal has."""
    return f"the body ended before entry {entry.seq} of its journal, {_named(entry)}{_recorded_input(entry)}. {REMEDY}"


def _named(entry: Entry) -> str:
    if entry.kind is EntryKind.CANCEL:
        return "the cancel"
    kind = {EntryKind.ATTEMPT: "failed attempt of step", EntryKind.SIGNAL: "signal wait"}
    return f"{kind.get(entry.kind, entry.kind.value)} {entry.key}"


def _recorded_input(entry: Entry) -> str:
    if entry.kind not in (EntryKind.STEP, EntryKind.ATTEMPT):
        return ""
    return f" with input {_text(entry.input, entry.input_hash)}"


def _text(text: str | None, input_hash: int | None) -> str:
    if text is None:
        return f"of hash {input_hash}"
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}… (hash {input_hash})"
