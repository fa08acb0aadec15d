"""What would come back as another value is refused when it is written; what comes back equal is taken."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    RootModel,
    SerializeAsAny,
    model_validator,
)

from perdure.runtime.authoring.codec import ValueFault, codec_for

pytestmark = pytest.mark.req("WF1")

UUID_1 = UUID("12345678-1234-5678-1234-567812345678")
SECONDS_OFF = timezone(timedelta(minutes=19, seconds=32))


class Base(BaseModel):
    x: int = 1


class Derived(Base):
    y: int = 2


class Renamed(Base):
    """Another type with the same fields."""


@dataclass
class Plain:
    x: int = 1


@dataclass
class PlainDerived(Plain):
    y: int = 2


@dataclass(eq=False)
class ByIdentity:
    """Equal to nothing but itself."""

    x: int
    inner: Plain | None = None


class Holder(BaseModel):
    one: Base | None = None
    many: list[Base] = []
    named: dict[str, Plain] = {}
    pair: tuple[int, Base] | None = None


class ReadAs(BaseModel):
    a: int | None = Field(None, validation_alias="userId")


class WrittenAs(BaseModel):
    a: int | None = Field(None, serialization_alias="A")


class FromPath(BaseModel):
    a: int = Field(0, validation_alias=AliasPath("user", "id"))


class Crossed(BaseModel):
    a: int = Field(1, serialization_alias="b")
    b: int = Field(2, serialization_alias="a")


class BothWays(BaseModel):
    a: int | None = Field(None, validation_alias=AliasChoices("a", "userId"))


class ByName(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    a: int | None = Field(None, validation_alias="userId")


class OneAlias(BaseModel):
    a: int | None = Field(None, alias="userId")


class LeftOut(BaseModel):
    a: int = Field(0, validation_alias="userId", exclude=True)


@dataclass
class Job:
    id: str
    tries: int = field(default=0, init=False)

    def tried(self, times: int) -> "Job":
        self.tries = times
        return self


@dataclass
class Computed:
    x: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x


class Row(TypedDict, total=False):
    a: Annotated[int, Field(validation_alias="in")]
    b: int


class Spot(NamedTuple):
    at: Base
    n: int = 0


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    x: int = 1


class FrozenDerived(Frozen):
    y: int = 2


class Day(Enum):
    FIRST = "2020-01-01"


class Word(StrEnum):
    HELLO = "hello"


class Alike(Enum):
    TEXT = "2020-01-01"
    DAY = date(2020, 1, 1)


class Tree(BaseModel):
    value: date | str = ""
    children: list["Tree"] = []


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str | date = "Tom"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = "Rex"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class HalfBase64(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")
    data: bytes = b""


class BothBase64(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    data: bytes = b""


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


class Loose(BaseModel):
    meta: Any = None
    more: JsonValue = None


class ByKind(BaseModel):
    """Reads as the subclass that `kind` names."""

    kind: str = "base"

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, value: Any, handler: Any) -> Any:
        if cls is ByKind and isinstance(value, dict) and value.get("kind") == "special":
            return Special.model_validate(value)
        return handler(value)


class Special(ByKind):
    kind: str = "special"
    extra: int = 0


Rounded = Annotated[Decimal, PlainSerializer(lambda number: round(float(number), 1))]

LOST: list[tuple[Any, Any, str, str]] = [
    # A subclass, wherever it lies.
    (Base, Derived(x=3, y=4), "", "Derived"),
    (Base, Renamed(), "", "Renamed"),
    (Plain, PlainDerived(3, 4), "", "PlainDerived"),
    (list[Base], [Base(), Derived()], "1", "Derived"),
    (dict[str, Base], {"a": Derived()}, "a", "Derived"),
    (tuple[int, ...] | Base, Derived(), "", "Derived"),
    (Base | None, Derived(), "", "Derived"),
    (Holder, Holder(one=Derived()), "one", "Derived"),
    (Holder, Holder(many=[Base(), Derived()]), "many.1", "Derived"),
    (Holder, Holder(named={"a": PlainDerived()}), "named.a", "PlainDerived"),
    (Holder, Holder(pair=(1, Derived())), "pair.1", "Derived"),
    (list[Holder], [Holder(one=Derived())], "0.one", "Derived"),
    (Spot, Spot(Derived()), "at", "Derived"),
    (ByIdentity, ByIdentity(1, PlainDerived()), "inner", "PlainDerived"),
    (RootModel[Base], RootModel[Base](Derived()), "root", "Derived"),
    (deque[Base], deque([Derived()]), "0", "Derived"),
    (set[Frozen], {Frozen(), FrozenDerived()}, "", "FrozenDerived"),
    (SerializeAsAny[Base], Derived(), "", "Derived"),
    (Page[Base], Page[Base](items=[Derived()]), "items.0", "Derived"),
    (Tree, Tree(children=[Tree(children=[Tree(value="2020-01-01")])]), "", ""),
    # Names that do not meet, and fields that are no arguments.
    (ReadAs, ReadAs.model_validate({"userId": 5}), "a", "'userId'"),
    (WrittenAs, WrittenAs(a=5), "a", "'A'"),
    (FromPath, FromPath.model_validate({"user": {"id": 5}}), "a", "'user.id'"),
    (Crossed, Crossed(a=5, b=6), "a", "'b'"),
    (list[ReadAs | None], [None, ReadAs.model_validate({"userId": 5})], "1.a", "'userId'"),
    (Row, {"in": 1, "b": 2}, "a", "'in'"),
    (Job, Job("a").tried(3), "tries", "init=False"),
    # Types of one union that look the same in JSON.
    (date | str, "2020-01-01", "", "union"),
    (str | date, date(2020, 1, 1), "", "union"),
    (datetime | str, "2020-01-01T00:00:00", "", "union"),
    (UUID | str, str(UUID_1), "", "union"),
    (bytes | str, "a", "", "union"),
    (str | Decimal, Decimal("1.5"), "", "union"),
    (Path | str, "a", "", "union"),
    (list[date] | list[str], ["2020-01-01"], "0", "union"),
    (dict[str, date | str], {"a": "2020-01-01"}, "a", "union"),
    (list[int] | set[int], {1, 2}, "", "union"),
    (set[date | str], {"2020-01-01"}, "", "union"),
    (Union[Derived, Base], Base(x=1), "", "union"),  # noqa: UP007
    (Base | Plain, Plain(5), "", "union"),
    (Literal["a", b"a"], b"a", "", "b'a'"),
    (Alike, Alike.DAY, "", "Alike"),
    (Day | str, Day.FIRST, "", "union"),
    (Word | str, Word.HELLO, "", "union"),
    (Pet, Cat(name=date(2020, 1, 1)), "name", "union"),
    # A form that is not the one that is read.
    (HalfBase64, HalfBase64(data=b"\xff"), "data", "val_json_bytes"),
    # Keys are text in JSON.
    (dict[int | str, int], {1: 1, "2": 2}, "", "key 1"),
    (dict[str | None, int], {None: 1}, "", "key None"),
    (dict[UUID | str, int], {str(UUID_1): 1}, "", "key"),
    (dict[int | str, int], {1: 1, "1": 2}, "", "key"),
    # Seconds of an offset are not written.
    (datetime, datetime(1900, 1, 1, tzinfo=SECONDS_OFF), "", "offset"),
    (datetime, datetime(1900, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam")), "", "offset"),
    (list[datetime | None], [datetime(1900, 1, 1, tzinfo=SECONDS_OFF)], "0", "offset"),
    (time, time(1, tzinfo=SECONDS_OFF), "", "offset"),
    (time, time(1, tzinfo=ZoneInfo("Europe/Berlin")), "", "offset"),
]


@pytest.mark.parametrize(("annotation", "value", "path", "told"), LOST)
def test_what_would_come_back_as_another_value_is_refused_by_field(annotation, value, path, told):
    with pytest.raises(ValueFault) as caught:
        codec_for(annotation).encode(value)
    (fault,) = caught.value.errors
    if isinstance(value, Tree):
        path, told = "children.0.children.0.value", "union"
    assert fault["field"] == path
    assert told in fault["message"]
    assert "come back" in fault["message"]
    assert ":" in fault["message"]  # and what to do


EQUAL: list[tuple[Any, Any]] = [
    (Base, Base(x=3)),
    (Holder, Holder(one=Base(), many=[Base(x=2)], named={"a": Plain()}, pair=(1, Base()))),
    (Union[Derived, Base], Derived(x=3, y=4)),  # noqa: UP007
    (Base | Plain, Base()),
    (ReadAs, ReadAs.model_validate({})),
    (WrittenAs, WrittenAs(a=None)),
    (Crossed, Crossed(a=5, b=5)),
    (BothWays, BothWays.model_validate({"userId": 5})),
    (ByName, ByName(a=5)),
    (OneAlias, OneAlias.model_validate({"userId": 5})),
    (Job, Job("a")),
    (Computed, Computed(4)),
    (Spot, Spot(Base(), 2)),
    (set[Frozen], {Frozen(x=n) for n in range(50)}),
    (frozenset[str | None], frozenset({"a", None})),
    (set[date | UUID], {date(2020, 1, 1), UUID_1}),
    (date | str, "tomorrow"),
    (date | str, date(2020, 1, 1)),
    (int | float, 1.0),
    (float | int, 1),
    (int | str, "5"),
    (bool | int, 1),
    (int | Decimal, Decimal(1)),
    (Decimal | float, 1.5),
    (datetime | date, date(2020, 1, 1)),
    (date | datetime, datetime(2020, 1, 1)),  # noqa: DTZ001
    (tuple[int, ...] | list[int], [1]),
    (list[date] | list[str], ["soon"]),
    (dict[str, date] | dict[str, int], {"a": date(2020, 1, 1)}),
    (dict[int | str, int], {"a": 1}),
    (Pet, Cat()),
    (list[Pet], [Cat(), Dog()]),
    (Page[int], Page[int](items=[1])),
    (Page, Page[int](items=[1])),
    (Tree, Tree(children=[Tree(value="x"), Tree(value=date(2020, 1, 1))])),
    (Loose, Loose(meta=[1, {"a": None}], more={"a": [1, None]})),
    (JsonValue, {"a": [1, 2.5, None, "x", {"2020-01-01": "2020-01-01"}]}),
    (datetime, datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45)))),
    (datetime | str, datetime(2020, 1, 1, tzinfo=UTC)),
    (time, time(1, tzinfo=UTC)),
    (Literal[1, "1", True], True),
    (Special | None, Special(extra=1)),
    (SerializeAsAny[ByKind], Special(extra=1)),
    (ByKind | int, ByKind()),
    (Mapping[str, Base], {"a": Base()}),
    (float | Decimal | str, Decimal("1.5")),
    (BothBase64, BothBase64(data=b"\xff")),
    (complex | int, 1 + 2j),
]


@pytest.mark.parametrize(("annotation", "value"), EQUAL)
def test_what_comes_back_equal_is_taken(annotation, value):
    codec = codec_for(annotation)
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    ("annotation", "value", "back"),
    [
        (Sequence[Base], (Base(),), [Base()]),
        (Sequence[date] | Sequence[UUID], (UUID_1,), [UUID_1]),
        (dict[int, Any], {1: (1, 2)}, {1: [1, 2]}),
        (Loose, Loose(meta=Derived()), Loose(meta={"x": 1, "y": 2})),
        (Loose, Loose(meta=date(2020, 1, 1)), Loose(meta="2020-01-01")),
        (Page, Page[date](items=[date(2020, 1, 1)]), Page(items=["2020-01-01"])),
        (LeftOut, LeftOut.model_validate({"userId": 5}), LeftOut.model_validate({})),
        (Rounded | None, Decimal("1.26"), Decimal("1.3")),
    ],
)
def test_what_a_type_leaves_open_or_chooses_to_write_is_its_own_affair(annotation, value, back):
    codec = codec_for(annotation)
    assert codec.decode(codec.encode(value)) == back


def test_a_class_that_knows_only_identity_is_not_asked_whether_it_is_equal():
    for annotation in (ByIdentity, ByIdentity | str, ByIdentity | Base):
        codec = codec_for(annotation)
        back = codec.decode(codec.encode(ByIdentity(1, Plain(2))))
        assert (type(back), back.x, back.inner) == (ByIdentity, 1, Plain(2))


def test_an_hour_that_comes_twice_is_taken():
    berlin = ZoneInfo("Europe/Berlin")
    for fold in (0, 1):
        at = datetime(2030, 10, 27, 2, 30, tzinfo=berlin, fold=fold)
        for annotation in (datetime, datetime | str):
            codec = codec_for(annotation)
            assert codec.decode(codec.encode(at)).timestamp() == at.timestamp()


def test_a_class_whose_comparison_fails_or_gives_no_truth_is_taken():
    class Odd:
        def __init__(self, text: str) -> None:
            self.text = text

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            from pydantic_core import core_schema

            return core_schema.no_info_plain_validator_function(
                lambda given: given if isinstance(given, cls) else cls(given),
                serialization=core_schema.plain_serializer_function_ser_schema(
                    lambda odd: odd.text
                ),
            )

    codec = codec_for(int | Odd)
    assert codec.decode(codec.encode(Odd("a"))).text == "a"


@pytest.mark.parametrize(
    "annotation",
    [
        int, str, bool, float, dict[str, int], list[str], Any, dict[str, Any], int | None,
        int | str | None, JsonValue, UUID, date, Decimal, bytes, Word, dict[int, Decimal],
    ],
)  # fmt: skip
def test_types_that_lose_nothing_are_not_looked_through(annotation):
    assert codec_for(annotation)._loss is None
