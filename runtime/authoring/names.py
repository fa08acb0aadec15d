"""Which names and ids are allowed, and how run ids come about.

Ids are compared byte for byte by every engine, so what an engine might pad, fold or refuse is refused here (R11).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from perdure.runtime.authoring.errors import InvalidName
from perdure.storage.clock import Clock, Randomness

NAME_CHARS = 200
ID_BYTES = 200
LABEL_BYTES = 500
KEY_MARKS = ">#/"
"""Journal keys are made of task path, "/", name, "#" and occurrence (R13): names may not hold these."""


def check_step_name(name: object) -> str:
    """``name`` if it can be a step's: 1–200 characters, none of ``> # /``. Raises InvalidName."""
    return _check_name("step name", name, KEY_MARKS)


def check_signal_name(name: object) -> str:
    """``name`` if it can be a signal's: the same rules as for steps, keys hold it too. Raises InvalidName."""
    return _check_name("signal name", name, KEY_MARKS)


def check_timer_name(name: object) -> str:
    """``name`` if it can stand on a timer's events. Raises InvalidName."""
    return _check_name("timer name", name, "")


def check_workflow_name(name: object) -> str:
    """``name`` if it can be a workflow's: 1–200 characters, nothing unprintable. Raises InvalidName."""
    return _check_name("workflow name", name, "")


def check_run_id(run_id: object) -> str:
    """``run_id`` if it can be one: 1–200 bytes of UTF-8, no blank edges, no NUL. Raises InvalidName."""
    return _check_id("run id", run_id)


def check_message_id(message_id: object) -> str:
    """``message_id`` if it can be one: the same rules as for run ids. Raises InvalidName."""
    return _check_id("message id", message_id)


def check_label(what: str, value: object) -> str | None:
    """``value`` if it can be kept beside a run for people and filters: None, or text of at most 500 bytes.

    Raises InvalidName."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidName(f"{what} {_shown(value)} is {type(value).__name__}, not str")
    if fault := storable_fault(value):
        raise InvalidName(f"{what} {_shown(value)} {fault}: leave it out")
    size = len(value.encode())
    if size > LABEL_BYTES:
        raise InvalidName(
            f"{what} {_shown(value)} has {size} bytes; at most {LABEL_BYTES} are allowed"
        )
    return value


def check_tags(tags: object) -> list[str]:
    """``tags`` if they can be a run's: several texts, not empty, without commas. Raises InvalidName."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise InvalidName(f"tags are {_shown(tags)}: give a list of texts")
    found = [_check_text("tag", tag) for tag in tags]
    for tag in found:
        if "," in tag:
            raise InvalidName(f"tag {_shown(tag)} holds a comma: give two tags")
    check_label("the tags together,", ",".join(found))
    return found


def check_known_id(run_id: object) -> str:
    """``run_id`` if some run could have it, as far as its type and characters go. Raises InvalidName."""
    if not isinstance(run_id, str):
        raise InvalidName(f"run id {_shown(run_id)} is {type(run_id).__name__}, not str")
    if fault := storable_fault(run_id):
        raise InvalidName(f"run id {_shown(run_id)} {fault}: no run has it")
    return run_id


def keyed_run_id(workflow: str, key: str, tenant: str | None = None) -> str:
    """The run id that (tenant, workflow, key) has for ever: blake2b-128, 32 hex digits.

    Every part is preceded by its length, so that no two triples run together; no tenant differs from an empty one.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"perdure-run-id")
    for part in (tenant, workflow, key):
        if part is None:
            digest.update(b"\x00")
        else:
            data = part.encode()
            digest.update(b"\x01" + len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def new_run_id(clock: Clock, randomness: Randomness) -> str:
    """A run id nobody else has: 12 hex digits of milliseconds since 1970, then 80 random bits."""
    millis = int(clock.now() * 1000) & ((1 << 48) - 1)
    chance = (randomness.bits63() << 40 ^ randomness.bits63()) & ((1 << 80) - 1)
    return f"{millis:012x}{chance:020x}"


def storable_fault(text: str) -> str | None:
    """Why ``text`` cannot be stored by every engine, or None."""
    if "\x00" in text:
        return f"holds a NUL character at position {text.index(chr(0))}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}"
    return None


def _check_name(what: str, name: object, forbidden: str) -> str:
    text = _check_text(what, name)
    if len(text) > NAME_CHARS:
        raise InvalidName(
            f"{what} {_shown(text)} has {len(text)} characters; at most {NAME_CHARS} are allowed"
        )
    for mark in forbidden:
        if mark in text:
            raise InvalidName(
                f"{what} {_shown(text)} holds {mark!r}: journal keys are made with it, choose another name"
            )
    unprintable = next((mark for mark in text if not mark.isprintable()), None)
    if unprintable is not None:
        raise InvalidName(
            f"{what} {_shown(text)} holds the unprintable character {unprintable!r}: leave it out"
        )
    return text


def _check_id(what: str, value: object) -> str:
    text = _check_text(what, value)
    size = len(text.encode())
    if size > ID_BYTES:
        raise InvalidName(
            f"{what} {_shown(text)} has {size} bytes; at most {ID_BYTES} are allowed: use a hash of it"
        )
    return text


def _check_text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidName(f"{what} {_shown(value)} is {type(value).__name__}, not str")
    if not value:
        raise InvalidName(f"{what} is empty: give it at least one character")
    if fault := storable_fault(value):
        raise InvalidName(f"{what} {_shown(value)} {fault}: leave it out")
    if value != value.strip():
        raise InvalidName(f"{what} {_shown(value)} begins or ends with a blank: strip it")
    return value


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
