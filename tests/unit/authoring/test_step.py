# mypy: disable-error-code="empty-body"
"""`@step`: names, options, inputs, results."""

import asyncio
import functools
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from perdure.runtime.authoring.canonical import hash_text
from perdure.runtime.authoring.errors import (
    DefinitionError,
    InvalidName,
    NonRetryableError,
    PayloadTooLarge,
    RecordedError,
    StepInputError,
    StepResultError,
    StepResultTooLarge,
)
from perdure.runtime.authoring.failures import encode_failure
from perdure.runtime.authoring.retry import Retry, next_delay
from perdure.runtime.authoring.step import StepDefinition, StepTarget, step, step_of


class Order(BaseModel):
    id: int
    tags: set[str] = set()


class Receipt(BaseModel):
    number: str


class Declined(Exception):
    pass


class Down(Exception):
    pass


@step
async def charge(order: Order, currency: str = "EUR") -> Receipt:
    """Takes the money."""
    return Receipt(number=f"{order.id} {currency}")


@step(
    name="ship it",
    retry=Retry(max_attempts=5, retryable=(Down,)),
    timeout="1m 30s",
    errors=[Declined],
)
def ship(order: Order) -> "Parcel":
    return Parcel(order.id)


@dataclass
class Parcel:
    weight: float


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    @step
    async def greet(self, who: str) -> str:
        return f"{self.name} greets {who}"

    def bare(self, who: str, times: int = 1) -> str:
        return f"{self.name} {who}" * times


async def test_a_step_called_directly_is_the_plain_function():
    assert await charge(Order(id=1)) == Receipt(number="1 EUR")
    assert ship(Order(id=2)) == Parcel(2)
    assert charge.__doc__ == "Takes the money."
    assert vars(charge)["__name__"] == "charge"
    assert "test_step.py" in repr(charge)


def test_options_and_their_defaults():
    assert (charge.name, charge.retry, charge.timeout, charge.is_blocking) == (
        "charge",
        None,
        None,
        False,
    )
    assert (ship.name, ship.timeout, ship.is_blocking) == ("ship it", 90.0, True)
    assert ship.retry is not None
    assert ship.errors == (Declined,)


def test_other_options_make_another_step():
    other = ship.with_options(name="ship again", retry=None, timeout=5)
    assert (other.name, other.retry, other.timeout) == ("ship again", None, 5.0)
    assert (ship.name, ship.timeout) == ("ship it", 90.0)
    kept = ship.with_options()
    assert (kept.name, kept.retry, kept.timeout) == (ship.name, ship.retry, ship.timeout)
    assert ship.with_options(timeout=None).timeout is None
    assert other.encode_output(Parcel(1)) == '{"weight":1.0}'
    with pytest.raises(InvalidName):
        ship.with_options(name="a#b")


@pytest.mark.req("WF7")
@pytest.mark.parametrize("name", ["a>b", "a#b", "a/b", "", " a", "a\x00", "\ud800", "a" * 201])
def test_a_bad_name_is_refused_where_it_is_defined(name):
    with pytest.raises(InvalidName, match=r"test_step\.py"):

        @step(name=name)
        async def fine() -> None: ...


@pytest.mark.req("WF7")
def test_a_function_without_a_usable_name_has_to_be_given_one():
    with pytest.raises(InvalidName, match=r"'<lambda>'.*@step\(name=…\)"):
        step_of(lambda: 1)
    assert StepDefinition(lambda: 1, name="one").name == "one"
    assert StepDefinition(functools.partial(pow, 2), name="pow").name == "pow"
    with pytest.raises(DefinitionError, match=r"no signature .* wrap it"):
        step_of(max)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": "soon"}, "timeout 'soon'"),
        ({"timeout": 0}, "no time at all"),
        ({"timeout": -1}, "negative"),
        ({"retry": 3}, r"use Retry\(…\)"),
        ({"errors": [int]}, "no subclass of Exception"),
    ],
)
def test_bad_options_are_refused_with_the_place(options, words):
    with pytest.raises(DefinitionError, match=words) as caught:

        @step(**options)
        async def fine() -> None: ...

    assert "test_step.py" in str(caught.value)


def generator():
    yield 1


async def async_generator():
    yield 1


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (generator, "is a generator"),
        (async_generator, "is a generator"),
        (5, "no function"),
        (Order, "no function"),
        (staticmethod(generator), "put @staticmethod above @step"),
        (classmethod(lambda cls: 1), "put @classmethod above @step"),
    ],
)
def test_what_cannot_be_a_step_is_refused(fn, words):
    with pytest.raises(DefinitionError, match=words):
        step(fn)


# -- inputs
@pytest.mark.req("WF7")
def test_the_input_is_recorded_by_name_and_without_defaults():
    order = Order(id=1)
    text, digest = charge.encode_input((order,), {})
    assert text == '{"order":{"id":1}}'
    assert digest == hash_text(text)
    same = [
        charge.encode_input((order, "EUR"), {}),
        charge.encode_input((order,), {"currency": "EUR"}),
        charge.encode_input((), {"currency": "EUR", "order": order}),
    ]
    assert same == [(text, digest)] * 3
    other = charge.encode_input((order, "USD"), {})
    assert other[0] == '{"currency":"USD","order":{"id":1}}'
    assert other[1] != digest


