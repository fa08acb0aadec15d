"""What callers of a client may say, checked before anything is asked of the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from perdure.runtime.authoring.errors import InvalidName
from perdure.runtime.authoring.names import check_label, check_tags
from perdure.storage.errors import InputError
from perdure.storage.model import RunStatus


class StartOptions(TypedDict, total=False):
    """What a start may say beside its payload; all optional.

    run_id: an id of your own, at most 200 bytes. source: who starts it ("app"). tenant, subject: on whose behalf.
    trace: the starter's trace; left out, a W3C traceparent where OpenTelemetry is set up.
    tags: shown and filtered by, beside the workflow's own.
    """

    run_id: str | None
    source: str
    tenant: str | None
    subject: str | None
    trace: str | None
    tags: Sequence[str]


def status_of(value: RunStatus | str) -> RunStatus:
    try:
        return RunStatus(value)
    except ValueError:
        valid = ", ".join(RunStatus)
        raise InputError(f"unknown status {value!r}: use one of {valid}") from None


def check_options(options: StartOptions) -> None:
    """Raises `InvalidName`, TypeError for an option that does not exist."""
    if not options:
        return
    for name in options:
        if name not in StartOptions.__annotations__:
            known = ", ".join(StartOptions.__annotations__)
            raise TypeError(f"start() takes no option {name!r}: use {known}")
    for what in ("source", "tenant", "subject", "trace"):
        check_label(what, options.get(what))
    if options.get("source", "") is None:
        raise InvalidName("source is None: leave it out, or say who starts the run")
    if "tags" in options:
        options["tags"] = check_tags(options["tags"])  # a generator gives them once


def check_number(what: str, value: object, *kinds: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 2**53:  # type: ignore[operator]
        raise InputError(f"{what} = {value!r}: use a number from 0 on")


LONGEST_WAIT = 1e9
"""Seconds; some event loops refuse longer timers."""


def check_timeout(timeout: object) -> float | None:
    """Seconds to wait, None: for ever. One that is over already is fine, it was left of some other time limit."""
    if timeout is None:
        return None
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or timeout != timeout:
        raise InputError(
            f"timeout = {timeout!r}: give a number of seconds, or None to wait for ever"
        )
    return float(min(timeout, LONGEST_WAIT))  # type: ignore[call-overload]


def joined(tags: Sequence[str]) -> str | None:
    return ",".join(dict.fromkeys(tags)) or None
