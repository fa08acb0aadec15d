"""Values as text and back."""

import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Optional, Required, TypedDict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, SecretStr

from perdure.runtime.authoring.codec import ValueFault, codec_for, encode_message
from perdure.runtime.authoring.errors import PayloadTooLarge


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


class Word(StrEnum):
    HELLO = "hello"


class Address(BaseModel):
    street: str
    since: date | None = None


class Order(BaseModel):
    id: UUID
    total: Decimal
    placed: datetime
    address: Address
    tags: set[str] = Field(default_factory=set)
    note: float | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    at: datetime
    id: UUID


class Renamed(BaseModel):
    order_id: int = Field(alias="orderId")


class OneWay(BaseModel):
    order_id: int = Field(validation_alias="in", serialization_alias="out")


@dataclass
class Parcel:
    weight: float
    parts: list[str] = field(default_factory=list)


class Movie(TypedDict):
    name: str
    year: int


class Shop(TypedDict, total=False):
    name: Required[str]
    best: Movie
    all: Annotated[list[Movie] | None, "shown"]


class Point(NamedTuple):
    x: int
    y: int


UUID_1 = UUID("12345678-1234-5678-1234-567812345678")
NOON = datetime(2030, 1, 31, 12, 30, 15, 123456, tzinfo=UTC)
ADDRESS = Address(street="Straße 1")
ORDER = Order(id=UUID_1, total=Decimal("9.90"), placed=NOON, address=ADDRESS, tags={"a", "b"})

ROUND_TRIPS: list[tuple[Any, Any]] = [
    (int, 5),
    (int, -(2**70)),
    (str, 'größer "x"\n\t\u2028'),
    (bool, True),
    (float, 0.1),
    (None, None),
    (bytes, b"abc"),
    (date, date(2030, 1, 31)),
    (datetime, NOON),
    (timedelta, timedelta(days=1, microseconds=5)),
    (Decimal, Decimal("1.10")),
    (UUID, UUID_1),
    (Colour, Colour.RED),
    (Size, Size.BIG),
    (Word, Word.HELLO),
    (Literal["a", "b"], "b"),
    (int | None, None),
    (int | str, "5"),
    (Order | Address, ADDRESS),
    (list[Order], [ORDER]),
    (dict[str, Decimal], {"a": Decimal(1)}),
    (dict[UUID, int], {UUID_1: 1}),
    (set[int], {1, 2, 3}),
    (frozenset[str], frozenset({"a"})),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (Annotated[int, Field(ge=0)], 5),
    (Order, ORDER),
    (Strict, Strict(at=NOON, id=UUID_1)),
    (Renamed, Renamed(orderId=5)),
    (Parcel, Parcel(1.5, ["a"])),
    (Movie, {"name": "Alien", "year": 1979}),
    (Point, Point(1, 2)),
    (Shop, {"name": "x"}),
    (Shop | None, {"name": "x", "all": [{"name": "Alien", "year": 1979}]}),
    (Optional[list[Movie]], [{"name": "Alien", "year": 1979}]),  # noqa: UP045
    (dict[str, Movie | int], {"a": {"name": "Alien", "year": 1979}, "b": 1}),
    (Any, {"a": [1, 2.5, None, True, "x"], "b": {}}),
    (dict, {"a": 1}),
    (list, [1, "a"]),
    (set, {1, 2}),
    (dict[str, Any], {"a": [1]}),
    (dict[str, Any] | None, None),
    (dict[int, Any], {1: {"a": None}}),
    (list[tuple[UUID, Any]], [(UUID_1, [1])]),
    (Any, 10**4000),
]


@pytest.mark.req("WF1")
@pytest.mark.parametrize(("annotation", "value"), ROUND_TRIPS)
def test_a_value_comes_back_as_it_was(annotation, value):
    codec = codec_for(annotation)
    data = codec.encode(value)
    back = codec.decode(data.decode())
    assert back == value
    assert type(back) is type(value)
    in_no_order = isinstance(value, (set, frozenset)) or b'"tags"' in data  # a set's
    assert in_no_order or codec.encode(back) == data
    assert b": " not in data.replace(b"\\", b"")
    json.loads(data, parse_constant=pytest.fail)


def test_the_order_of_a_union_counts():
    class Here(BaseModel):
        a: int

    class There(BaseModel):
        a: int

    for first, second in ((Here, There), (There, Here)):
        assert type(codec_for(first | second).check({"a": 1})) is first


