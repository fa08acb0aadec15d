"""What would come back as another value, found by comparing a value with what its own JSON was read back as.

The schema of an annotation says once what can be lost at all: a subclass of a model or dataclass, a field with two
names, types of one union that look alike in JSON, keys that are not all of one type, seconds of an offset from UTC.
`loss_finder` makes a function of just these comparisons, None for most types. What a type leaves open (Any) or chooses
itself (serializers of its own, excluded fields) is its own affair. Classes that know only identity are never compared
as wholes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime, time
from enum import Enum
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]


class Loss:
    """One value that would come back as another. ``parts``: its path, innermost first."""

    __slots__ = ("message", "parts", "value")

    def __init__(self, message: str, value: object) -> None:
        self.message = message
        self.value = value
        self.parts: list[str] = []

    @property
    def path(self) -> str:
        return ".".join(reversed(self.parts))

    def within(self, part: object) -> Loss:
        self.parts.append(str(part))
        return self


Finder = Callable[[Any, Any], Loss | None]
"""(value, what came back) -> the first loss."""

IN_UNION = (
    "the types of its union look alike in JSON: keep one of them, or put each into a model and tell these apart by a "
    "field (Field(discriminator=...))"
)
AS_KEY = "keys are text in JSON: use keys of one type that is not None"
AMONG_VALUES = "its values look alike in JSON: give them values of one type"
IN_CONFIG = (
    "the config of its model writes it in another form than it is read in: set val_json_bytes to what ser_json_bytes "
    "says, leave ser_json_temporal and ser_json_timedelta out"
)
_ADVICE_CLASS = (
    "annotate that class, or a union of the kinds told apart by a field (Field(discriminator=...))"
)
_MISSING = object()
_SEQUENCES = (list, tuple, deque)
_TEMPORAL = frozenset(("datetime", "date", "time", "timedelta"))
_JSON_FORMS = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "none": "none",
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "deque", "named-tuple"), "array"),
    **dict.fromkeys(("dict", "typed-dict", "dataclass", "ordered-dict", "counter"), "object"),
}
"""Forms that pydantic tells apart in a union when it reads them."""


def loss_finder(schema: Any) -> Finder | None:
    """What looks for losses in values of a core schema; None if its values cannot lose anything."""
    return _Plan(schema).finder(schema, exact=False)


def nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping inside a core schema, each once."""
    seen: set[int] = set()
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield node
            stack.extend(item for item in node.values() if isinstance(item, (dict, list, tuple)))
        else:
            stack.extend(item for item in node if isinstance(item, (dict, list, tuple)))


