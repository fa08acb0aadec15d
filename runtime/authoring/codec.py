"""Values as text and back, by their annotation; pydantic does the work, in compact JSON.

What is written must read back: every typed value is decoded once before it is taken. What not every engine can store
(NUL, lone surrogates), what JSON does not have (NaN, infinities) and what would be lost or changed in silence (masked
secrets, and all that `losses` finds) is refused, naming the field. Values are taken as pydantic's lax mode takes them:
"5" fits an int. Without a type a value has to be JSON's own. A part of type Any inside a model is written by what it
holds and read back as JSON.
"""

from __future__ import annotations

import math
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from perdure.runtime.authoring.errors import FieldFault, PayloadTooLarge
from perdure.runtime.authoring.losses import Finder, Loss, loss_finder, nodes
from perdure.runtime.authoring.names import storable_fault
from perdure.runtime.authoring.typed_dicts import with_usable_typed_dicts

DEFAULT_LIMIT = 2 * 1024 * 1024
"""Bytes of one encoded payload, message or result."""

VALUE_SHOWN = 80
DEPTH = 200
"""Levels of nesting in an untyped value."""
CERTAINLY_READ = 400
"""Bytes of JSON that are too few for nesting or a number that cannot be read back."""
DEEPEST = 256
"""Levels of nesting that pydantic writes, of whatever type."""

_SCALARS: tuple[Any, ...] = (str, int, bool, float)
_JSON_TYPES = frozenset((str, int, float, bool, type(None), list, dict))
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset)
_MASK = b"*****"
_ADVICE = "annotate it with its type, or make it text, numbers, lists and dicts with text keys"


class ValueFault(ValueError):
    """A value does not fit or cannot be recorded. ``errors``: every bad field; ``missing``: paths of absent ones."""

    def __init__(self, errors: Sequence[FieldFault], missing: Sequence[str] = ()) -> None:
        self.errors = list(errors)
        self.missing = list(missing)
        super().__init__("; ".join(f"{fault['field']}: {fault['message']}" for fault in errors))


class ValueCodec:
    """Encodes and decodes values of one annotation. Building it raises what pydantic says of an unusable one."""

    __slots__ = (
        "_floats",
        "_loose",
        "_loss",
        "_scalar",
        "_serialize",
        "_sets",
        "_validate",
        "_validate_json",
    )

    def __init__(self, annotation: Any) -> None:
        adapter: TypeAdapter[Any] = TypeAdapter(with_usable_typed_dicts(annotation))
        self._validate = adapter.validator.validate_python
        self._validate_json = adapter.validator.validate_json
        self._serialize = adapter.serializer.to_json
        self._scalar = annotation if any(annotation is kind for kind in _SCALARS) else None
        self._loose = _is_json_shape(annotation) and _names_any(annotation)
        self._sets = self._loose and _names_sets(annotation)
        schema = dict(
            adapter.core_schema
        )  # a copy: the schema of a model whose build is deferred is built by it
        self._floats = not self._loose and _may_hold_floats(schema)
        self._loss = None if self._loose or self._scalar else loss_finder(schema)

    def check(self, value: Any) -> Any:
        """``value`` as its type has it: validated and converted. Raises ValueFault."""
        try:
            return self._validate(value)
        except ValidationError as error:
            return self._check_encoded(value, error)

    def encode(self, value: Any) -> bytes:
        """Compact JSON in UTF-8. Raises ValueFault."""
        if type(value) is self._scalar:
            data = _encode_scalar(value)
            if len(data) > CERTAINLY_READ and self._scalar is int:
                self._read_back(data)
            return data
        value = self.check(value)
        if self._loose and (fault := json_fault(value, sets=self._sets)) is not None:
            raise ValueFault([fault])
        data = self._write(value)
        if b"\\u0000" in data:
            _raise_first(_unstorable(value))
        words = self._floats and (b'"NaN"' in data or b'Infinity"' in data)
        if self._floats and not words and (b"null" in data or b"NaN" in data or b"Inf" in data):
            _raise_first(_non_finite(value))
        if _MASK in data:
            _raise_first(_secrets(value))
        back = self._read_back(data)
        if words:
            _raise_first(_non_finite_lost(value, back))
        if self._loss is not None and (loss := self._find_loss(self._loss, value, back)):
            raise ValueFault([_fault(loss.path, loss.message, loss.value)])
        return data

    def decode(self, text: str | bytes) -> Any:
        """The value again, a new one each time. Raises ValueFault."""
        try:
            return self._validate_json(text)
        except ValidationError as error:
            raise ValueFault(*faults_of(error)) from error

    def _check_encoded(self, value: Any, error: ValidationError) -> Any:
        """Strict models take their fields' encoded forms from JSON only; a mapping may hold either.

        What was refused has to be JSON's own: a UUID where text is asked for is a mistake, not an encoded form.
        """
        refused = (type(item["input"]) for item in error.errors(include_url=False))
        if not _JSON_TYPES.issuperset(refused):
            raise ValueFault(*faults_of(error)) from error
        try:
            return self._validate_json(to_json(value))
        except (ValidationError, PydanticSerializationError, ValueError, RecursionError):
            raise ValueFault(*faults_of(error)) from error

    def _write(self, value: Any) -> bytes:
        try:
            return self._serialize(value, by_alias=True, round_trip=True, warnings=False)
        except RecursionError as error:
            raise ValueFault(
                [_fault("", "is nested too deeply, or holds itself", value)]
            ) from error
        except (PydanticSerializationError, ValueError) as error:
            _raise_first(_unstorable(value))
            raise ValueFault([_fault("", f"cannot be encoded: {error}", value)]) from error

    def _read_back(self, data: bytes) -> Any:
        try:
            return self._validate_json(data)
        except ValidationError as error:
            faults, _ = faults_of(error)
            for fault in faults:
                fault["message"] = f"does not read back as it is written: {fault['message']}"
            raise ValueFault(faults) from error

    def _find_loss(self, finder: Finder, value: Any, back: Any) -> Loss | None:
        try:
            return finder(value, back)
        except RecursionError as error:
            raise ValueFault([_fault("", "is nested too deeply", value)]) from error