def test_every_shape_of_parameters_is_bound():
    @step
    async def any_shape(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: Any) -> None: ...

    encode = any_shape.encode_input
    assert encode((1,), {})[0] == '{"a":1}'
    assert encode((1, 5, 6, 7), {"c": 4, "z": [1]})[0] == (
        '{"a":1,"b":5,"c":4,"more":{"z":[1]},"rest":[6,7]}'
    )
    assert encode((1, 2), {"c": 3}) == encode((1,), {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"order": 1}), ((1,), {"colour": 1})],
)
def test_arguments_that_do_not_fit_are_refused_as_by_the_call_itself(args, kwargs):
    with pytest.raises(TypeError) as caught:
        charge.encode_input(args, kwargs)
    assert "argument" in str(caught.value)


def test_an_argument_that_cannot_be_encoded_is_named():
    with pytest.raises(StepInputError, match=r"step 'charge': argument 'currency': .*\.Shop ") as e:
        charge.encode_input((Order(id=1), [Shop("x")]), {})
    assert isinstance(e.value, NonRetryableError)


@pytest.mark.req("ST12")
def test_a_long_input_is_cut_and_never_refused():
    text, digest = charge.encode_input((Order(id=1), "x" * 5_000_000), {}, limit=1000)
    assert len(text.encode()) <= 1000
    assert "5,000," in text
    assert text.endswith("bytes in all)")
    assert digest != charge.encode_input((Order(id=1), "x" * 5_000_001), {}, limit=1000)[1]


def test_text_no_engine_stores_is_no_reason_to_refuse_an_input():
    text, _ = charge.encode_input((Order(id=1), "a\x00\udc80"), {})
    text.encode()
    assert "\x00" not in text


# -- results
@pytest.mark.req("WF1")
def test_results_are_written_and_read_by_their_type():
    assert charge.encode_output(Receipt(number="7")) == '{"number":"7"}'
    assert charge.decode_output('{"number":"7"}') == Receipt(number="7")
    assert ship.decode_output(ship.encode_output(Parcel(2))) == Parcel(2.0)
    assert charge.decode_output('{"number":"7"}') is not charge.decode_output('{"number":"7"}')


@pytest.mark.req("WF1", "ST2")
def test_a_result_that_does_not_fit_is_a_step_result_error_and_not_retried():
    with pytest.raises(StepResultError) as caught:
        charge.encode_output({"no": 7})
    error = caught.value
    assert error.step_name == "charge"
    assert error.errors[0]["field"] == "number"
    assert "step 'charge'" in str(error)
    assert "number: field required" in str(error)
    assert next_delay(Retry(), attempt=1, elapsed=0, error=error, fraction=0.5) is None


def test_a_step_without_annotations_returns_json():
    @step
    async def loose(a, b=None): ...

    assert loose.encode_output({"a": [1, None]}) == '{"a":[1,null]}'
    assert loose.encode_output(None) == "null"
    assert loose.decode_output(None) is None
    with pytest.raises(StepResultError, match=r"a\.0: is a datetime\.datetime"):
        loose.encode_output({"a": [datetime(2030, 1, 1, tzinfo=UTC)]})


def test_the_annotation_is_found_through_partials_wrappers_and_methods():
    async def fetch(a: int, b: int) -> "Receipt": ...

    @functools.wraps(fetch)
    async def wrapper(*args: Any) -> Any: ...

    class Keeper:
        def hold(self) -> Receipt: ...

    found = [
        StepDefinition(functools.partial(fetch, 1), name="p"),
        StepDefinition(wrapper),
        step_of(Keeper().hold),
    ]
    for definition in found:
        with pytest.raises(StepResultError):
            definition.encode_output(5)
        assert definition.encode_output(Receipt(number="1")) == '{"number":"1"}'


def test_a_step_that_returns_nothing_must_return_nothing():
    @step
    async def silent() -> None: ...

    assert silent.encode_output(None) == "null"
    with pytest.raises(StepResultError):
        silent.encode_output(5)


@pytest.mark.req("ST12")
def test_an_oversized_result_is_refused_with_step_sizes_and_advice():
    @step
    async def download() -> str: ...

    with pytest.raises(StepResultTooLarge) as caught:
        download.encode_output("x" * 2_097_151)
    error = caught.value
    assert (error.step_name, error.size, error.limit) == ("download", 2_097_153, 2_097_152)
    for words in ("'download'", "2,097,153", "2,097,152", "reference", "step_result_limit"):
        assert words in str(error)
    assert isinstance(error, StepResultError)
    assert isinstance(error, PayloadTooLarge)
    assert download.encode_output("x" * 2_097_150)
    with pytest.raises(StepResultTooLarge):
        download.encode_output("ä" * 10, limit=21)