@pytest.mark.parametrize("value", [UUID_1, NOON, Word, ADDRESS])
def test_a_value_of_another_type_is_not_taken_for_its_encoded_form(value):
    with pytest.raises(ValueFault):
        codec_for(str).encode(value)
    with pytest.raises(ValueFault):
        codec_for(dict[str, str]).encode({"a": value})


@pytest.mark.parametrize("annotation", [int, int | None, list[int], dict[str, int], Any])
def test_a_number_with_more_digits_than_are_read_is_refused_when_it_is_written(annotation):
    def held(digits: int) -> Any:
        number = 10 ** (digits - 1)
        named = {"a": number}
        return (
            [number]
            if annotation == list[int]
            else named
            if annotation == dict[str, int]
            else number
        )

    codec = codec_for(annotation)
    for value in (held(4_300), -5 if annotation is int else held(1)):
        assert codec.decode(codec.encode(value)) == value
    for digits in (4_301, 6_000):
        with pytest.raises(ValueFault, match="does not read back"):
            codec.encode(held(digits))


@pytest.mark.req("WF1")
def test_each_decoding_makes_a_new_value():
    codec = codec_for(Order)
    text = codec.encode(ORDER).decode()
    assert codec.decode(text) is not codec.decode(text)


@pytest.mark.req("WF1", "WF3")
@pytest.mark.parametrize(
    ("annotation", "encoded", "value"),
    [
        (datetime, "2030-01-31T12:30:15.123456Z", NOON),
        (Decimal, "1.10", Decimal("1.10")),
        (UUID, str(UUID_1), UUID_1),
        (Colour, "red", Colour.RED),
        (set[int], [1, 2], {1, 2}),
        (Parcel, {"weight": 2}, Parcel(2.0)),
        (
            Address,
            {"street": "x", "since": "2030-01-31"},
            Address(street="x", since=date(2030, 1, 31)),
        ),
        (
            Strict,
            {"at": "2030-01-31T12:30:15.123456Z", "id": str(UUID_1)},
            Strict(at=NOON, id=UUID_1),
        ),
        (Strict, {"at": NOON, "id": str(UUID_1)}, Strict(at=NOON, id=UUID_1)),
        (Strict, {"at": NOON, "id": UUID_1}, Strict(at=NOON, id=UUID_1)),
    ],
)
def test_encoded_values_are_as_good_as_values_of_the_type(annotation, encoded, value):
    codec = codec_for(annotation)
    assert codec.check(encoded) == codec.check(value) == value
    assert codec.encode(encoded) == codec.encode(value)


def faults(annotation: Any, value: Any) -> dict[str, str]:
    with pytest.raises(ValueFault) as caught:
        codec_for(annotation).encode(value)
    for fault in caught.value.errors:
        json.dumps(fault).encode()
        assert len(fault["value"]) <= 80
    return {fault["field"]: fault["message"] for fault in caught.value.errors}


@pytest.mark.req("WF1")
def test_every_bad_field_is_named():
    found = faults(Order, {"id": "x", "total": "1", "placed": "soon", "address": {}})
    assert set(found) == {"id", "placed", "address.street"}
    with pytest.raises(ValueFault) as caught:
        codec_for(Order).check({"id": "x", "total": "1", "address": {}})
    assert caught.value.missing == ["placed", "address.street"]


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (str, "a\x00b", ""),
        (str, "\ud800", ""),
        (dict[str, str], {"a": "x", "b": "\x00"}, "b"),
        (dict[str, int], {"\x00": 1}, ""),
        (list[Address], [ADDRESS, Address.model_construct(street="\udfff")], "1.street"),
        (Parcel, Parcel(1.0, ["ok", "\x00"]), "parts.1"),
        (Any, {"a": [{"b": "\x00"}]}, "a.0.b"),
        (Any, {"a": {"\x00": 1}}, "a"),
        (Any, "\udc80", ""),
    ],
)
def test_text_not_every_engine_stores_is_refused_by_path(annotation, value, path):
    found = faults(annotation, value)
    assert list(found) == [path]
    assert "cannot be stored" in found[path] or "surrogate" in found[path]