@lru_cache(maxsize=1024)
def _shared_codec(annotation: Any, written: str) -> ValueCodec:
    """``written``: its repr. `A | B` and `B | A` are equal, but not to a value that fits both."""
    return ValueCodec(annotation)


def codec_for(annotation: Any) -> ValueCodec:
    """The codec of an annotation, shared where the annotation can be looked up."""
    try:
        hash(annotation)
    except TypeError:
        return ValueCodec(annotation)
    return _shared_codec(annotation, repr(annotation))


def encode_message(value: Any, what: str, *, limit: int = DEFAULT_LIMIT) -> str:
    """A value whose type is known to the receiver only (a signal's payload), written by what it is.

    Models, dataclasses, datetimes and the like are welcome. Raises ValueFault, and PayloadTooLarge naming ``what``.
    """
    try:
        data = to_json(value, by_alias=True, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        _raise_first(_unstorable(value))
        raise ValueFault([_fault("", f"cannot be encoded: {error}", value)]) from error
    if b"\\u0000" in data:
        _raise_first(_unstorable(value))
    if b"NaN" in data or b"Inf" in data:
        _raise_first(_non_finite(value))
    if _MASK in data:
        _raise_first(_secrets(value))
    if len(data) > limit:
        raise PayloadTooLarge(what, len(data), limit)
    if len(data) > CERTAINLY_READ:
        try:
            from_json(data)
        except ValueError as error:  # the sender's fault: the receiver would fail on it
            message = f"does not read back as it is written: {error}"
            raise ValueFault([_fault("", message, value)]) from error
    return data.decode()


def faults_of(error: ValidationError) -> tuple[list[FieldFault], list[str]]:
    """Every bad field of a validation, and the paths of those that are missing."""
    faults: list[FieldFault] = []
    missing: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in item["loc"])
        absent = item["type"] in ("missing", "missing_argument")
        if absent:
            missing.append(path)
        message = item["msg"][:1].lower() + item["msg"][1:]
        faults.append(
            FieldFault(field=path, message=message, value="" if absent else shown(item["input"]))
        )
    return faults, missing


def shown(value: object) -> str:
    """A value's repr for a message: one line, short, storable, whatever the value does."""
    try:
        text = ascii(value)
    except Exception:
        text = f"<{type(value).__name__} without repr>"
    return text if len(text) <= VALUE_SHOWN else f"{text[: VALUE_SHOWN - 1]}…"