class _Plan:
    """Makes the finders of one schema. ``exact``: under something that may read another type, so that all of a value
    has to be compared, scalars too."""

    def __init__(self, schema: Any) -> None:
        self._definitions: dict[str, Schema] = {}
        self._made: dict[tuple[str, bool], Finder | None] = {}
        self._exact_types: set[str] = set()
        self._words_for_floats = False
        for node in nodes(schema):
            if node.get("type") == "definitions":
                self._definitions.update((item["ref"], item) for item in node["definitions"])
            if node.get("ser_json_bytes", "utf8") != node.get("val_json_bytes", "utf8"):
                self._exact_types.add("bytes")
            if "ser_json_temporal" in node or "ser_json_timedelta" in node:
                self._exact_types |= _TEMPORAL
            self._words_for_floats |= node.get("ser_json_inf_nan") == "strings"

    def finder(self, node: Schema, *, exact: bool) -> Finder | None:
        kind = node.get("type", "")
        make = _MAKERS.get(kind)
        if exact and _custom(node) and not (make is _Plan._model or _is_sequence(node)):
            return _same_type
        if make is not None:
            return make(self, node, exact)
        if kind in self._exact_types:
            return _leaf(IN_UNION if exact else IN_CONFIG)
        return _leaf(IN_UNION) if exact else None

    # -- wrappings
    def _inner(self, node: Schema, exact: bool) -> Finder | None:
        return self.finder(node["schema"], exact=exact)

    def _open(self, node: Schema, exact: bool) -> Finder | None:
        return None

    def _nullable(self, node: Schema, exact: bool) -> Finder | None:
        inner = self.finder(node["schema"], exact=exact)
        if inner is None:
            return None
        found = _leaf(IN_UNION)

        def find(value: Any, back: Any) -> Loss | None:
            if value is None or back is None:
                return found(value, back) if exact else None
            return inner(value, back)

        return find

    def _json_or_python(self, node: Schema, exact: bool) -> Finder | None:
        side = node["json_schema"]
        if _is_sequence(node):
            return self._sequence(side, exact, alike=True)
        return self.finder(side, exact=exact)

    def _lax(self, node: Schema, exact: bool) -> Finder | None:
        return self.finder(node["lax_schema"], exact=exact)

    def _chain(self, node: Schema, exact: bool) -> Finder | None:
        return self.finder(node["steps"][-1], exact=exact)

    def _reference(self, node: Schema, exact: bool) -> Finder | None:
        key = (node["schema_ref"], exact)
        if key in self._made:
            return self._made[key]
        target = self._definitions[key[0]]
        later: list[Finder | None] = []

        def find(value: Any, back: Any) -> Loss | None:
            finder = later[0]
            return None if finder is None else finder(value, back)

        self._made[key] = find  # for a type that holds itself
        made = self.finder(target, exact=exact) if exact or self._loses_within(target) else None
        later.append(made)
        self._made[key] = made
        return made

    def _loses_within(self, node: Schema) -> bool:
        """Whether anything inside can be lost. Without asking, a type that holds itself always seemed to."""
        stack, seen = [node], set[str]()
        while stack:
            for inner in nodes(stack.pop()):
                if inner.get("type") == "definition-ref":
                    if inner["schema_ref"] not in seen:
                        seen.add(inner["schema_ref"])
                        stack.append(self._definitions[inner["schema_ref"]])
                elif self._loses(inner):
                    return True
        return False

    def _loses(self, node: Schema) -> bool:
        kind = node.get("type", "")
        if kind in ("model", "dataclass", "typed-dict") or kind in self._exact_types:
            return True
        if kind in ("union", "tagged-union"):
            return not self._told_apart(node, _choices(node))
        if kind in ("datetime", "time", "literal", "enum"):
            return self.finder(node, exact=False) is not None
        return "keys_schema" in node and node["keys_schema"].get("type") in ("nullable", "union")

    # -- scalars
    def _offset(self, node: Schema, exact: bool) -> Finder | None:
        if node["type"] in self._exact_types and not exact:
            return _leaf(IN_CONFIG)
        return _leaf(IN_UNION) if exact else _offset_loss

    def _literal(self, node: Schema, exact: bool) -> Finder | None:
        mixed = len({type(value) for value in node["expected"]}) > 1
        return _leaf(IN_UNION if exact else AMONG_VALUES) if exact or mixed else None

    def _enum(self, node: Schema, exact: bool) -> Finder | None:
        kinds = {type(member.value) for member in node["members"]}
        mixed = len(kinds) > 1 and not kinds <= {int, str}
        return _leaf(IN_UNION if exact else AMONG_VALUES) if exact or mixed else None

    # -- containers
    def _sequence(self, node: Schema, exact: bool, *, alike: bool = False) -> Finder | None:
        item = node.get("items_schema")
        each = None if item is None else self.finder(item, exact=exact)
        if each is None and not exact:
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if exact and not (
                type(value) is type(back)
                or (alike and isinstance(value, _SEQUENCES) and isinstance(back, _SEQUENCES))
            ):
                return _differs(value, back, IN_UNION)
            if not (isinstance(value, _SEQUENCES) and isinstance(back, _SEQUENCES)):
                return None
            if len(value) != len(back):
                return _differs(value, back, IN_UNION) if exact else None
            if each is not None:
                for index, (one, other) in enumerate(zip(value, back, strict=True)):
                    if (loss := each(one, other)) is not None:
                        return loss.within(index)
            return None

        return find

    def _tuple(self, node: Schema, exact: bool) -> Finder | None:
        items = [self.finder(item, exact=exact) for item in node["items_schema"]]
        variadic = node.get("variadic_item_index")
        if not exact and not any(items):
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if not (type(value) is type(back) is tuple and len(value) == len(back)):
                return _differs(value, back, IN_UNION) if exact else None
            finders = items
            if variadic is not None:
                more = len(value) - len(items) + 1
                finders = items[:variadic] + [items[variadic]] * more + items[variadic + 1 :]
            return _first(zip(range(len(value)), finders, value, back, strict=False))

        return find

    def _set(self, node: Schema, exact: bool) -> Finder | None:
        item = node.get("items_schema")
        each = None if item is None else self.finder(item, exact=exact)
        if each is None and not exact:
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if type(value) is not type(back) or not isinstance(value, (set, frozenset)):
                return _differs(value, back, IN_UNION) if exact else None
            return None if each is None else _set_loss(each, value, back)

        return find

    def _mapping(self, node: Schema, exact: bool) -> Finder | None:
        keys = self._keys(node.get("keys_schema"))
        item = node.get("values_schema")
        each = None if item is None else self.finder(item, exact=exact)
        if keys is None and each is None and not exact:
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if not (isinstance(value, Mapping) and isinstance(back, Mapping)):
                return _differs(value, back, IN_UNION) if exact else None
            if len(value) != len(back):
                message = (
                    f"has {len(value)} keys of which {len(back)} would come back, since {AS_KEY}"
                )
                return Loss(message, value)
            for (key, one), (other_key, other) in zip(value.items(), back.items(), strict=True):
                if keys is not None and (loss := keys(key, other_key)) is not None:
                    loss.message = f"has the key {_shown(key)}, which {loss.message}"
                    return loss
                if each is not None and (loss := each(one, other)) is not None:
                    return loss.within(key)
            return None

        return find

    def _keys(self, node: Schema | None) -> Finder | None:
        if node is None:
            return None
        bare: Schema = node
        while bare.get("type") == "definition-ref":
            bare = self._definitions[bare["schema_ref"]]
        if bare.get("type") in ("union", "tagged-union", "nullable", "literal"):
            exact = self.finder(bare, exact=True)
            if bare["type"] == "literal":
                exact = self.finder(bare, exact=False)
            return None if exact is None else _leaf(AS_KEY)
        return self.finder(bare, exact=False)

    # -- fields
    def _named_tuple(self, node: Schema, exact: bool) -> Finder | None:
        fields = (
            node["fields"] if "fields" in node else node["arguments_schema"]["arguments_schema"]
        )
        names = [item["name"] for item in fields]
        finders = [self.finder(item["schema"], exact=exact) for item in fields]
        if not exact and not any(finders):
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if type(value) is not type(back) or not isinstance(value, tuple):
                return _differs(value, back, IN_UNION) if exact else None
            return _first(zip(names, finders, value, back, strict=False))

        return find

    def _typed_dict(self, node: Schema, exact: bool) -> Finder | None:
        fields = self._fields(node, node, exact)
        if not fields and not exact:
            return None

        def find(value: Any, back: Any) -> Loss | None:
            if not (isinstance(value, Mapping) and isinstance(back, Mapping)):
                return _differs(value, back, IN_UNION) if exact else None
            if exact and value.keys() != back.keys():
                return _differs(value, back, IN_UNION)
            for name, finder in fields:
                one, other = value.get(name, _MISSING), back.get(name, _MISSING)
                if one is not _MISSING and (loss := finder(one, other)) is not None:
                    return loss.within(name)
            return None

        return find

    def _model(self, node: Schema, exact: bool) -> Finder | None:
        cls = node["cls"]
        inner = node["schema"]
        fields: list[tuple[str, Finder]] = []
        if node.get("root_model"):
            root = self.finder(inner, exact=exact)
            fields = [] if root is None else [("root", root)]
        else:
            while "fields" not in inner and "schema" in inner:
                inner = inner["schema"]
            exact_fields = exact and not _custom(node)
            fields = self._fields(inner, node, exact_fields)

        def find(value: Any, back: Any) -> Loss | None:
            if type(value) is not type(back) and (loss := _class_loss(value, back, exact=exact)):
                return loss
            if not fields:
                return None
            if not isinstance(value, cls):
                return _differs(value, back, IN_UNION) if exact else None
            for name, finder in fields:
                one, other = getattr(value, name, _MISSING), getattr(back, name, _MISSING)
                if one is not _MISSING and (loss := finder(one, other)) is not None:
                    return loss.within(name)
            return None

        return find

    def _fields(self, inner: Schema, node: Schema, exact: bool) -> list[tuple[str, Finder]]:
        """The fields of a model, dataclass or TypedDict that can lose something."""
        listed = inner.get("fields", ())
        fields = dict(listed) if isinstance(listed, Mapping) else {f["name"]: f for f in listed}
        config = node.get("config") or {}
        written = {name: item.get("serialization_alias", name) for name, item in fields.items()}
        made: list[tuple[str, Finder]] = []
        for name, item in fields.items():
            finder = self.finder(item["schema"], exact=exact)
            if not (_custom(node) or item.get("serialization_exclude")):
                others = {alias for other, alias in written.items() if other != name}
                why = _why_one_way(name, item, config, written[name], others)
                if why is not None:
                    whole = self.finder(item["schema"], exact=True) or _leaf(why)
                    finder = _because(why, whole)
            if finder is not None:
                made.append((name, finder))
        return made

    # -- unions
    def _union(self, node: Schema, exact: bool) -> Finder | None:
        choices = _choices(node)
        if not exact and self._told_apart(node, choices):
            made = [(choice, self.finder(choice, exact=False)) for choice in choices]
            return _all_of([(self._class(choice), finder) for choice, finder in made if finder])
        finders = [(self._class(choice), self.finder(choice, exact=True)) for choice in choices]
        some = [(cls, finder) for cls, finder in finders if finder is not None]
        return _any_of(some) if len(some) == len(finders) else None

    def _told_apart(self, node: Schema, choices: Sequence[Schema]) -> bool:
        """Whether JSON says which choice a value is of."""
        if node["type"] == "tagged-union":
            return not callable(node["discriminator"])
        if node.get("mode", "smart") != "smart":
            return False
        seen: set[str] = set()
        for choice in choices:
            forms = self._forms(choice, 0)
            if forms is None or forms & seen:
                return False
            seen |= forms
        return True

    def _forms(self, node: Schema, depth: int) -> set[str] | None:
        """The forms in JSON that a choice may take; None: whatever."""
        kind = node.get("type", "")
        if depth > 10 or (kind == "float" and self._words_for_floats):
            return None
        if kind == "json-or-python":
            return self._forms(node["json_schema"], depth + 1)
        if _custom(node):
            return None
        if kind == "definition-ref":
            return self._forms(self._definitions[node["schema_ref"]], depth + 1)
        if kind == "model":
            return self._forms(node["schema"], depth + 1) if node.get("root_model") else {"object"}
        if kind == "nullable":
            inner = self._forms(node["schema"], depth + 1)
            return None if inner is None else inner | {"none"}
        return {_JSON_FORMS[kind]} if kind in _JSON_FORMS else None

    def _class(self, node: Schema) -> type | None:
        while node.get("type") in ("definition-ref", "default") or node.get("type", "").startswith(
            "function-"
        ):
            inner = (
                self._definitions[node["schema_ref"]]
                if "schema_ref" in node
                else node.get("schema")
            )
            if inner is None:
                return None
            node = inner
        cls = node.get("cls") if node.get("type") in ("model", "dataclass") else None
        return cls if isinstance(cls, type) else None