@pytest.mark.parametrize("value", ["a\x00b", "\ud800"])
def test_a_result_no_engine_stores_is_a_step_result_error(value):
    @step
    async def read() -> dict[str, list[str]]: ...

    with pytest.raises(StepResultError, match=r"lines\.1: holds a"):
        read.encode_output({"lines": ["ok", value]})


@pytest.mark.filterwarnings("error")
def test_a_plain_def_that_returns_a_coroutine_is_told_what_to_do():
    async def inner() -> int:
        return 1

    @step
    def outer() -> int:
        return inner()  # type: ignore[return-value]

    with pytest.raises(StepResultError, match="make it an async def"):
        outer.encode_output(outer())


@pytest.mark.req("WF1")
def test_an_annotation_that_cannot_be_encoded_is_refused_with_the_place():
    @step
    async def bad() -> Shop: ...

    with pytest.raises(DefinitionError, match=r"step 'bad' \(.*test_step.py:\d+\).*'return'.*Shop"):
        bad.prepare()

    @step
    async def worse() -> "Nowhere": ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(DefinitionError, match="'Nowhere', which is not defined"):
        worse.prepare()


def test_written_annotations_see_the_names_around_the_function():
    class Local(BaseModel):
        a: int

    @step
    async def local() -> "Local": ...

    @step(name="other")
    async def other() -> "list[Local]": ...

    assert local.encode_output(Local(a=1)) == '{"a":1}'
    assert other.encode_output([Local(a=1)]) == '[{"a":1}]'


# -- errors
def test_errors_a_step_declares_come_back_as_themselves():
    assert type(ship.decode_error(encode_failure(Declined("no")))) is Declined
    assert type(ship.decode_error(encode_failure(Down("away")))) is Down  # named by its policy
    assert type(charge.decode_error(encode_failure(Declined("no")))) is RecordedError


# -- what ctx.step takes
def test_plain_functions_are_steps_without_options():
    async def fetch(url: str) -> int: ...

    found = step_of(fetch)
    assert (found.name, found.retry, found.is_blocking) == ("fetch", None, False)
    assert step_of(fetch) is found
    assert step_of(charge) is charge
    assert step_of(len).name == "len"


def test_a_wrapper_is_not_taken_for_what_it_wraps():
    async def fetch() -> int: ...

    inner = step_of(fetch)

    @functools.wraps(fetch)
    async def wrapper() -> int:
        return await fetch()

    assert step_of(wrapper) is not inner
    assert step_of(wrapper).fn is wrapper


async def test_methods_are_steps_of_their_instance():
    one, other = Shop("one"), Shop("other")
    assert isinstance(Shop.greet, StepDefinition)
    assert await one.greet("anna") == "one greets anna"
    assert one.greet.encode_input(("anna",), {}) == other.greet.encode_input(("anna",), {})
    assert one.greet.encode_input(("anna",), {})[0] == '{"who":"anna"}'
    assert one.greet.encode_output("x") == '"x"'
    bare = step_of(one.bare)
    assert (bare.name, bare.is_blocking) == ("bare", True)
    assert bare.encode_input(("anna", 2), {})[0] == '{"times":2,"who":"anna"}'
    assert bare("anna") == "one anna"
    assert step_of(other.bare)("anna") == "other anna"


@pytest.mark.filterwarnings("error")
def test_a_coroutine_in_place_of_a_function_is_explained():
    with pytest.raises(DefinitionError, match=r"ctx.step\(charge, order\)"):
        step_of(charge(Order(id=1)))
    with pytest.raises(DefinitionError, match="no function"):
        step_of("charge")


def test_coroutine_functions_of_all_kinds_are_not_blocking():
    async def fetch(a: int, b: int) -> int:
        return a + b

    assert not StepDefinition(functools.partial(fetch, 1), name="p").is_blocking
    assert StepDefinition(functools.partial(pow, 2), name="p").is_blocking
    assert asyncio.run(StepDefinition(functools.partial(fetch, 1), name="p")(2)) == 3


# ---- what a step may do to its arguments ------------------------------------------------------


def takes_all(*args: Any, **kwargs: Any) -> None:
    """Called by nobody."""


@pytest.mark.req("WF5")
@pytest.mark.parametrize("value", [{"a": [1]}, [1, {"b": 2}], {1, 2}, SimpleNamespace(a=[1])])
def test_a_step_gets_copies_of_what_can_change(value):
    [own], kwargs = StepTarget(step_of(takes_all), (value,), {"again": value}).arguments()
    assert own == kwargs["again"] == value
    assert own is not value
    assert own is kwargs["again"], "what was one object stays one"


def test_what_cannot_change_is_passed_as_it_is():
    args = ("text", 5, None, 1.5, datetime(2026, 1, 1, tzinfo=UTC))
    assert StepTarget(step_of(takes_all), args, {}).arguments()[0] is args


def test_what_cannot_be_copied_is_passed_as_it_is():
    lock = threading.Lock()
    assert StepTarget(step_of(takes_all), (lock,), {}).arguments()[0][0] is lock
