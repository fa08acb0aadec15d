"""Lengths of time and instants as people write them."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from decimal import Decimal

from perdure.runtime.authoring.errors import InvalidDuration
from perdure.storage.clock import to_instant

Duration = float | int | timedelta | str
"""Seconds, a timedelta, or text such as "250ms", "1h 30m", "7 days"."""

LONGEST = 1000 * 365.25 * 86400.0
"""Seconds; 1,000 years. Beyond it calendars and engines stop agreeing."""

EXAMPLES = 'use seconds (30, 0.25), a timedelta, or text such as "250ms", "1h 30m", "7 days"'

_UNITS: dict[str, Decimal] = {}
for _seconds, _names in (
    ("0.000001", "us µs micro micros microsecond microseconds"),
    ("0.001", "ms msec msecs milli millis millisecond milliseconds"),
    ("1", "s sec secs second seconds"),
    ("60", "m min mins minute minutes"),
    ("3600", "h hr hrs hour hours"),
    ("86400", "d day days"),
    ("604800", "w week weeks"),
):
    _UNITS.update(dict.fromkeys(_names.split(), Decimal(_seconds)))

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]+)(?:\s*,\s*(?=[0-9])|\s*(?=[0-9]|$))")
_CALENDAR = re.compile(r"\b(mo|mon|month|months|y|yr|yrs|year|years)\b|[0-9]mo\b|[0-9]y\b")


def to_seconds(value: Duration, what: str = "duration") -> float:
    """``value`` as seconds, rounded to a microsecond, at least 0. Raises InvalidDuration naming ``what``."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        seconds = _parse(value, what)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidDuration(
            f"{what} {value!r} is {type(value).__name__}, which is no length of time: {EXAMPLES}"
        )
    else:
        seconds = _finite(value, what)
    if seconds < 0:
        raise InvalidDuration(
            f"{what} {value!r} is negative: use max(0, …), or wait until an instant, which may have passed"
        )
    if seconds > LONGEST:
        raise InvalidDuration(f"{what} {value!r} is longer than 1,000 years: {EXAMPLES}")
    return to_instant(seconds)


def to_unix(instant: datetime, what: str = "instant") -> float:
    """An aware datetime as Unix seconds, rounded to a microsecond. Raises InvalidDuration."""
    if not isinstance(instant, datetime):
        raise InvalidDuration(
            f"{what} {instant!r} is {type(instant).__name__}, not a datetime: use e.g. "
            "datetime(2030, 1, 31, 12, tzinfo=UTC)"
        )
    if instant.utcoffset() is None:
        raise InvalidDuration(
            f"{what} {instant!r} has no time zone, so it is another instant on every machine: use e.g. "
            "datetime(2030, 1, 31, 12, tzinfo=UTC) or .astimezone()"
        )
    return to_instant(instant.timestamp())


def _finite(value: float, what: str) -> float:
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if math.isnan(seconds):
        raise InvalidDuration(f"{what} is not a number (nan): {EXAMPLES}")
    return seconds


def _parse(text: str, what: str) -> float:
    rest = text.strip().lower()
    total = Decimal(0)
    seen: set[Decimal] = set()
    position = 0
    if not rest:
        raise InvalidDuration(f"{what} {text!r} is empty: {EXAMPLES}")
    while position < len(rest):
        part = _PART.match(rest, position)
        unit = _UNITS.get(part.group(2)) if part else None
        if part is None or unit is None:
            raise InvalidDuration(_complaint(text, rest, what))
        if unit in seen:
            raise InvalidDuration(f"{what} {text!r} names one unit twice: {EXAMPLES}")
        seen.add(unit)
        total += Decimal(part.group(1)) * unit
        position = part.end()
    return float(total)


def _complaint(text: str, rest: str, what: str) -> str:
    if rest[0] == "-":
        return f"{what} {text!r} is negative: {EXAMPLES}"
    if re.fullmatch(r"[0-9.]+", rest):
        return f"{what} {text!r} has no unit: write {rest} (a number of seconds) or {rest + ' s'!r}"
    if _CALENDAR.search(rest):
        return f"{what} {text!r} has months or years, whose length varies: say how many days"
    return f"{what} {text!r} is no length of time I can read: {EXAMPLES}"
