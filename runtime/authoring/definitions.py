"""`@workflow`: a coroutine function whose runs survive their process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from perdure.runtime.authoring.annotations import caller_frame, codec_of, local_names, place_of
from perdure.runtime.authoring.codec import DEFAULT_LIMIT, ValueCodec, ValueFault, shown
from perdure.runtime.authoring.errors import (
    DefinitionError,
    FieldFault,
    InvalidName,
    PayloadTooLarge,
    WorkflowPayloadError,
    WorkflowResultError,
    WorkflowResultTooLarge,
)
from perdure.runtime.authoring.failures import check_error_types, decode_failure
from perdure.runtime.authoring.names import (
    check_tags,
    check_workflow_name,
    keyed_run_id,
    storable_fault,
)
from perdure.runtime.authoring.step import StepDefinition

if TYPE_CHECKING:
    from perdure.runtime.authoring.context import Context

In = TypeVar("In")
Out = TypeVar("Out")


class Unset:
    """The type of `UNSET`: no payload was given, which is not the payload None."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()

_EMPTY = inspect.Parameter.empty


class WorkflowDefinition(Generic[In, Out]):
    """A workflow: a coroutine function with a name, a typed payload and a typed result.

    name, version: as given; module, place (``file:line``): where it is defined. tags: of every run.
    errors: exception types that callers get as themselves. takes_payload: whether the body has a payload parameter.
    Raises DefinitionError, InvalidName.
    """

    def __init__(
        self,
        fn: Callable[..., Coroutine[Any, Any, Out]],
        *,
        name: str | None = None,
        idempotency_key: Callable[[Any], str] | None = None,
        version: int = 1,
        tags: Sequence[str] = (),
        errors: Sequence[type[Exception]] = (),
        local: Mapping[str, Any] | None = None,
    ) -> None:
        self.place = place_of(fn)
        self.module = getattr(fn, "__module__", "?")
        self.__doc__ = fn.__doc__
        self.fn = fn
        try:
            self.name = check_workflow_name(getattr(fn, "__name__", "") if name is None else name)
        except InvalidName as error:
            raise InvalidName(f"{error} (@workflow at {self.place})") from None
        self._parameter = _payload_parameter(fn, self._what)
        if idempotency_key is not None and not callable(idempotency_key):
            raise DefinitionError(f"{self._what}: idempotency_key is no function of the payload")
        if type(version) is not int or version < 1:
            raise DefinitionError(
                f"{self._what}: version={version!r}, use a whole number from 1 on"
            )
        self.idempotency_key = idempotency_key
        self.version = version
        self.tags = _checked_tags(tags, self._what)
        self.errors = check_error_types(errors, self._what)
        self._local = local or {}
        self._codecs: tuple[ValueCodec, ValueCodec] | None = None

    def __repr__(self) -> str:
        return f"<workflow {self.name!r} at {self.place}>"

    @property
    def takes_payload(self) -> bool:
        return self._parameter is not None

    def call(self, ctx: Context, payload: In) -> Coroutine[Any, Any, Out]:
        """Enter the body, with a payload of `decode_payload`."""
        return self.fn(ctx, payload) if self.takes_payload else self.fn(ctx)

    def prepare(self) -> None:
        """Resolve the annotations now. Raises DefinitionError where they cannot be used."""
        self._both()

    # -- payload
    def encode_payload(self, value: Any = UNSET, *, limit: int = DEFAULT_LIMIT) -> str:
        """What is stored of a payload: a value of the type, or its encoded form. ``limit`` in bytes.

        Raises WorkflowPayloadError naming every bad field, PayloadTooLarge.
        """
        try:
            data = self._both()[0].encode(self._checked(value))
        except ValueFault as fault:
            raise WorkflowPayloadError(self.name, fault.errors, fault.missing) from fault
        if len(data) > limit:
            raise PayloadTooLarge(f"the payload of workflow {self.name!r}", len(data), limit)
        return data.decode()

    def decode_payload(self, text: str) -> Any:
        """The payload again, a new one each time. Raises WorkflowPayloadError."""
        if not self.takes_payload:
            return None
        try:
            return self._payload().decode(text)
        except ValueFault as fault:
            raise WorkflowPayloadError(self.name, fault.errors, fault.missing) from fault

    def run_id_for(self, payload: Any = UNSET, tenant: str | None = None) -> str | None:
        """The id every start with this payload's key has; None if the workflow has no key.

        Raises WorkflowPayloadError, and DefinitionError if the key function does not give non-empty text.
        """
        if self.idempotency_key is None:
            return None
        key: object = self.idempotency_key(self._checked(payload))
        if not (isinstance(key, str) and key):
            raise DefinitionError(
                f"{self._what}: idempotency_key gave {shown(key)}; it has to give text that is not empty"
            )
        if fault := storable_fault(key):
            raise DefinitionError(f"{self._what}: the idempotency key {shown(key)} {fault}")
        return keyed_run_id(self.name, key, tenant)

    # -- result
    def encode_result(self, value: Any, *, limit: int = DEFAULT_LIMIT) -> str:
        """What is stored of a result; ``limit`` in bytes. Raises WorkflowResultError, WorkflowResultTooLarge."""
        try:
            data = self._both()[1].encode(value)
        except ValueFault as fault:
            raise WorkflowResultError(self.name, fault.errors) from fault
        if len(data) > limit:
            raise WorkflowResultTooLarge(self.name, len(data), limit)
        return data.decode()

    def decode_result(self, text: str | None) -> Out:
        """The result again. Raises WorkflowResultError."""
        try:
            result: Out = self._both()[1].decode("null" if text is None else text)
        except ValueFault as fault:
            raise WorkflowResultError(self.name, fault.errors) from fault
        return result

    def decode_error(self, text: str) -> BaseException:
        """A recorded error of a run, a fresh instance each time; with the types its steps declare, as far as seen."""
        return decode_failure(text, self._declared)

    # -- inside
    @functools.cached_property
    def _declared(self) -> tuple[type[BaseException], ...]:
        seen: list[type[BaseException]] = list(self.errors)
        for value in list(getattr(self.fn, "__globals__", {}).values()):
            if isinstance(value, StepDefinition):
                seen.extend(value.declared_errors)
        return tuple(dict.fromkeys(seen))

    @property
    def _what(self) -> str:
        return f"workflow {self.name!r} ({self.place})"

    def _payload(self) -> ValueCodec:
        return self._both()[0]

    def _both(self) -> tuple[ValueCodec, ValueCodec]:
        if self._codecs is None:
            name = None if self._parameter is None else self._parameter.name
            self._codecs = (
                codec_of(self.fn, name, self._what, self._local),
                codec_of(self.fn, "return", self._what, self._local),
            )
            self._local = {}
        return self._codecs

    def _checked(self, value: Any) -> Any:
        """A payload as the body will get it. Raises WorkflowPayloadError."""
        codec = self._payload()
        given = None if value is UNSET else value
        if value is UNSET and self._parameter is not None:
            if self._parameter.default is not _EMPTY:
                given = self._parameter.default
        elif not self.takes_payload and given is not None:
            message = "takes no payload: its body has no parameter after ctx"
            fault = FieldFault(field="", message=message, value=shown(value))
            raise WorkflowPayloadError(self.name, [fault])
        try:
            return codec.check(given)
        except ValueFault as fault:
            errors, missing = fault.errors, fault.missing
            if given is None:
                errors, missing = _absent(codec, self._parameter, fault)
            raise WorkflowPayloadError(self.name, errors, missing) from fault


