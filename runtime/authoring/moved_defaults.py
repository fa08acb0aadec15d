"""Recorded inputs of fields whose default factory gave another answer then.

A field equal to its default is left out of the canonical text. Factories such as `date.today`, or one that reads the
environment, answer differently on another day or in another pod: the same value is then left out in one life and
written in the next. The hash cannot tell which; so where it differs, the texts that other answers would have made are
tried, before anybody is told that the body does something else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

from perdure.runtime.authoring.canonical import (
    canonical_text,
    equal,
    fields_of,
    hash_text,
    writes_itself,
)

_MOST_TRIED = 64
"""Texts; each further field whose default moves doubles them at least."""

_MOST_WRITTEN = 50_000
"""Values in all of these texts together: a tenth of a second or two on the host's loop."""

_MOST_HELD = 15

_NONE_HELD = object()
"""An answer that no value in the input equals: the field is written everywhere."""

_Field = tuple[type, str]
_Answers = dict[_Field, Any]


def may_have_been(given: dict[str, Any], recorded: int) -> bool:
    """Whether ``given``, a step's arguments by name, has the hash ``recorded`` under other answers of its factories."""
    held: dict[_Field, list[Any]] = {}
    size = _collect(given, held)
    if not held:
        return False
    choices = [(values[0], _NONE_HELD, *values[1:]) for values in held.values()]
    tried = max(2, min(_MOST_TRIED, _MOST_WRITTEN // size))
    return any(
        hash_text(canonical_text(_written(given, dict(zip(held, answers, strict=True)))))
        == recorded
        for answers in itertools.islice(itertools.product(*choices), tried)
    )


def _collect(value: Any, held: dict[_Field, list[Any]]) -> int:
    """The distinct values of each moving field, anywhere in ``value``. Returns how many values there are in all."""
    size = 1
    kind: Any = type(value)
    moving = _moving(kind)
    for name, _, _ in fields_of(kind):
        inner = getattr(value, name, None)
        if name in moving:
            known = held.setdefault((kind, name), [])
            if len(known) < _MOST_HELD and not any(equal(inner, other) for other in known):
                known.append(inner)
        size += _collect(inner, held)
    for inner in _parts(value):
        size += _collect(inner, held)
    return size


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, BaseModel):
        yield from (value.model_extra or {}).values()
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, Set, deque)):
        yield from value


def _written(value: Any, answers: _Answers) -> Any:
    """``value`` with plain mappings in place of models and dataclasses, each without what equals its default."""
    kind: Any = type(value)
    if isinstance(value, BaseModel) and writes_itself(kind):
        return _written_by_itself(value, answers)
    if fields := fields_of(kind):
        kept = {
            name: _written(getattr(value, name), answers)
            for name, default, factory in fields
            if hasattr(value, name) and not _left_out(value, name, default, factory, answers)
        }
        more = (value.model_extra or {}) if isinstance(value, BaseModel) else {}
        return kept | {name: _written(item, answers) for name, item in more.items()}
    if isinstance(value, Mapping):
        return {key: _written(item, answers) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_written(item, answers) for item in value]
    if isinstance(value, Set):
        return sorted((_written(item, answers) for item in value), key=canonical_text)
    return value


def _written_by_itself(model: BaseModel, answers: _Answers) -> dict[str, Any]:
    """Its own fields only: what lies inside is dumped as it is."""
    kept = model.model_dump(exclude_defaults=True, round_trip=True)
    kind: Any = type(model)
    for name, default, factory in fields_of(kind):
        if (kind, name) not in answers:
            continue
        if _left_out(model, name, default, factory, answers):
            kept.pop(name, None)
        elif name not in kept:
            kept |= model.model_dump(include={name}, round_trip=True)
    return kept


def _left_out(value: Any, name: str, default: Any, factory: Any, answers: _Answers) -> bool:
    inner = getattr(value, name)
    key = (type(value), name)
    return equal(inner, answers[key]) if key in answers else equal(inner, default, factory)


@lru_cache(maxsize=4096)
def _moving(kind: Any) -> frozenset[str]:
    """The fields of a type whose default factory may answer otherwise another time."""
    return frozenset(
        name for name, _, factory in fields_of(kind) if factory is not None and _moves(factory)
    )


def _moves(factory: Any) -> bool:
    try:
        made = factory()
    except Exception:
        return True
    if isinstance(made, (list, tuple, dict, Set, deque)):
        return bool(made)
    kind: Any = type(made)
    return kind is not factory or not fields_of(kind) or bool(_moving(kind))
