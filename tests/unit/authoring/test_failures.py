"""Errors as text and back."""

import asyncio
import json
import sys
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from perdure.runtime.authoring import failures
from perdure.runtime.authoring.errors import (
    DefinitionError,
    NonRetryableError,
    RecordedError,
    SignalTimeoutError,
    StepResultError,
    StepResultTooLarge,
    StepTimeoutError,
    UnknownWorkflowError,
    WorkflowCancelled,
    WorkflowCrashLooped,
    WorkflowPayloadError,
)
from perdure.runtime.authoring.failures import (
    RecordedTraceback,
    check_error_types,
    decode_failure,
    encode_failure,
)

INITS: list[str] = []


class ProviderDown(Exception):
    def __init__(self, provider: str, *, status: int, body: object = None) -> None:
        INITS.append(provider)
        self.provider = provider
        self.status = status
        self.body = body
        super().__init__(f"{provider} answered {status}")


class RegionDown(ProviderDown):
    pass


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class Loud(NonRetryableError):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def back(error: BaseException, *types: type[BaseException]) -> Any:
    return decode_failure(encode_failure(raised(error)), types)


def test_a_declared_error_comes_back_as_itself_without_its_init():
    error = ProviderDown("stripe", status=503, body={"retry": [1, 2]})
    INITS.clear()
    found = back(error, ProviderDown)
    assert type(found) is ProviderDown
    assert (found.provider, found.status, found.body) == ("stripe", 503, {"retry": [1, 2]})
    assert str(found) == "stripe answered 503"
    assert found.args == error.args
    assert INITS == []


def test_a_subclass_of_a_declared_error_comes_back_as_itself():
    assert type(back(RegionDown("eu", status=500), ProviderDown)) is RegionDown


def test_an_undeclared_error_is_a_recorded_error_with_name_and_message():
    found = back(ProviderDown("stripe", status=503), ValueError)
    assert type(found) is RecordedError
    assert (found.name, found.message) == ("ProviderDown", "stripe answered 503")
    assert found.module == __name__
    assert found.attributes == {"provider": "stripe", "status": 503, "body": None}
    assert str(found) == "ProviderDown: stripe answered 503"
    assert "test_failures.py" in found.traceback


def test_a_recorded_error_that_is_recorded_again_keeps_its_original_name():
    once = back(ProviderDown("stripe", status=503))
    twice = decode_failure(encode_failure(raised(once)), [ProviderDown])
    assert type(twice) is ProviderDown
    assert twice.status == 503
    assert str(twice) == "stripe answered 503"


def test_every_decoding_makes_a_fresh_instance():
    text = encode_failure(raised(ProviderDown("stripe", status=503, body=[1])))
    one, other = (decode_failure(text, [ProviderDown]) for _ in range(2))
    assert one is not other
    assert one.__dict__["body"] is not other.__dict__["body"]
    assert one.__cause__ is not other.__cause__


def test_the_traceback_text_is_kept_and_printed_with_the_error():
    def deep() -> None:
        raise ValueError("wrong")

    try:
        deep()
    except ValueError as error:
        text = encode_failure(error)
    found = decode_failure(text)
    assert isinstance(found.__cause__, RecordedTraceback)
    assert "in deep" in found.__cause__.text
    printed = "".join(traceback.format_exception(raised(found)))
    assert printed.index("in deep") < printed.rindex("ValueError: wrong")
    # and it stays in the next record, that of the run
    assert "in deep" in json.loads(encode_failure(raised(found)))["traceback"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        ValueError(),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "/a"),
        ConnectionResetError("reset"),
        TimeoutError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ZeroDivisionError("x", 1, None),
        AssertionError("a"),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        SignalTimeoutError("approval", 3.0),
        StepTimeoutError("charge", 2.5),
        StepResultError("charge", [{"field": "a", "message": "m", "value": "1"}]),
        StepResultTooLarge("charge", 5, 4),
        WorkflowPayloadError("w", [{"field": "a", "message": "m", "value": ""}], ["a"]),
        WorkflowCrashLooped("r", 3),
        WorkflowCancelled("r", "why"),
        UnknownWorkflowError("w", ["a"]),
        RecordedError("Other", "text", module="m", attributes={"a": 1}),
        NonRetryableError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_builtin_and_own_errors_need_no_declaration(error):
    found = back(error)
    if isinstance(error, UnicodeDecodeError):  # its bytes are no plain data
        assert isinstance(found, RecordedError)
        assert found.message == str(error)
        return
    assert type(found) is type(error)
    assert str(found) == str(error)
    attributes = {k: v for k, v in vars(error).items() if k != "traceback"}
    assert {k: v for k, v in vars(found).items() if k != "traceback"} == attributes


