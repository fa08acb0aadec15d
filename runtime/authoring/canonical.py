"""The canonical encoding of a step's input, and its hash (R13).

It goes by the values, not by annotations: one value has one text, in every process and on every run. Keys and sets
are sorted, fields equal to their default are left out, so that a field with a default may be added to a model while
runs are under way. It is compared and shown, never decoded; so NaN may stand in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Set
from enum import Enum
from functools import cache
from typing import Any, cast

import xxhash
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_json, to_jsonable_python


class NotEncodable(ValueError):
    """A value that has no canonical text; the message says which and what to do."""


def canonical_text(value: object) -> str:
    """The one text of ``value``. Raises NotEncodable."""
    try:
        text = _encode(value)
    except TypeError:  # dict keys that are not JSON's, or do not compare
        text = _guarded(value)
    except (RecursionError, ValueError) as error:
        raise _not_encodable(value, error) from error
    if text.isascii():
        return text
    # A lone surrogate becomes its JSON escape; everything else is left alone.
    return text.encode("utf-8", "backslashreplace").decode()


def arguments_text(given: dict[str, Any]) -> str:
    """The canonical text of arguments by name, which are in sorted order already. Raises NotEncodable.

    Plain values, the arguments of most steps, are written by pydantic: the same text in a quarter of the time.
    """
    for value in given.values():
        if type(value) not in _WRITTEN_ALIKE:
            return canonical_text(given)
    try:
        return to_json(given).decode()
    except PydanticSerializationError:  # a lone surrogate
        return canonical_text(given)


def hash_text(text: str) -> int:
    """xxh3_64 of the UTF-8 text as a signed 64-bit integer, which every engine can store."""
    value = xxhash.xxh3_64_intdigest(text.encode())
    return value - (1 << 64) if value >= 1 << 63 else value


def cut_text(text: str, limit: int) -> str:
    """``text``, or as much of its beginning as leaves room to say how long it was. ``limit`` in bytes."""
    if len(text) * 4 <= limit:
        return text
    data = text.encode()
    if len(data) <= limit:
        return text
    mark = f"… ({len(data):,} bytes in all)"
    kept = data[: max(0, limit - len(mark.encode()))].decode(errors="ignore")
    return kept + mark if limit > len(mark.encode()) else kept


def _guarded(value: object) -> str:
    try:
        return _encode(_rebuilt(value))
    except (RecursionError, ValueError, TypeError) as error:
        raise _not_encodable(value, error) from error


def _not_encodable(value: object, error: Exception) -> NotEncodable:
    if isinstance(error, NotEncodable):
        return error
    if isinstance(error, RecursionError):
        return NotEncodable(f"a {type(value).__name__} is nested too deeply, or holds itself")
    return NotEncodable(f"a {type(value).__name__} cannot be encoded: {error}")


def _plain(value: Any) -> Any:
    """What the JSON encoder writes in place of a value it does not know; it looks into the answer by itself."""
    if isinstance(value, BaseModel):
        return _model_fields(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass_fields(value)
    if isinstance(value, Set):
        return _sorted(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, (type, Iterator)):
        raise NotEncodable(_advice(value))
    try:
        return to_jsonable_python(value, bytes_mode="base64")
    except (PydanticSerializationError, ValueError) as error:
        raise NotEncodable(_advice(value)) from error


_WRITTEN_ALIKE = frozenset((str, int, bool, type(None)))

_encode = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain
).encode


def _advice(value: object) -> str:
    return (
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be encoded: pass data (a pydantic model, a "
        "dataclass, built-in values) and look up connections and other live objects inside the step"
    )


def _sorted(values: Set[Any]) -> list[Any]:
    return [
        item for _, item in sorted(((canonical_text(v), v) for v in values), key=lambda p: p[0])
    ]


def _rebuilt(value: Any) -> Any:
    """``value`` all the way down, with mappings of other keys than text as sorted lists of pairs."""
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: _rebuilt(item) for key, item in value.items()}
        pairs = [(canonical_text(key), _rebuilt(item)) for key, item in value.items()]
        return [list(pair) for pair in sorted(pairs, key=lambda pair: pair[0])]
    if isinstance(value, (list, tuple)):
        return [_rebuilt(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _rebuilt(_plain(value))


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    default: Any
    factory: Any


def _without_defaults(fields: tuple[_Field, ...], value: object) -> dict[str, Any]:
    kept = {}
    for field in fields:
        try:
            held = getattr(value, field.name)
        except AttributeError:  # a dataclass field without a value, a model made by model_construct
            continue
        default = field.factory() if field.factory is not None else field.default
        if not equal(held, default):
            kept[field.name] = held
    return kept


def equal(value: object, default: object) -> bool:
    """Whether a value is its default: of one type, and equal; what cannot be compared is not."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    try:
        return bool(value == default)
    except Exception:
        return False


def _dataclass_fields(value: Any) -> dict[str, Any]:
    return _without_defaults(_dataclass_plan(cast(Hashable, type(value))), value)


@cache
def _dataclass_plan(kind: Any) -> tuple[_Field, ...]:
    missing = dataclasses.MISSING
    return tuple(
        _Field(
            field.name,
            PydanticUndefined if field.default is missing else field.default,
            None if field.default_factory is missing else field.default_factory,
        )
        for field in dataclasses.fields(kind)
    )


def _model_fields(value: BaseModel) -> dict[str, Any]:
    fields = _model_plan(type(value))
    if fields is None:
        return value.model_dump(exclude_defaults=True, round_trip=True)
    kept = _without_defaults(fields, value)
    if value.model_extra:
        kept.update(value.model_extra)
    return kept


@cache
def _model_plan(kind: type[BaseModel]) -> tuple[_Field, ...] | None:
    """Its fields; None for a model that says itself how it is written."""
    if _writes_itself(kind):
        return None
    return tuple(
        _Field(
            name,
            field.default,
            None if field.default_factory_takes_validated_data else field.default_factory,
        )
        for name, field in kind.model_fields.items()
        if not field.exclude
    )


def _writes_itself(kind: type[BaseModel]) -> bool:
    decorators = kind.__pydantic_decorators__
    return bool(decorators.field_serializers or decorators.model_serializers) or any(
        hasattr(item, "__get_pydantic_core_schema__") and "Serializer" in type(item).__name__
        for field in kind.model_fields.values()
        for item in field.metadata
    )
