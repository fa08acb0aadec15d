"""Errors as text and back: what is recorded when a step or a run fails, and what is raised from it.

Only declared types are raised as themselves: those of ``errors=[…]`` with their subclasses, perdure's own, and the
built-in exceptions. Nothing is imported and no ``__init__`` is run because of a stored text. Everything else becomes
a `RecordedError`. An instance is fresh at every call, with the recorded traceback as the text of its cause.
"""

from __future__ import annotations

import builtins
import json
import traceback
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from inspect import getattr_static
from types import MemberDescriptorType, TracebackType
from typing import Any

from perdure.runtime.authoring.codec import json_fault
from perdure.runtime.authoring.errors import (
    DefinitionError,
    DuplicateDefinitionError,
    FieldFault,
    InvalidDuration,
    InvalidName,
    NondeterminismError,
    NonRetryableError,
    OutsideBodyError,
    OutsideStepError,
    PayloadTooLarge,
    RecordedError,
    SignalPayloadError,
    SignalTimeoutError,
    StepInputError,
    StepResultError,
    StepResultTooLarge,
    StepTimeoutError,
    UnknownWorkflowError,
    WorkflowCancelled,
    WorkflowCrashLooped,
    WorkflowPayloadError,
    WorkflowResultError,
    WorkflowResultTooLarge,
)
from perdure.storage.errors import PerdureError

__all__ = [
    "DefinitionError",
    "DuplicateDefinitionError",
    "FieldFault",
    "InvalidDuration",
    "InvalidName",
    "NonRetryableError",
    "NondeterminismError",
    "OutsideBodyError",
    "OutsideStepError",
    "PayloadTooLarge",
    "RecordedError",
    "RecordedTraceback",
    "SignalPayloadError",
    "SignalTimeoutError",
    "StepInputError",
    "StepResultError",
    "StepResultTooLarge",
    "StepTimeoutError",
    "UnknownWorkflowError",
    "WorkflowCancelled",
    "WorkflowCrashLooped",
    "WorkflowPayloadError",
    "WorkflowResultError",
    "WorkflowResultTooLarge",
    "check_error_types",
    "decode_failure",
    "encode_failure",
]

TRACEBACK_BYTES = 32 * 1024
MESSAGE_BYTES = 16 * 1024
DATA_BYTES = 32 * 1024
"""Of the arguments and attributes of an error and its members, together."""
GROUP_MEMBERS = 100
"""Of a group and the groups in it, together."""
MEMBER_BYTES = 2 * 1024
"""Of each member's message and traceback; the group's traceback shows them too."""
_OWN_FRAMES = ("perdure.runtime.engine", "perdure.runtime.body", "perdure.runtime.authoring")

# Raised inside a coroutine or future these would not arrive as what they are.
_NEVER_AS_THEMSELVES = (StopIteration, StopAsyncIteration)