def test_an_os_error_keeps_its_fields():
    found = back(FileNotFoundError(2, "No such file", "/a"))
    assert (found.errno, found.strerror, found.filename) == (2, "No such file", "/a")


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("stop"),
        GeneratorExit(),
        StopIteration(5),
        StopAsyncIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_end_a_process_or_a_coroutine_comes_back_as_a_recorded_error(error):
    found = back(error, type(error), BaseException)
    assert type(found) is RecordedError
    assert found.name == type(error).__name__


def test_a_group_comes_back_with_its_members():
    group = ExceptionGroup(
        "several",
        [ProviderDown("a", status=1), ExceptionGroup("inner", [ValueError("b"), Unspeakable()])],
    )
    found = back(group, ProviderDown)
    downs, rest = found.split(ProviderDown)
    assert downs.exceptions[0].status == 1
    values, others = rest.split(ValueError)
    assert str(values.exceptions[0].exceptions[0]) == "b"
    assert others.exceptions[0].exceptions[0].name == "Unspeakable"
    caught: list[Exception] = []
    try:
        raise found
    except* ProviderDown as part:
        caught += part.exceptions
    except* (ValueError, RecordedError):
        pass
    assert len(caught) == 1


def test_a_group_with_an_exit_in_it_comes_back_as_exceptions_only():
    found = back(BaseExceptionGroup("bad", [KeyboardInterrupt(), ValueError("x")]))
    assert type(found) is ExceptionGroup
    assert [type(member) for member in found.exceptions] == [RecordedError, ValueError]


def test_a_huge_group_is_cut():
    group = ExceptionGroup("many", [ValueError(str(n)) for n in range(1000)])
    text = encode_failure(raised(group))
    assert len(decode_failure(text).exceptions) == failures.GROUP_MEMBERS  # type: ignore[attr-defined]
    wide = ExceptionGroup("wide", [ExceptionGroup("inner", [ValueError("x" * 9000)] * 50)] * 50)
    assert len(encode_failure(raised(wide))) < 700_000
    nested: Exception = ValueError("innermost")
    for _ in range(50):
        nested = ExceptionGroup("outer", [nested])
    assert isinstance(back(nested), (ExceptionGroup, RecordedError))


def test_an_error_that_cannot_even_be_looked_at_is_recorded():
    class Hostile(Exception):
        __slots__ = ("value",)

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no")

    found = decode_failure(encode_failure(Hostile()))
    assert isinstance(found, RecordedError)
    assert found.name.endswith("Hostile")


def test_a_cycle_of_causes_ends():
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    text = encode_failure(one)
    assert "one" in json.loads(text)["traceback"]
    assert "other" in json.loads(text)["traceback"]


def test_an_error_whose_text_raises_is_recorded():
    found = back(Unspeakable("x"))
    assert found.name == "Unspeakable"
    assert "__str__ raised RuntimeError" in found.message


def test_nul_and_lone_surrogates_are_made_safe_everywhere():
    error = ProviderDown("a\x00b\udc80", status=1, body={"k\x00": ["\ud800"]})
    error.add_note("note \x00 \udfff")
    text = encode_failure(raised(error))
    text.encode()
    assert "\x00" not in text
    assert "\\u0000" not in text
    found = decode_failure(text, [ProviderDown])
    assert str(found) == "a\\x00b\\udc80 answered 1"
    assert found.__dict__["body"] == {"k\\x00": ["\\ud800"]}
    assert found.__notes__ == ["note \\x00 \\udfff"]


def test_attributes_that_are_no_data_are_left_out_and_big_ones_too():
    error = ProviderDown("a", status=1, body=object())
    found = back(error, ProviderDown)
    assert not hasattr(found, "body")
    assert found.status == 1
    huge = ProviderDown("a", status=1, body="x" * 1_000_000)
    text = encode_failure(raised(huge))
    assert len(text) < 100_000