_MAKERS: dict[str, Callable[[_Plan, Schema, bool], Finder | None]] = {
    **dict.fromkeys(("any", "generator", "json", "is-instance", "callable"), _Plan._open),
    **dict.fromkeys(
        ("default", "definitions", "function-before", "function-after", "function-wrap"),
        _Plan._inner,
    ),
    "nullable": _Plan._nullable,
    "json-or-python": _Plan._json_or_python,
    "lax-or-strict": _Plan._lax,
    "chain": _Plan._chain,
    "definition-ref": _Plan._reference,
    "datetime": _Plan._offset,
    "time": _Plan._offset,
    "literal": _Plan._literal,
    "enum": _Plan._enum,
    "list": _Plan._sequence,
    "deque": _Plan._sequence,
    "tuple": _Plan._tuple,
    "set": _Plan._set,
    "frozenset": _Plan._set,
    **dict.fromkeys(("dict", "ordered-dict", "counter"), _Plan._mapping),
    "named-tuple": _Plan._named_tuple,
    "call": _Plan._named_tuple,
    "typed-dict": _Plan._typed_dict,
    "model": _Plan._model,
    "dataclass": _Plan._model,
    "union": _Plan._union,
    "tagged-union": _Plan._union,
}


def _custom(node: Schema) -> bool:
    """Whether a function of somebody else says how this is written."""
    written: str = node.get("serialization", {}).get("type", "")
    return written.startswith("function-")


