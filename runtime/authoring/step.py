"""`@step`: a function whose result is recorded once and replayed from then on."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from perdure.runtime.authoring.annotations import caller_frame, codec_of, local_names, place_of
from perdure.runtime.authoring.canonical import (
    NotEncodable,
    arguments_text,
    canonical_text,
    cut_text,
    equal,
    hash_text,
)
from perdure.runtime.authoring.codec import DEFAULT_LIMIT, ValueCodec, ValueFault, shown
from perdure.runtime.authoring.durations import Duration, to_seconds
from perdure.runtime.authoring.errors import (
    DefinitionError,
    FieldFault,
    InvalidDuration,
    InvalidName,
    StepInputError,
    StepResultError,
    StepResultTooLarge,
)
from perdure.runtime.authoring.failures import check_error_types, decode_failure
from perdure.runtime.authoring.moved_defaults import may_have_been
from perdure.runtime.authoring.names import check_step_name
from perdure.runtime.authoring.retry import Retry

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Owner = TypeVar("Owner")

INPUT_LIMIT = 16 * 1024
"""Bytes of a step's input that are kept for people and for messages; the hash is of the whole."""

_OWN = "__perdure_step__"


class Keep:
    """The type of `KEEP`: leave an option as it is, since None is a value of its own."""


KEEP = Keep()