def test_a_backslash_u0000_that_people_wrote_is_no_nul():
    assert codec_for(str).decode(codec_for(str).encode("\\u0000")) == "\\u0000"
    assert codec_for(Address).encode(Address(street="\\u0000"))
    assert encode_message("\\u0000", "signal") == '"\\\\u0000"'


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("annotation", "wrap", "path"),
    [
        (float, lambda x: x, ""),
        (float | None, lambda x: x, ""),
        (list[float | None], lambda x: [1.0, x], "1"),
        (Parcel, lambda x: Parcel(x), "weight"),
        (Order, lambda x: ORDER.model_copy(update={"note": x}), "note"),
        (Any, lambda x: {"a": x}, "a"),
        (dict[str, Any], lambda x: {"a": x}, "a"),
    ],
)
def test_what_is_no_finite_number_is_refused(annotation, wrap, path, number):
    found = faults(annotation, wrap(number))
    assert list(found) == [path]
    assert "no finite number" in found[path]


@dataclass
class Reading:
    name: str
    x: float | None


class Open(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    name: str = ""
    limit: float | None = None


class Mixed(BaseModel):
    here: Open
    there: float | None = None


NAN = float("nan")


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (Reading, Reading("NaN", NAN), "x"),
        (Reading, Reading("-Infinity", float("inf")), "x"),
        (list[Reading | str], ["Infinity", Reading("a", NAN)], "1.x"),
        (deque[float | None], deque([1.0, NAN]), "1"),
        (dict[str, float | None], {"NaN": NAN}, "NaN"),
        (Mixed, Mixed(here=Open(limit=NAN), there=NAN), "there"),
        (tuple[str, float | None], ("NaN", NAN), "1"),
    ],
)
def test_the_word_nan_elsewhere_does_not_excuse_a_nan(annotation, value, path):
    found = faults(annotation, value)
    assert list(found) == [path]
    assert "no finite number" in found[path]


class Bag(RootModel[list[float | None]]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.root)


def test_a_model_may_say_itself_what_its_iteration_gives():
    codec = codec_for(Bag)
    assert codec.decode(codec.encode(Bag([1.0, None]))) == Bag([1.0, None])
    assert list(faults(Bag, Bag([1.0, NAN]))) == ["root.1"]


def test_a_set_or_a_key_that_comes_back_without_an_end_is_taken():
    class Bounds(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="strings")
        ends: set[float]

    for annotation, value in (
        (Bounds, Bounds(ends={float("inf"), 1.0, -float("inf")})),
        (dict[float, str], {float("inf"): "NaN"}),
    ):
        codec = codec_for(annotation)
        assert codec.decode(codec.encode(value)) == value


def test_a_mixed_model_may_write_its_own_as_text():
    codec = codec_for(Mixed)
    assert codec.decode(codec.encode(Mixed(here=Open(limit=float("-inf"))))).here.limit == -float(
        "inf"
    )


def test_a_surrogate_in_a_deque_is_named():
    assert list(faults(deque[str], deque(["a", "\ud800"]))) == ["1"]


def test_a_model_may_choose_to_write_infinity_as_text():
    codec = codec_for(Open)
    assert codec.decode(codec.encode(Open(limit=float("inf")))) == Open(limit=float("inf"))


class Opaque:
    pass


@pytest.mark.req("WF1")
@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (NOON, "", "datetime.datetime"),
        ({"a": [Decimal(1)]}, "a.0", "decimal.Decimal"),
        ({"a": {1}}, "a", "set"),
        (ADDRESS, "", "Address"),
        (Word.HELLO, "", "Word"),
        (Point(1, 2), "", "Point"),
        (b"x", "", "bytes"),
        (Opaque(), "", "Opaque"),
        ({1: "a"}, "", "the key 1 (int)"),
        ([{None: 1}], "0", "the key None"),
    ],
)
def test_without_a_type_only_json_is_taken(value, path, kind):
    found = faults(Any, value)
    assert kind in found[path]
    assert "annotate it with its type" in found[path]


def test_without_a_type_tuples_and_kinds_of_dict_are_taken_as_what_they_become():
    codec = codec_for(Any)
    assert codec.decode(codec.encode((1, (2,)))) == [1, [2]]
    assert codec.decode(codec.encode(OrderedDict(a=1))) == {"a": 1}


def test_what_holds_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    assert "nested too deeply" in next(iter(faults(Any, loop).values()))
    assert faults(list[Any], loop)


def test_what_would_not_read_back_is_refused_when_it_is_written():
    found = faults(OneWay, OneWay(**{"in": 5}))
    assert "does not read back" in found["in"]
    broken = Address.model_construct(street=None)
    assert "does not read back" in faults(Address, broken)["street"]