def _is_sequence(node: Schema) -> bool:
    """Whether it is a `Sequence`, which a tuple is as well as the list that comes back."""
    return node.get("type") == "json-or-python" and node["json_schema"].get("type") == "list"


def _choices(node: Schema) -> list[Schema]:
    given = node["choices"]
    if isinstance(given, Mapping):
        return [choice for choice in given.values() if isinstance(choice, Mapping)]
    return [choice[0] if isinstance(choice, tuple) else choice for choice in given]


def _why_one_way(
    name: str, field: Schema, config: Schema, written: str, others: set[str]
) -> str | None:
    """Why a field is not read where it is written; None if it is."""
    if field.get("init") is False:
        return "it is no argument (init=False): make it one, or let __post_init__ compute it"
    alias: Any = field.get("validation_alias")
    reads: list[Any] = []
    if alias is not None and config.get("validate_by_alias", True):
        reads = [[alias]] if isinstance(alias, str) else list(alias)
        if not isinstance(reads[0], list):
            reads = [reads]
    if not reads or config.get("validate_by_name") or config.get("populate_by_name"):
        reads.append([name])
    if [written] in reads and not any(path[0] in others for path in reads if path != [written]):
        return None
    read = " or ".join(repr(".".join(str(part) for part in path)) for path in reads)
    return (
        f"it is written as {written!r} and read as {read}: use one name for both (alias=...), or have {written!r} read "
        "too (AliasChoices)"
    )


