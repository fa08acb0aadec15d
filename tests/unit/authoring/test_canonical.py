"""The canonical encoding of a step's input."""

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SecretStr, field_serializer

from perdure.runtime.authoring.canonical import (
    NotEncodable,
    arguments_text,
    canonical_text,
    cut_text,
    hash_text,
)

pytestmark = pytest.mark.req("WF7")


class Colour(Enum):
    RED = "red"


class Item(BaseModel):
    name: str
    count: int = 1
    tags: set[str] = Field(default_factory=set)
    extra: dict[str, int] = Field(default_factory=lambda: {"a": 1})


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = "x"


class Hex(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    raw: complex

    @field_serializer("raw")
    def _write(self, value: complex) -> str:
        return f"{value.real}/{value.imag}"


class Opaque:
    pass


class Wrapped(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    held: Annotated[Opaque, PlainSerializer(lambda value: "opaque", return_type=str)]


@dataclass
class Part:
    name: str
    size: float = 1.0
    notes: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        ({"b", "a", "c"}, '["a","b","c"]'),
        (frozenset({10, 9}), "[10,9]"),
        ((1, [2.5, None, True]), "[1,[2.5,null,true]]"),
        ("größer", '"größer"'),
        ("a\x00", '"a\\u0000"'),
        ("\udc80", '"\\udc80"'),
        (Colour.RED, '"red"'),
        (Decimal("1.10"), '"1.10"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (datetime(2030, 1, 31, tzinfo=UTC), '"2030-01-31T00:00:00Z"'),
        (Path("/a/b"), '"/a/b"'),
        (b"\xff", '"_w=="'),
        (deque([1, 2]), "[1,2]"),
        (Item(name="a"), '{"name":"a"}'),
        (Item(name="a", count=2, tags={"y", "x"}), '{"count":2,"name":"a","tags":["x","y"]}'),
        (Item(name="a", extra={}), '{"extra":{},"name":"a"}'),
        (Open.model_validate({"name": "y", "more": [1]}), '{"more":[1],"name":"y"}'),
        (Hex(raw=1 + 2j), '{"raw":"1.0/2.0"}'),
        (Wrapped(held=Opaque()), '{"held":"opaque"}'),
        (Part("a"), '{"name":"a"}'),
        (Part("a", 2.0, ["x"]), '{"name":"a","notes":["x"],"size":2.0}'),
        ([{Part("a").name: {Item(name="b").name}}], '[{"a":["b"]}]'),
        ({UUID(int=2): 1, UUID(int=1): 2}, None),
        ({1: "a", "b": 2, None: 3}, None),
        ({(1, 2): Part("a")}, '[["[1,2]",{"name":"a"}]]'),
        ({"a": {datetime(2030, 1, 31, tzinfo=UTC): {2, 1}}}, None),
    ],
)
def test_a_value_has_one_text(value, text):
    found = canonical_text(value)
    assert text is None or found == text
    assert canonical_text(value) == found
    found.encode()


def test_the_order_of_keys_and_sets_does_not_matter():
    one = {"a": {1: "x", 2: "y"}, "b": [{"k": {"p", "q", "r"}}]}
    other = {"b": [{"k": {"r", "q", "p"}}], "a": {2: "y", 1: "x"}}
    assert canonical_text(one) == canonical_text(other)
    mixed = {UUID(int=1): {"x", "y"}, "z": 1}
    turned = {"z": 1, UUID(int=1): {"y", "x"}}
    assert canonical_text(mixed) == canonical_text(turned)


def test_the_text_does_not_depend_on_the_process():
    """Sets of text are ordered by a hash that differs from process to process."""
    code = (
        "from perdure.runtime.authoring.canonical import canonical_text;"
        "print(canonical_text({'s': {'a','b','c','d','e'}, 'f': frozenset('xyz')}))"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        texts.add(run.stdout)
    assert texts == {'{"f":["x","y","z"],"s":["a","b","c","d","e"]}\n'}


def test_a_field_added_with_a_default_changes_nothing():
    class Item2(Item):
        colour: str = "none"
        made: list[int] = Field(default_factory=list)

    @dataclass
    class Part2(Part):
        colour: str = "none"

    assert canonical_text(Item2(name="a")) == canonical_text(Item(name="a"))
    assert canonical_text(Part2("a")) == canonical_text(Part("a"))
    assert canonical_text(Item2(name="a", colour="red")) != canonical_text(Item(name="a"))


def test_a_value_that_only_equals_its_default_across_types_is_kept():
    assert canonical_text(Part("a", 1)) == '{"name":"a","size":1}'  # 1 == 1.0, but not the same


def test_a_default_that_cannot_be_compared_is_kept():
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    class Holder(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        odd: Any = Field(default_factory=Odd)
        id: UUID = Field(default_factory=uuid4)

    with pytest.raises(NotEncodable, match="Odd"):
        canonical_text(Holder())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Opaque(), "Opaque cannot be encoded.*inside the step"),
        ([Opaque()], "Opaque"),
        ({"a": {1: Opaque(), "b": 2}}, "Opaque"),
        (len, "builtin_function_or_method"),
        (int, "type"),
        ((x for x in [1]), "generator"),
        ({Opaque(): 1}, "Opaque"),
    ],
)
def test_live_objects_are_refused(value, words):
    with pytest.raises(NotEncodable, match=words):
        canonical_text(value)


def test_what_holds_itself_is_refused():
    loop: dict[str, Any] = {}
    loop["me"] = [loop]
    with pytest.raises(NotEncodable, match="holds itself"):
        canonical_text(loop)


def test_secrets_do_not_show():
    assert "hunter2" not in canonical_text({"password": SecretStr("hunter2")})


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.none() | st.booleans() | st.integers() | st.text(),
        max_size=5,
    )
)
def test_the_short_way_for_plain_arguments_writes_the_same_text(given_arguments):
    arguments = dict(sorted(given_arguments.items()))
    assert arguments_text(arguments) == canonical_text(arguments)


@given(st.text())
def test_the_hash_is_xxh3_as_a_signed_number(text):
    text = canonical_text(text)
    found = hash_text(text)
    assert -(2**63) <= found < 2**63
    assert found % 2**64 == xxhash.xxh3_64_intdigest(text.encode())


def test_known_hashes_stay():
    """A journal written by an earlier release must match: neither text nor hash may change."""
    text = canonical_text(
        {"order": Item(name="a", count=3), "at": datetime(2030, 1, 31, tzinfo=UTC)}
    )
    assert text == '{"at":"2030-01-31T00:00:00Z","order":{"count":3,"name":"a"}}'
    assert hash_text(text) == 678145509682305284
    assert hash_text("") == 3244421341483603138


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 60))
@pytest.mark.req("ST12")
def test_a_cut_text_fits_and_says_so(text, limit):
    cut = cut_text(text, limit)
    assert len(cut.encode()) <= limit
    if len(text.encode()) <= limit:
        assert cut == text


@pytest.mark.req("ST12")
def test_a_cut_text_says_how_long_it_was():
    assert cut_text("ä" * 100, 60) == "ä" * 19 + "… (200 bytes in all)"