def test_a_secret_is_refused_instead_of_lost():
    class Login(BaseModel):
        user: str
        password: SecretStr

    found = faults(Login, Login(user="anna", password=SecretStr("hunter2")))
    assert "written as asterisks" in found["password"]
    assert codec_for(str).encode("*****")


def test_bytes_that_are_no_text_are_refused_by_path():
    assert "no UTF-8" in faults(list[bytes], [b"ok", b"\xff"])["1"]


def test_a_value_whose_repr_raises_is_still_named():
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Shy" in faults(Any, [Shy()])["0"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


@pytest.mark.req("WF1")
@given(json_values)
def test_any_json_value_comes_back(value):
    codec = codec_for(Any)
    data = codec.encode(value)
    assert codec.decode(data) == value
    assert json.loads(data) == value


@given(st.text() | st.lists(st.text(), max_size=3))
def test_any_text_is_stored_as_it_is_or_refused(value):
    codec = codec_for(str | list[str])
    try:
        data = codec.encode(value)
    except ValueFault:
        flat = value if isinstance(value, str) else "".join(value)
        assert "\x00" in flat or any("\ud800" <= char <= "\udfff" for char in flat)
        return
    assert codec.decode(data) == value
    assert b"\x00" not in data


@pytest.mark.req("SL2")
def test_messages_are_written_by_what_they_hold():
    text = encode_message({"order": ORDER, "parcel": Parcel(1.0), "at": NOON}, "signal 'x'")
    assert codec_for(Order).decode(json.dumps(json.loads(text)["order"])) == ORDER
    assert encode_message(Renamed(orderId=1), "signal 'x'") == '{"orderId":1}'
    assert encode_message(None, "signal 'x'") == "null"
    for bad in (Opaque(), {"a": "\x00"}, "\ud800", [float("nan")], SecretStr("hunter2")):
        with pytest.raises(ValueFault):
            encode_message(bad, "signal 'x'")


@pytest.mark.req("ST12")
def test_an_oversized_message_is_refused_with_both_sizes_and_advice():
    with pytest.raises(
        PayloadTooLarge, match=r"signal 'x' is 1,002 bytes .* 1,000 .*reference"
    ) as e:
        encode_message("a" * 1000, "signal 'x'", limit=1000)
    assert (e.value.size, e.value.limit) == (1002, 1000)
    assert encode_message("ä" * 499, "signal 'x'", limit=1000)


@pytest.mark.req("WF1")
def test_a_typed_dict_names_its_missing_and_wrong_fields():
    found = faults(Shop, {"best": {"name": 1, "year": "x"}})
    assert set(found) == {"name", "best.name", "best.year"}
    assert codec_for(Shop).encode({"name": "x", "best": {"name": "A", "year": "1979"}}) == (
        b'{"name":"x","best":{"name":"A","year":1979}}'
    )


class Chain(BaseModel):
    word: str = "x"
    rest: "Chain | None" = None


def chained(links: int) -> Chain:
    chain = Chain()
    for _ in range(links):
        chain = Chain(rest=chain)
    return chain


@pytest.mark.parametrize("levels", [300, 5_000])
def test_what_is_too_deep_to_be_written_is_a_fault_and_no_recursion_error(levels):
    nested: Any = "\ud800"
    for _ in range(levels):
        nested = [nested]
    for value, annotation in ((nested, Any), (nested, list[Any]), (chained(levels), Chain)):
        with pytest.raises(ValueFault):
            codec_for(annotation).encode(value)
    with pytest.raises(ValueFault):
        encode_message(nested, "a message")
    with pytest.raises(ValueFault):
        encode_message({"a": chained(levels)}, "a message")


def test_a_surrogate_within_what_can_be_written_is_found_where_it_is():
    nested: Any = {"word": "\ud800"}
    for _ in range(150):
        nested = [nested]
    with pytest.raises(ValueFault, match="lone surrogate"):
        encode_message(nested, "a message")


def test_a_message_that_would_not_read_back_is_refused_at_its_sender():
    nested: Any = 1
    for _ in range(220):
        nested = [nested]
    for value in (nested, 10**4_301, {"n": [10**4_400]}):
        with pytest.raises(ValueFault, match="does not read back"):
            encode_message(value, "a message")
    assert len(encode_message(10**4_299, "a message")) == 4_300
    assert encode_message([1] * 500, "a message") == f"[{'1,' * 499}1]"
