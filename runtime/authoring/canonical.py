"""The canonical encoding of a step's input, and its hash (R13).

It goes by the values, not by annotations: one value has one text, in every process and on every run. Keys and sets
are sorted, fields equal to their default are left out, so that a field with a default may be added to a model while
runs are under way. It is compared and shown, never decoded; so NaN may stand in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from enum import Enum
from functools import lru_cache, partial
from json.encoder import encode_basestring
from operator import attrgetter
from typing import Any, NoReturn, cast

import xxhash
from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python


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
    return _way_of(cast(Hashable, type(value)))(value)


@lru_cache(maxsize=4096)
def _way_of(kind: Any) -> Callable[[Any], Any]:
    """How values of a type are made plain."""
    if issubclass(kind, BaseModel):
        return _way_of_model(kind)
    if dataclasses.is_dataclass(kind):
        return partial(_without_defaults, fields_of(cast(Hashable, kind)))
    if issubclass(kind, Set):
        return _sorted
    if issubclass(kind, Enum):
        return attrgetter("value")
    if issubclass(kind, Mapping):
        return dict
    if issubclass(kind, deque):
        return list
    if issubclass(kind, (SecretStr, SecretBytes)):
        return str  # asterisks
    if issubclass(kind, (type, Iterator)):
        return _refuse
    return _by_pydantic


def _by_pydantic(value: Any) -> Any:
    try:
        return to_jsonable_python(value, bytes_mode="base64")
    except (PydanticSerializationError, ValueError):
        return _refuse(value)


_WRITTEN_ALIKE = frozenset((str, int, bool, type(None)))


def _make_encode() -> Callable[[Any], str]:
    """`json.JSONEncoder` makes its C encoder anew for each value, which takes longer than to use it."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(
            sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain
        ).encode
    chunks = make(None, _plain, encode_basestring, None, ":", ",", True, False, True)
    return lambda value: "".join(chunks(value, 0))


_encode = _make_encode()


def _refuse(value: object) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise NotEncodable(
        f"a {kind} cannot be encoded: pass data (a pydantic model, a dataclass, built-in values) and look up "
        "connections and other live objects inside the step"
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


Fields = tuple[tuple[str, Any, Callable[..., Any] | None], ...]
"""Of a model or dataclass, those that are encoded: name, default, default factory."""

_NOTHING = object()


def _without_defaults(fields: Fields, value: object) -> dict[str, Any]:
    kept = {}
    for name, default, factory in fields:
        # A dataclass field may have no value yet, nor has every field of a model_construct.
        held = getattr(value, name, _NOTHING)
        if held is not _NOTHING and not equal(held, default, factory):
            kept[name] = held
    return kept


def equal(value: object, default: object, factory: Callable[..., Any] | None = None) -> bool:
    """Whether a value is its default: of one type, and equal; what cannot be compared or made is not."""
    try:
        if factory is not None:
            default = factory()
        return value is default or (type(value) is type(default) and bool(value == default))
    except Exception:
        return False


@lru_cache(maxsize=4096)
def fields_of(kind: Any) -> Fields:
    """Of a type that is a model or a dataclass; of any other, none."""
    if issubclass(kind, BaseModel):
        return tuple(
            (
                name,
                field.default,
                None
                if getattr(field, "default_factory_takes_validated_data", False)
                else field.default_factory,
            )
            for name, field in kind.model_fields.items()
            if not field.exclude
        )
    if not dataclasses.is_dataclass(kind):
        return ()
    missing = dataclasses.MISSING
    return tuple(
        (
            field.name,
            _NOTHING if field.default is missing else field.default,
            None if field.default_factory is missing else field.default_factory,
        )
        for field in dataclasses.fields(kind)
    )


def _way_of_model(kind: type[BaseModel]) -> Callable[[Any], dict[str, Any]]:
    if writes_itself(kind):
        return lambda model: model.model_dump(exclude_defaults=True, round_trip=True)
    fields = fields_of(kind)
    if kind.model_config.get("extra") == "allow":
        return lambda model: _without_defaults(fields, model) | (model.model_extra or {})
    return partial(_without_defaults, fields)


def writes_itself(kind: type[BaseModel]) -> bool:
    """Whether a model has serializers of its own."""
    decorators = kind.__pydantic_decorators__
    return bool(decorators.field_serializers or decorators.model_serializers) or any(
        hasattr(item, "__get_pydantic_core_schema__") and "Serializer" in type(item).__name__
        for field in kind.model_fields.values()
        for item in field.metadata
    )