class RecordedTraceback(Exception):
    """The cause of an error raised from its record: the text of the traceback it had where it happened."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f'recorded traceback:\n"""\n{self.text.rstrip()}\n"""'


def encode_failure(error: BaseException) -> str:
    """An error as JSON text that every engine can store. Never raises, whatever the error is like."""
    try:
        return _dumps(_recorded(error, _Room()))
    except BaseException as fault:  # its own code may raise anything, SystemExit too
        kind = type(error)
        message = f"<not recorded: reading it raised {type(fault).__name__}>"
        return _dumps({"type": kind.__qualname__, "module": kind.__module__, "message": message})


def decode_failure(text: str, types: Collection[type[BaseException]] = ()) -> BaseException:
    """The error again, a fresh instance: itself if its type is declared in ``types``, perdure's or built in.

    A text that cannot be read becomes a RecordedError that says so.
    """
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        return _raised(record, types)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        return RecordedError(
            "UnreadableError", f"the recorded error cannot be read ({fault}): {text[:200]}"
        )


def check_error_types(types: object, what: str) -> tuple[type[Exception], ...]:
    """The exception types of an ``errors=`` option. Raises DefinitionError."""
    given = tuple(types) if isinstance(types, (list, tuple, set, frozenset)) else (types,)
    for kind in given:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise DefinitionError(f"{what}: errors={kind!r} is no subclass of Exception")
    return given


# -- recording
@dataclass(slots=True)
class _Room:
    """How much more may be recorded: members, bytes of arguments and attributes, of one message and traceback."""

    data: int = DATA_BYTES
    members: int = GROUP_MEMBERS
    message: int = MESSAGE_BYTES
    traceback: int = TRACEBACK_BYTES


def _recorded(error: BaseException, room: _Room) -> dict[str, Any]:
    kind = type(error)
    record: dict[str, Any] = {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "message": _cut(_message(error), room.message),
        "traceback": _cut_middle(_traceback_text(error), room.traceback),
    }
    if isinstance(error, RecordedError):
        record |= {"type": error.name, "module": error.module}
        record |= {"message": error.message, "attributes": _data(error.attributes, room)}
        return record
    args, attributes = _arguments(error, room), _data(_attributes(error), room)
    if args is not None:
        record["args"] = args
    if attributes:
        record["attributes"] = attributes
    notes = _notes(error)
    if notes:
        record["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        record.pop("args", None)
        record["message"] = _cut(str(error.message), room.message)
        room.message = room.traceback = MEMBER_BYTES
        record["exceptions"] = _members(error, room)
    return record


def _members(group: BaseExceptionGroup[BaseException], room: _Room) -> list[dict[str, Any]]:
    members = []
    for member in group.exceptions:
        if room.members <= 0:
            break
        room.members -= 1
        members.append(_recorded(member, room))
    return members


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as fault:
        return f"<no text: its __str__ raised {type(fault).__name__}>"


def _arguments(error: BaseException, room: _Room) -> list[Any] | None:
    """Its args if they are plain data; None: raised again, it will have its text as the only one."""
    try:
        # An OSError keeps its file names apart from its args.
        args = list(OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args)
    except Exception:
        return None
    return args if _fits(args, room) else None


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    try:
        yield from list(vars(error).items())
    except TypeError:
        return
    for kind in type(error).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(error, name):
                yield name, getattr(error, name)


def _data(attributes: Iterable[tuple[str, Any]] | dict[str, Any], room: _Room) -> dict[str, Any]:
    """Those attributes that are plain data, as long as there is room."""
    pairs = attributes.items() if isinstance(attributes, dict) else attributes
    return {
        name: value for name, value in pairs if not name.startswith("__") and _fits(value, room)
    }


def _fits(value: Any, room: _Room) -> bool:
    if not _is_data(value):
        return False
    size = len(_dumps(value))
    if size > room.data:
        return False
    room.data -= size
    return True


def _is_data(value: Any) -> bool:
    fault = json_fault(value)
    # A text with a NUL is still data: it is made safe, not dropped.
    return fault is None or "cannot be stored" in fault["message"]


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, list):
        return []
    return [_cut(note, 2048) for note in notes[:20] if isinstance(note, str)]


def _traceback_text(error: BaseException) -> str:
    try:
        formatted = traceback.TracebackException(
            type(error), error, _user_frames(error.__traceback__), limit=-100, compact=True
        )
        return "".join(formatted.format())
    except BaseException as fault:
        return f"<no traceback: formatting it raised {type(fault).__name__}>"


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not of the engine, if there is one."""
    start = frames
    while start is not None:
        module = str(start.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(_OWN_FRAMES):
            return start
        start = start.tb_next
    return frames


# -- raising again
def _raised(record: dict[str, Any], types: Collection[type[BaseException]]) -> BaseException:
    error = _rebuilt(record, types)
    for note in record.get("notes", ()):
        error.add_note(str(note))
    if record.get("traceback"):
        error.__cause__ = RecordedTraceback(str(record["traceback"]))
    return error


def _rebuilt(record: dict[str, Any], types: Collection[type[BaseException]]) -> BaseException:
    name, module = str(record["type"]), str(record["module"])
    message = str(record.get("message", ""))
    attributes = dict(record.get("attributes") or {})
    members = record.get("exceptions")
    if members and (module, name) in _GROUPS:
        inner = [_raised(member, types) for member in members]
        return ExceptionGroup(message, [e for e in inner if isinstance(e, Exception)])
    kind = _find(module, name, types)
    if kind is not None:
        args = record.get("args")
        error = _instance(kind, [message] if args is None else args, attributes)
        if error is not None:
            return error
    return RecordedError(
        name,
        message,
        module=module,
        attributes=attributes,
        traceback=str(record.get("traceback", "")),
    )


_GROUPS = {("builtins", "ExceptionGroup"), ("builtins", "BaseExceptionGroup")}


def _find(module: str, name: str, types: Collection[type[BaseException]]) -> type[Exception] | None:
    if module == "builtins":
        kind = getattr(builtins, name, None)
        found = kind if isinstance(kind, type) and issubclass(kind, Exception) else None
        return None if found is not None and issubclass(found, _NEVER_AS_THEMSELVES) else found
    for root in (*types, PerdureError):
        for kind in _family(root):
            if (kind.__module__, kind.__qualname__) == (module, name):
                return kind if issubclass(kind, Exception) else None
    return None


def _family(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for kind in root.__subclasses__():
        yield from _family(kind)


def _instance(
    kind: type[Exception], args: list[Any], attributes: dict[str, Any]
) -> Exception | None:
    """An instance without running the type's ``__init__``; built-in types have no other way to fill their fields."""
    try:
        if kind.__module__ == "builtins":
            error = kind(*args)
        else:
            error = kind.__new__(kind, *args)
            if isinstance(error, OSError):
                OSError.__init__(error, *args)
            else:
                error.args = tuple(args)
        for name, value in attributes.items():
            _set(error, name, value)
    except Exception:
        return None
    return error if type(error) is kind else None


def _set(error: Exception, name: str, value: Any) -> None:
    """Into the instance or its slot: a property of the class is not run."""
    slot = getattr_static(type(error), name, None)
    if isinstance(slot, MemberDescriptorType):
        slot.__set__(error, value)
    else:
        error.__dict__[name] = value


# -- text
def _dumps(value: Any) -> str:
    return json.dumps(_safe(value), ensure_ascii=False, separators=(",", ":"))


def _safe(value: Any) -> Any:
    """The same data with texts that every engine can store."""
    if isinstance(value, str):
        return _safe_text(value)
    if isinstance(value, dict):
        return {_safe_text(key): _safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_safe(item) for item in value]
    return value


def _safe_text(text: str) -> str:
    """NUL and lone surrogates as the escapes Python shows them by."""
    if "\x00" in text:
        text = text.replace("\x00", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return text
    return f"{data[:limit].decode(errors='ignore')}… ({len(data):,} bytes in all)"


def _cut_middle(text: str, limit: int) -> str:
    """A traceback says most at its end and next most at its beginning."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return text
    room = limit - 100
    head, tail = data[: room // 4], data[-(room - room // 4) :]
    left_out = len(data) - room
    return f"{head.decode(errors='ignore')}\n… {left_out:,} bytes left out …\n{tail.decode(errors='ignore')}"