def _absent(
    codec: ValueCodec, parameter: inspect.Parameter | None, fault: ValueFault
) -> tuple[list[FieldFault], list[str]]:
    """What is missing when there is no payload at all: the fields a mapping would need, else the payload itself."""
    try:
        codec.check({})
    except ValueFault as empty:
        if empty.missing:
            return empty.errors, empty.missing
    return fault.errors, [parameter.name if parameter else "payload"]


class WorkflowDecorator(Protocol):
    """``@workflow(…)`` with its options given."""

    @overload
    def __call__(
        self, fn: Callable[[Context, In], Coroutine[Any, Any, Out]], /
    ) -> WorkflowDefinition[In, Out]: ...

    @overload
    def __call__(
        self, fn: Callable[[Context], Coroutine[Any, Any, Out]], /
    ) -> WorkflowDefinition[None, Out]: ...


@overload
def workflow(
    fn: Callable[[Context, In], Coroutine[Any, Any, Out]], /
) -> WorkflowDefinition[In, Out]: ...


@overload
def workflow(
    fn: Callable[[Context], Coroutine[Any, Any, Out]], /
) -> WorkflowDefinition[None, Out]: ...


@overload
def workflow(
    *,
    name: str | None = None,
    idempotency_key: Callable[[Any], str] | None = None,
    version: int = 1,
    tags: Sequence[str] = (),
    errors: Sequence[type[Exception]] = (),
) -> WorkflowDecorator: ...


def workflow(
    fn: Callable[..., Coroutine[Any, Any, Any]] | None = None,
    /,
    *,
    name: str | None = None,
    idempotency_key: Callable[[Any], str] | None = None,
    version: int = 1,
    tags: Sequence[str] = (),
    errors: Sequence[type[Exception]] = (),
) -> Any:
    """Make ``async def body(ctx)`` or ``async def body(ctx, payload)`` a workflow: ``@workflow`` or ``@workflow(…)``.

    name: default the function's name; stored with every run, so give one that outlives a renaming.
    idempotency_key: a pure function of the payload; starts with one key are one run, for ever.
    version: of the code, 1 or more. tags: on every run. errors: exception types that callers get as themselves.
    Raises DefinitionError, InvalidName.
    """

    def define(fn: Callable[..., Coroutine[Any, Any, Any]]) -> WorkflowDefinition[Any, Any]:
        return WorkflowDefinition(
            fn,
            name=name,
            idempotency_key=idempotency_key,
            version=version,
            tags=tags,
            errors=errors,
            local=local_names(fn, frame),
        )

    frame = caller_frame(1)
    return define if fn is None else define(fn)


def _payload_parameter(fn: Callable[..., Any], what: str) -> inspect.Parameter | None:
    """The parameter after ctx; None if there is none. Raises DefinitionError for any other shape."""
    if not inspect.iscoroutinefunction(fn):
        raise DefinitionError(f"{what}: a workflow is an async def")
    parameters = list(inspect.signature(fn).parameters.values())
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    if not 1 <= len(parameters) <= 2 or any(p.kind not in by_position for p in parameters):
        shape = ", ".join(str(p) for p in parameters)
        raise DefinitionError(
            f"{what}: its parameters are ({shape}); a body takes (ctx) or (ctx, payload): put several values into one "
            "model or dataclass"
        )
    return parameters[1] if len(parameters) == 2 else None


def _checked_tags(tags: Sequence[str], what: str) -> tuple[str, ...]:
    try:
        return tuple(check_tags(tags))
    except InvalidName as error:
        raise DefinitionError(f"{what}: tags={tags!r}: {error}") from None
