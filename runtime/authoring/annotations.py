"""What a function's annotations mean, resolved when they are needed, since they may name what is defined later."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType, MethodType, SimpleNamespace
from typing import Any, Never, NoReturn, get_type_hints

from pydantic.errors import PydanticUserError

from perdure.runtime.authoring.codec import ValueCodec, codec_for
from perdure.runtime.authoring.errors import DefinitionError


def origin_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind wrappers, partials and methods: the one that has the code and the annotations."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return fn


def place_of(fn: Callable[..., Any]) -> str:
    """``file:line`` of a function, for messages."""
    origin = origin_of(fn)
    code = getattr(origin, "__code__", None)
    if code is None:
        return f"module {getattr(origin, '__module__', '?')}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def local_names(fn: Callable[..., Any], frame: FrameType | None) -> Mapping[str, Any]:
    """The names around a function defined inside another, where its written annotations may have to be looked up."""
    if frame is None or frame.f_code.co_name == "<module>":
        return {}
    annotations = getattr(origin_of(fn), "__annotations__", {})
    if not any(isinstance(value, str) for value in annotations.values()):
        return {}
    return dict(frame.f_locals)


def caller_frame(depth: int) -> FrameType | None:
    """The frame ``depth`` levels above the function that asks."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


def codec_of(
    fn: Callable[..., Any], name: str | None, what: str, local: Mapping[str, Any]
) -> ValueCodec:
    """The codec of parameter ``name`` ("return": of the result; None: of no parameter at all, for the value None).

    Without an annotation it is Any's. Raises DefinitionError, in which ``what`` says whose annotation is unusable.
    """
    if name is None:
        return codec_for(type(None))
    fn = origin_of(fn)
    annotation = getattr(fn, "__annotations__", {}).get(name, Any)
    where = f"{what} ({place_of(fn)}): the annotation of {name!r}"
    if annotation is None:
        annotation = type(None)
    try:
        hints = get_type_hints(
            SimpleNamespace(__annotations__={name: annotation}),
            globalns=getattr(fn, "__globals__", {}),
            localns=dict(local),
            include_extras=True,
        )
    except NameError as error:
        raise DefinitionError(
            f"{where}, {annotation!r}, names {error.name!r}, which is not defined in its module: "
            "import it there (not under TYPE_CHECKING only)"
        ) from error
    except (TypeError, SyntaxError) as error:
        raise DefinitionError(f"{where}, {annotation!r}, is no type: {error}") from error
    resolved = hints[name]
    if resolved in (NoReturn, Never):
        resolved = Any
    return _usable(resolved, f"{where}, {annotation!r},")


def codec_for_type(annotation: Any, what: str) -> ValueCodec:
    """The codec of a type that was given as an argument. Raises DefinitionError in which ``what`` was given it."""
    return _usable(annotation, f"{what}: the type {annotation!r}")


def _usable(annotation: Any, where: str) -> ValueCodec:
    try:
        return codec_for(annotation)
    except (PydanticUserError, TypeError, NameError, RecursionError) as error:
        said = str(error).splitlines()[0]
        raise DefinitionError(
            f"{where} cannot be encoded: {said}. Use pydantic models, dataclasses, TypedDicts or built-in types, or "
            "give the class a __get_pydantic_core_schema__"
        ) from error
