"""`typing.TypedDict` on Python 3.11, where pydantic takes only that of `typing_extensions`: one becomes the other."""

from __future__ import annotations

import sys
import types
from functools import reduce
from operator import or_
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict


def with_usable_typed_dicts(annotation: Any) -> Any:
    """``annotation`` with every `typing.TypedDict` in it replaced by one that pydantic takes; values are the same."""
    if sys.version_info >= (3, 12):
        return annotation
    return _replaced(annotation, {})


def _replaced(annotation: Any, made: dict[Any, Any]) -> Any:
    if is_typeddict(annotation):
        return _remade(annotation, made)
    args = get_args(annotation)
    if not args:
        return annotation
    changed = tuple(_replaced(arg, made) for arg in args)
    if all(new is old for new, old in zip(changed, args, strict=True)):
        return annotation
    if get_origin(annotation) is types.UnionType:
        return reduce(or_, changed)
    if hasattr(annotation, "__metadata__"):
        return annotation.copy_with((_replaced(annotation.__origin__, made),))
    return (
        annotation.copy_with(changed)
        if hasattr(annotation, "copy_with")
        else get_origin(annotation)[changed]
    )


def _remade(kind: Any, made: dict[Any, Any]) -> Any:
    import typing_extensions as extensions

    if type(kind).__module__ != "typing":
        return kind
    if kind in made:
        return made[kind]
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: (extensions.Required if name in kind.__required_keys__ else extensions.NotRequired)[
            _replaced(_bare(hint), made)
        ]
        for name, hint in hints.items()
    }
    remade = extensions.TypedDict(kind.__name__, fields)  # type: ignore[misc]
    made[kind] = remade
    return remade


def _bare(hint: Any) -> Any:
    """A field's type without Required or NotRequired around it."""
    origin = get_origin(hint)
    name = getattr(origin, "_name", "")
    return get_args(hint)[0] if name in ("Required", "NotRequired") else hint