class StepDefinition(Generic[P, R]):
    """A step function with its name and options. Called directly it is the plain function, as in a unit test.

    name: under which results are recorded. retry: None is a single attempt. timeout: seconds per attempt, or None.
    errors: exception types that bodies get as themselves. is_blocking: a plain ``def``, to be run in a thread.
    place: ``file:line``. Raises DefinitionError and InvalidName.
    """

    name: str
    retry: Retry | None
    timeout: float | None

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        errors: Sequence[type[Exception]] = (),
        local: Mapping[str, Any] | None = None,
    ) -> None:
        self.place = place_of(fn)
        _refuse_unfit(fn, self.place)
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self._configure(getattr(fn, "__name__", "") if name is None else name, retry, timeout)
        self.errors = check_error_types(errors, self._what)
        self.is_blocking = not inspect.iscoroutinefunction(fn)
        try:
            self._signature = _Signature(inspect.signature(fn))
        except ValueError as error:
            raise DefinitionError(
                f"{self._what}: {error}; wrap it in a function of your own"
            ) from None
        self._local = local or {}
        self._result: ValueCodec | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<step {self.name!r} at {self.place}>"

    @overload
    def __get__(self, instance: None, owner: type) -> StepDefinition[P, R]: ...

    @overload
    def __get__(
        self: StepDefinition[Concatenate[Owner, Q], R], instance: Owner, owner: type
    ) -> StepDefinition[Q, R]: ...

    def __get__(self, instance: object, owner: type) -> StepDefinition[Any, R]:
        """As a method: the step of that instance."""
        return self if instance is None else self.bound_to(instance)

    def bound_to(self, instance: object) -> StepDefinition[Any, R]:
        """The same step with its first argument given; that argument is no part of the recorded input."""
        bound = self._copy()
        bound.fn = MethodType(self.fn, instance)
        bound._signature = self._signature.without_first()
        return bound

    def with_options(
        self,
        *,
        name: str | None = None,
        retry: Retry | Keep | None = KEEP,
        timeout: Duration | Keep | None = KEEP,
    ) -> StepDefinition[P, R]:
        """The same step with other options, for one call or under another name; None takes a policy or limit away."""
        changed = self._copy()
        changed._configure(
            self.name if name is None else name,
            self.retry if isinstance(retry, Keep) else retry,
            self.timeout if isinstance(timeout, Keep) else timeout,
        )
        return changed

    def prepare(self) -> None:
        """Resolve the annotations now. Raises DefinitionError where they cannot be used."""
        self._codec()

    # -- what the engine needs
    def encode_input(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        limit: int = INPUT_LIMIT,
    ) -> tuple[str, int]:
        """The canonical text of the arguments by their names, cut to ``limit`` bytes, and the hash of all of it.

        Arguments equal to their default are left out. Raises TypeError where they do not fit the function, and
        StepInputError naming the one that cannot be encoded.
        """
        try:
            given = self._signature.bind(args, kwargs)
        except TypeError as error:
            raise TypeError(f"step {self.name!r}: {error}") from None
        try:
            text = arguments_text(given)
        except NotEncodable as error:
            raise self._bad_input(given, error) from error
        return cut_text(text, limit), hash_text(text)

    def encode_output(self, value: Any, *, limit: int = DEFAULT_LIMIT) -> str:
        """What is recorded of a result; ``limit`` in bytes. Raises StepResultError, StepResultTooLarge."""
        try:
            data = self._codec().encode(value)
        except ValueFault as fault:
            if inspect.isawaitable(value):
                raise self._unawaited(value) from None
            raise StepResultError(self.name, fault.errors) from fault
        if len(data) > limit:
            raise StepResultTooLarge(self.name, len(data), limit)
        return data.decode()

    def may_have_had(self, args: Sequence[Any], kwargs: Mapping[str, Any], recorded: int) -> bool:
        """Whether these arguments may have been recorded under the hash ``recorded`` at another time or place."""
        try:
            return may_have_been(self._signature.bind(args, kwargs), recorded)
        except Exception:  # code of their classes
            return False

    def decode_output(self, text: str | None) -> Any:
        """The value of a recorded result, a new one each time. Raises StepResultError."""
        try:
            return self._codec().decode("null" if text is None else text)
        except ValueFault as fault:
            raise StepResultError(self.name, fault.errors) from fault

    def decode_error(self, text: str) -> BaseException:
        """A recorded error, a fresh instance each time."""
        return decode_failure(text, self.declared_errors)

    @property
    def declared_errors(self) -> tuple[type[BaseException], ...]:
        """The types of ``errors`` and those its retry policy names."""
        return self.errors if self.retry is None else (*self.errors, *self.retry.error_types)

    # -- inside
    @property
    def _what(self) -> str:
        return f"step {self.name!r} ({self.place})"

    def _copy(self) -> StepDefinition[P, R]:
        self._codec()
        made: StepDefinition[P, R] = StepDefinition.__new__(StepDefinition)
        made.__dict__.update(self.__dict__)
        return made

    def _configure(self, name: str, retry: Retry | None, timeout: Duration | None) -> None:
        try:
            self.name = check_step_name(name)
        except InvalidName as error:
            raise InvalidName(f"{error}, with @step(name=…) at {self.place}") from None
        if retry is not None and not isinstance(retry, Retry):
            raise DefinitionError(f"{self._what}: retry={retry!r} is no policy, use Retry(…)")
        self.retry = retry
        try:
            self.timeout = None if timeout is None else to_seconds(timeout, "timeout")
        except InvalidDuration as error:
            raise DefinitionError(f"{self._what}: {error}") from None
        if self.timeout == 0:
            raise DefinitionError(f"{self._what}: timeout={timeout!r} leaves no time at all")

    def _codec(self) -> ValueCodec:
        if self._result is None:
            self._result = codec_of(self.fn, "return", self._what, self._local)
            self._local = {}
        return self._result

    def _bad_input(self, given: Mapping[str, Any], error: NotEncodable) -> StepInputError:
        for name, value in given.items():
            try:
                canonical_text(value)
            except NotEncodable as fault:
                return StepInputError(f"step {self.name!r}: argument {name!r}: {fault}")
        return StepInputError(f"step {self.name!r}: {error}")

    def _unawaited(self, value: Any) -> StepResultError:
        if inspect.iscoroutine(value):
            value.close()
        message = "is awaitable, but the step is a plain def: make it an async def that awaits it"
        return StepResultError(
            self.name, [FieldFault(field="", message=message, value=shown(value))]
        )


Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments: by place, by name."""


def _copied(given: Given, *, again: bool) -> tuple[Given, Callable[[], Given] | None]:
    """A copy and, if ``again``, what makes further ones of what it was then; None: of what never changes.

    A step that changed the body's own objects would do so in one life and, once that is recorded, not in the next.
    """
    args, kwargs = given
    if all(map(_UNCHANGING.__contains__, map(type, args))) and not kwargs:
        return given, None
    try:
        data = pickle.dumps(given, -1)
        return pickle.loads(data), partial(pickle.loads, data) if again else None
    except Exception:  # a class inside a function; slower for large data
        pass
    try:
        made = copy.deepcopy(given)
        return made, partial(copy.deepcopy, copy.deepcopy(given)) if again else None
    except Exception:  # encodable, and not to be copied: the object itself, then
        return given, None


_UNCHANGING = frozenset(
    (str, bytes, int, float, bool, type(None), Decimal, UUID, datetime, date, timedelta)
)


class StepTarget:
    """What a step call carries to the engine's executor: the step, and its arguments as they were at the call."""

    __slots__ = ("_again", "_given", "_used", "definition")

    def __init__(
        self,
        definition: StepDefinition[Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.definition = definition
        # What pickle has written serves all attempts: a copy more costs nothing until there is another attempt.
        self._given, self._again = _copied((args, kwargs), again=definition.retry is not None)
        self._used = False

    def arguments(self) -> Given:
        """For one attempt: later ones do not see what it does to them."""
        if not self._used or self._again is None:
            self._used = True
            return self._given
        return self._again()

    def fits(self, recorded: int) -> bool:
        """Whether the call may be the one whose input was recorded under another hash than it has now."""
        return self.definition.may_have_had(*self._given, recorded)


class StepDecorator(Protocol):
    """``@step(…)`` with its options given."""

    def __call__(self, fn: Callable[P, R], /) -> StepDefinition[P, R]: ...


@overload
def step(fn: Callable[P, R], /) -> StepDefinition[P, R]: ...


@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    errors: Sequence[type[Exception]] = (),
) -> StepDecorator: ...


def step(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Duration | None = None,
    errors: Sequence[type[Exception]] = (),
) -> Any:
    """Make a function a step: ``@step`` or ``@step(retry=Retry(…), timeout="30s")``.

    name: default the function's name; at most 200 characters without ``> # /``.
    retry: a policy, default a single attempt. timeout: per attempt, a duration; a timed-out attempt is a
    StepTimeoutError, which a policy may retry. errors: exception types that the body gets as themselves.
    Raises DefinitionError, InvalidName.
    """

    def define(fn: Callable[..., Any]) -> StepDefinition[Any, Any]:
        local = local_names(fn, frame)
        return StepDefinition(
            fn, name=name, retry=retry, timeout=timeout, errors=errors, local=local
        )

    frame = caller_frame(1)
    return define if fn is None else define(fn)


def step_of(fn: object) -> StepDefinition[Any, Any]:
    """The step that ``ctx.step`` was given: a definition, or a plain function taken as one with no options."""
    if isinstance(fn, StepDefinition):
        return fn
    own = getattr(fn, _OWN, None)
    if isinstance(own, StepDefinition) and own.fn is fn:  # a copied __dict__ may hold another's
        return own
    if isinstance(fn, MethodType):
        return step_of(fn.__func__).bound_to(fn.__self__)
    if inspect.isawaitable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise DefinitionError(
            "ctx.step was given a coroutine: give it the function and its arguments, ctx.step(charge, order) and "
            "not ctx.step(charge(order))"
        )
    if not callable(fn):
        raise DefinitionError(f"ctx.step was given {shown(fn)}, which is no function")
    # Called by ctx.step, which is called by the body: the names around the function are the body's.
    local = local_names(fn, caller_frame(2))
    made: StepDefinition[Any, Any] = StepDefinition(fn, local=local)
    with contextlib.suppress(AttributeError, TypeError):  # built-in functions take no attributes
        setattr(fn, _OWN, made)
    return made


class _Signature:
    """Binds arguments to names, leaving out defaults; the common case without `inspect`."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        parameters = signature.parameters.values()
        kinds = inspect.Parameter
        simple = all(p.kind is kinds.POSITIONAL_OR_KEYWORD for p in parameters)
        self._count = len(parameters) if simple else -1
        self._places = sorted((p.name, place) for place, p in enumerate(parameters))
        self._defaults = {p.name: p.default for p in parameters if p.default is not kinds.empty}

    def without_first(self) -> _Signature:
        rest = list(self._signature.parameters.values())[1:]
        return _Signature(self._signature.replace(parameters=rest))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, in the order of the names. Raises TypeError as the call itself would."""
        if len(args) == self._count and not kwargs:
            given = {name: args[place] for name, place in self._places}
        else:
            given = dict(sorted(self._signature.bind(*args, **kwargs).arguments.items()))
        for name, default in self._defaults.items():
            if name in given and equal(given[name], default):
                del given[name]
        return given


def _refuse_unfit(fn: object, place: str) -> None:
    if isinstance(fn, (staticmethod, classmethod)):
        raise DefinitionError(f"@step ({place}): put @{type(fn).__name__} above @step, not below")
    if isinstance(fn, type) or not callable(fn):
        raise DefinitionError(f"@step ({place}): {shown(fn)} is no function")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise DefinitionError(
            f"@step ({place}): {getattr(fn, '__name__', fn)} is a generator: return a list, a result is recorded whole"
        )