def test_arguments_that_are_no_data_become_the_text():
    found = back(ValueError("at", object))
    assert found.args == (str(ValueError("at", object)),)


def test_an_os_error_of_the_applications_own_comes_back():
    class Disk(OSError):
        def __init__(self, errno: int, text: str, disk: str) -> None:
            super().__init__(errno, text)
            self.disk = disk

    found = back(Disk(28, "No space", "sda"), Disk)
    assert (type(found), found.errno, found.disk) == (Disk, 28, "sda")
    assert str(found) == "[Errno 28] No space"


def test_slots_come_back():
    found = back(Slotted(7), Slotted)
    assert type(found) is Slotted
    assert found.code == 7


def test_a_type_that_cannot_be_made_is_a_recorded_error():
    class Model(BaseModel):
        a: int

    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"a": "x"})
    found = decode_failure(encode_failure(caught.value), [ValidationError])
    assert isinstance(found, RecordedError)
    assert "1 validation error" in found.message


def test_notes_come_back():
    error = ValueError("x")
    error.add_note("while shipping")
    assert back(error).__notes__ == ["while shipping"]


def test_a_long_message_and_a_long_traceback_are_cut():
    def recurse(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 500_000)
        recurse(depth - 1)

    with pytest.raises(ValueError) as caught:
        recurse(300)
    record = json.loads(encode_failure(caught.value))
    assert len(record["traceback"].encode()) <= failures.TRACEBACK_BYTES
    assert "bytes in all" in record["message"]
    assert len(encode_failure(caught.value)) < 150_000


def test_a_recursion_error_is_recorded():
    def forever() -> None:
        forever()

    with pytest.raises(RecursionError) as caught:
        forever()
    found = decode_failure(encode_failure(caught.value))
    assert isinstance(found, RecursionError)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"type":1}', "{", '{"type":"ValueError"}']
)
def test_an_unreadable_record_is_an_error_that_says_so(text):
    found = decode_failure(text)
    assert isinstance(found, RecordedError)
    assert "cannot be read" in str(found)


def test_nothing_is_imported_because_of_a_record():
    record = {"type": "Popen", "module": "antigravity", "message": "x", "args": ["x"]}
    found = decode_failure(json.dumps(record))
    assert isinstance(found, RecordedError)
    assert "antigravity" not in sys.modules
    for name in ("eval", "print", "object", "__import__", "KeyboardInterrupt"):
        text = json.dumps({"type": name, "module": "builtins", "message": "x", "args": ["x"]})
        assert isinstance(decode_failure(text), RecordedError)


def test_a_property_of_the_class_is_not_run_by_a_record():
    ran = []

    class Guarded(Exception):
        @property
        def status(self) -> int:
            return 1

        @status.setter
        def status(self, value: int) -> None:
            ran.append(value)

    record = {
        "type": Guarded.__qualname__,
        "module": __name__,
        "message": "x",
        "args": ["x"],
        "attributes": {"status": 5},
    }
    decode_failure(json.dumps(record), [Guarded])
    assert ran == []


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.binary(), max_size=3))
def test_any_error_is_storable_and_read_again(message, attributes):
    error = Loud(message)
    error.__dict__.update(attributes)
    text = encode_failure(error)
    text.encode()
    assert "\x00" not in text
    assert type(decode_failure(text, [])) is Loud


def test_engine_frames_are_left_out():
    """Frames of the machinery above the user's code say nothing to people."""
    namespace: dict[str, Any] = {"__name__": "perdure.runtime.engine.executor"}
    exec(compile("def call(fn):\n    fn()", "/engine/executor.py", "exec"), namespace)

    def user_code() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError) as caught:
        namespace["call"](user_code)
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test
    text = json.loads(encode_failure(error))["traceback"]
    assert "user_code" in text
    assert "/engine/executor.py" not in text


def test_only_exceptions_may_be_declared():
    assert check_error_types([ValueError], "step 'x'") == (ValueError,)
    assert check_error_types(ValueError, "step 'x'") == (ValueError,)
    for wrong in ([int], "ValueError", [ValueError("x")], [KeyboardInterrupt]):
        with pytest.raises(DefinitionError, match=r"step 'x': errors="):
            check_error_types(wrong, "step 'x'")
