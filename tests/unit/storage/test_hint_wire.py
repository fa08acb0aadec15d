"""Hints on the wire: what came after the first release must not make its pods look at everything (R16)."""

from __future__ import annotations

import json

import pytest

from perdure.storage.model import Hint, HintKind
from perdure.storage.postgres.hints import decode, encode

HINTS = [
    Hint(HintKind.START, slot=7),
    Hint(HintKind.WAKE, "run", 65_535),
    Hint(HintKind.DONE, "run", 0),
    Hint(HintKind.SHARDS),
    Hint(HintKind.ANY),
    Hint(HintKind.STRAY, "shop.pay"),
    Hint(HintKind.PARKED, slot=0),
    Hint(HintKind.PARKED, slot=65_535),
]


def test_hints_come_out_as_they_went_in() -> None:
    (payload,) = encode(HINTS, sender="me")
    assert decode(payload, own="you") == HINTS
    assert decode(payload, own="me") == []


@pytest.mark.req("OP3")
def test_later_kinds_are_ends_of_unknown_runs_to_the_first_release() -> None:
    (payload,) = encode(HINTS, sender="me")
    known = {"s", "w", "d", "p", "*"}
    assert {kind for kind, _, _ in json.loads(payload)[1:]} <= known
    later = [
        part
        for part, hint in zip(json.loads(payload)[1:], HINTS, strict=True)
        if hint.kind not in known
    ]
    assert [(kind, slot < 0) for kind, _, slot in later] == [("d", True)] * 3