# -- comparing


def _leaf(why: str) -> Finder:
    def find(value: Any, back: Any) -> Loss | None:
        return None if _same(value, back) else _differs(value, back, why)

    return find


def _same_type(value: Any, back: Any) -> Loss | None:
    return None if type(value) is type(back) else _differs(value, back, IN_UNION)


def _because(why: str, finder: Finder) -> Finder:
    def find(value: Any, back: Any) -> Loss | None:
        return None if finder(value, back) is None else _differs(value, back, why)

    return find


def _same(value: Any, back: Any) -> bool:
    """Whether two scalars, or values of classes that are not known, are equal in all that matters."""
    if value is back:
        return True
    if value is _MISSING or back is _MISSING or isinstance(value, Enum):
        return False
    kind = type(value)
    if kind is not type(back) and not _kindred(value, back):
        return False
    equality: object = kind.__eq__
    if equality is object.__eq__:
        return True
    if isinstance(value, (datetime, time)):
        # Zones whose offset depends on `fold` are equal to no other zone.
        bare = value.replace(tzinfo=None) == back.replace(tzinfo=None)
        return (
            bare
            and value.utcoffset() == back.utcoffset()
            and ((value.tzinfo is None) == (back.tzinfo is None))
        )
    try:
        return bool(value == back) or bool(value != value and back != back)
    except Exception:  # arrays have no truth, and what user code raises says nothing
        return True


def _kindred(value: Any, back: Any) -> bool:
    """An int for a float, or a subclass of str for a str, is the same if it is equal."""
    if isinstance(value, bool) or isinstance(back, bool):
        return False
    return isinstance(value, type(back)) or (
        isinstance(value, (int, float)) and isinstance(back, (int, float))
    )


