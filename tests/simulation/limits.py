"""Limits of the product that no small world reaches, made small: what happens at them happens in every seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from perdure.runtime import results, retention
from perdure.runtime.engine import activation, borrowing, claiming, committer, group, mail

SMALL = (
    (activation, "PART_BYTES", 500),
    (borrowing, "MOST_AT_ONCE", 1),
    (claiming, "MOST_PER_CLAIM", 2),
    (claiming, "PER_SHARD", 1),
    (claiming, "UPCOMING_LIMIT", 2),
    (committer, "GOING_ON", 1.0),
    (committer, "IN_STEP", 2),
    (group, "BATCH_BYTES", 900),
    (group, "BATCH_ITEMS", 2),
    (retention, "BATCH", 1),
    (retention, "PERIOD", 2.0),
    (mail, "READ_AT_ONCE", 1),
    (results, "READ_AT_ONCE", 2),
)


@contextmanager
def small_limits(chance: Random) -> Iterator[None]:
    """In every other world, about half of them."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    if chance.random() < 0.5:
        for module, name, small in SMALL:
            if chance.random() < 0.5:
                setattr(module, name, small)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
