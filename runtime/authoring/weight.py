"""How large the encoding of a value will be, roughly and quickly: what is large is encoded off the host's loop."""

from __future__ import annotations

from itertools import islice
from typing import Any

HEAVY = 256 * 1024
"""Bytes of JSON from which on encoding and decoding happen in a thread: on the loop they would hold up everybody, for
half a second with 2 MiB of small models."""

_LOOKED_AT = 4
"""Items of a container, which stand for all of it."""
_DEPTH = 4
_SMALL = frozenset((int, float, bool, type(None)))


def is_heavy(value: object) -> bool:
    """Whether a value's JSON is likely to have more than 256 KiB."""
    kind = type(value)
    if kind in _SMALL:
        return False
    if kind is str or kind is bytes:
        return len(value) > HEAVY  # type: ignore[arg-type]
    return _weight(value, _DEPTH) > HEAVY


def _weight(value: Any, depth: int) -> float:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value) + 2
    if kind in _SMALL or depth == 0:
        return 8
    if kind is dict:
        parts: Any = value.values()
        names = 12 * len(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts, names = value, 0
    else:
        fields = getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return 8
        # Fields differ from each other, so each is looked at; models are narrow.
        return sum(_weight(field, depth - 1) + 12 for field in list(fields.values()))
    count = len(parts)
    if count == 0:
        return 2
    looked_at = [_weight(part, depth - 1) for part in islice(parts, _LOOKED_AT)]
    return names + count * (1 + sum(looked_at) / len(looked_at))