def json_fault(
    value: Any, path: str = "", *, sets: bool = False, depth: int = 0
) -> FieldFault | None:
    """The first place where an untyped value is not JSON's; None if it is JSON through and through.

    Tuples are taken as lists; sets only where ``sets`` says that a type names them.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return None
    if kind is str:
        fault = storable_fault(value)
        return None if fault is None else _fault(path, f"{fault}, which cannot be stored", value)
    if kind is float:
        return None if math.isfinite(value) else _non_finite_fault(path, value)
    if depth > DEPTH:
        return _fault(path, "is nested too deeply, or holds itself", kind.__name__)
    items: Iterator[tuple[object, Any]]
    if isinstance(value, dict):
        if (fault_of_key := _key_fault(value, path)) is not None:
            return fault_of_key
        items = iter(value.items())
    elif kind is list or kind is tuple or (sets and kind in (set, frozenset)):
        items = iter(enumerate(value))
    else:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return _fault(path, f"is a {name}, which JSON cannot hold: {_ADVICE}", value)
    for part, item in items:
        found = json_fault(item, _join(path, part), sets=sets, depth=depth + 1)
        if found is not None:
            return found
    return None


def _key_fault(value: Mapping[Any, Any], path: str) -> FieldFault | None:
    for key in value:
        if type(key) is not str:
            message = f"has the key {shown(key)} ({type(key).__name__}), JSON has text keys only: {_ADVICE}"
            return _fault(path, message, value)
        if (fault := storable_fault(key)) is not None:
            return _fault(path, f"has a key that {fault}, which cannot be stored", key)
    return None


def _encode_scalar(value: Any) -> bytes:
    if type(value) is str and (fault := storable_fault(value)) is not None:
        raise ValueFault([_fault("", f"{fault}, which cannot be stored", value)])
    if type(value) is float and not math.isfinite(value):
        raise ValueFault([_non_finite_fault("", value)])
    return to_json(value)


def _is_json_shape(annotation: Any) -> bool:
    """Whether every part of the annotation is JSON's own, or Any."""
    if annotation is None or annotation is Any or annotation is object:
        return True
    if annotation in (*_SCALARS, type(None), Ellipsis) or annotation in _CONTAINERS:
        return True
    origin = get_origin(annotation)
    if origin in (dict, Mapping):
        key, item = get_args(annotation)
        return key in (str, Any) and _is_json_shape(item)
    if origin in _CONTAINERS or origin in (Union, types.UnionType, Sequence):
        return all(_is_json_shape(part) for part in get_args(annotation))
    return False


def _names_any(annotation: Any) -> bool:
    if annotation is Any or annotation is object or annotation in _CONTAINERS:
        return True
    return any(_names_any(part) for part in get_args(annotation))


def _names_sets(annotation: Any) -> bool:
    kinds = (set, frozenset)
    if annotation in kinds or get_origin(annotation) in kinds:
        return True
    return any(_names_sets(part) for part in get_args(annotation))


def _may_hold_floats(schema: Any) -> bool:
    """Whether a value of a core schema may hold a float, as far as that tells."""
    kinds = ("float", "any", "is-instance", "complex")
    return any(node.get("type") in kinds for node in nodes(schema))


def _parts(value: Any, path: str, seen: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Every value inside a value with its path; keys of mappings and items of sets stand under the path of what holds
    them. What lies deeper than anything that can be written is left out."""
    yield path, value
    if id(value) in seen or isinstance(value, (str, bytes, int, float)) or len(seen) > DEEPEST:
        return
    seen = seen | {id(value)}
    inner: Iterator[tuple[object, Any]]
    if isinstance(value, Mapping):
        for key in value:
            yield path, key
        inner = iter(value.items())
    elif isinstance(value, (list, tuple, deque)):
        inner = iter(enumerate(value))
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield from _parts(item, path, seen)
        return
    elif isinstance(value, BaseModel):
        inner = iter({**value.__dict__, **(value.__pydantic_extra__ or {})}.items())
    elif hasattr(value, "__dataclass_fields__"):
        inner = ((name, getattr(value, name, None)) for name in value.__dataclass_fields__)
    else:
        return
    for name, item in inner:
        yield from _parts(item, _join(path, name), seen)


def _unstorable(value: Any) -> Iterator[FieldFault]:
    for path, part in _parts(value, "", frozenset()):
        if isinstance(part, str) and (fault := storable_fault(part)) is not None:
            yield _fault(path, f"{fault}, which cannot be stored", part)
        elif isinstance(part, (bytes, bytearray)):
            try:
                part.decode()
            except UnicodeDecodeError:
                yield _fault(
                    path,
                    "is bytes that are no UTF-8: return base64 text, or store it elsewhere",
                    part,
                )


def _non_finite(value: Any) -> Iterator[FieldFault]:
    for path, part in _parts(value, "", frozenset()):
        if isinstance(part, float) and not math.isfinite(part):
            yield _non_finite_fault(path, part)


def _non_finite_lost(value: Any, back: Any) -> Iterator[FieldFault]:
    """pydantic writes NaN as null, or as a word JSON does not have; a model may choose text, which comes back."""
    kept = Counter(fault["field"] for fault in _non_finite(back))
    for fault in _non_finite(value):
        if kept[fault["field"]] > 0:
            kept[fault["field"]] -= 1
        else:
            yield fault


def _secrets(value: Any) -> Iterator[FieldFault]:
    for path, part in _parts(value, "", frozenset()):
        if isinstance(part, (SecretStr, SecretBytes)):
            yield _fault(
                path,
                "is a secret, which is written as asterisks and would be lost: pass its name and look it up in a step",
                part,
            )


def _non_finite_fault(path: str, value: float) -> FieldFault:
    return _fault(path, "is no finite number, which JSON cannot hold: use None or text", value)


def _raise_first(faults: Iterator[FieldFault]) -> None:
    found = list(faults)
    if found:
        raise ValueFault(found)


def _fault(path: str, message: str, value: object) -> FieldFault:
    return FieldFault(field=path, message=message, value=shown(value))


def _join(path: str, part: object) -> str:
    return f"{path}.{part}" if path else str(part)