def _offset_loss(value: Any, back: Any) -> Loss | None:
    zone = getattr(value, "tzinfo", None)
    if zone is None or zone is UTC or getattr(back, "tzinfo", _MISSING) is _MISSING:
        return None
    offset = value.utcoffset()
    if back.tzinfo is None:
        return Loss(
            "has a time zone without a fixed offset, which would not come back: use a datetime, or timezone.utc",
            value,
        )
    if offset == back.utcoffset():
        return None
    return Loss(
        f"has the offset {offset} from UTC and would come back with {back.utcoffset()}, since JSON has whole minutes: "
        "convert it with .astimezone(timezone.utc)",
        value,
    )


def _class_loss(value: Any, back: Any, *, exact: bool) -> Loss | None:
    kind = type(value)
    if _origin(kind) is _origin(type(back)):
        return None
    if exact:
        return _differs(value, back, IN_UNION)
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(kind):
        return Loss(
            f"is a {_named(kind)} and would come back as a {_named(type(back))}, without what only {_named(kind)} has: "
            f"{_ADVICE_CLASS}",
            value,
        )
    return None


def _origin(kind: type) -> type:
    """`Page[int]` and `Page` are equal to pydantic."""
    generic = getattr(kind, "__pydantic_generic_metadata__", None)
    return (generic and generic["origin"]) or kind


def _first(pairs: Iterator[tuple[object, Finder | None, Any, Any]]) -> Loss | None:
    for part, finder, one, other in pairs:
        if finder is not None and (loss := finder(one, other)) is not None:
            return loss.within(part)
    return None


def _set_loss(each: Finder, value: Set[Any], back: Set[Any]) -> Loss | None:
    """Sets come back in another order. Equal items are compared first, the rest are paired as they fit."""
    if len(value) != len(back):
        return _differs(value, back, IN_UNION)
    left = {item: item for item in back}
    alone: list[Any] = []
    for item in value:
        other = left.pop(item, _MISSING)
        if other is _MISSING:
            alone.append(item)
        elif (loss := each(item, other)) is not None:
            return loss
    others = list(left.values())
    for item in alone:
        losses = (each(item, other) for other in others)
        fitting = next((index for index, loss in enumerate(losses) if loss is None), None)
        if fitting is None:
            return each(item, others[0])
        others.pop(fitting)
    return None


Choice = tuple[type | None, Finder]


def _by_class(choices: Sequence[Choice]) -> dict[type, list[Finder]]:
    found: dict[type, list[Finder]] = {}
    for cls, finder in choices:
        if cls is not None:
            found.setdefault(cls, []).append(finder)
    return found


def _all_of(choices: Sequence[Choice]) -> Finder | None:
    """JSON tells the choices apart: whichever a value is of, the others have nothing to say."""
    if not choices:
        return None
    by_class, everyone = _by_class(choices), [finder for _, finder in choices]

    def find(value: Any, back: Any) -> Loss | None:
        for finder in by_class.get(type(value), everyone):
            if (loss := finder(value, back)) is not None:
                return loss
        return None

    return everyone[0] if len(everyone) == 1 else find


def _any_of(choices: Sequence[Choice]) -> Finder | None:
    """JSON may not tell the choices apart: one of them has to find everything as it was."""
    by_class, everyone = _by_class(choices), [finder for _, finder in choices]

    def find(value: Any, back: Any) -> Loss | None:
        deepest: Loss | None = None
        for finder in by_class.get(type(value), everyone):
            if (loss := finder(value, back)) is None:
                return None
            if deepest is None or len(loss.parts) > len(deepest.parts):
                deepest = loss
        return deepest

    return find


def _differs(value: Any, back: Any, why: str) -> Loss:
    came = "not come back" if back is _MISSING else f"come back as {_shown(back)}"
    if back is not _MISSING and type(back) is not type(value):
        came += f" ({_named(type(back))})"
    return Loss(f"is {_shown(value)} ({_named(type(value))}) and would {came}, since {why}", value)


def _named(kind: type) -> str:
    return kind.__qualname__.rpartition(".")[2]


def _shown(value: object) -> str:
    try:
        text = ascii(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"
