# mypy: disable-error-code="empty-body"
"""`@workflow`: shape, payload, result, identity."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from perdure.runtime.authoring import definitions
from perdure.runtime.authoring.definitions import WorkflowDefinition, workflow
from perdure.runtime.authoring.errors import (
    DefinitionError,
    InvalidName,
    PayloadTooLarge,
    RecordedError,
    WorkflowPayloadError,
    WorkflowResultError,
    WorkflowResultTooLarge,
)
from perdure.runtime.authoring.failures import encode_failure
from perdure.runtime.authoring.names import keyed_run_id
from perdure.runtime.authoring.step import step

if TYPE_CHECKING:
    from perdure.runtime.authoring.context import Context


class Address(BaseModel):
    street: str


class Order(BaseModel):
    id: int
    placed: datetime
    address: Address
    express: bool = False


class Declined(Exception):
    pass


class Sunk(Exception):
    pass


@step(errors=[Sunk])
async def sail() -> None: ...


NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
ORDER = Order(id=5, placed=NOON, address=Address(street="x"))


@workflow(
    name="orders.fulfil",
    idempotency_key=lambda order: f"order:{order.id}",
    version=3,
    tags=["shop"],
    errors=[Declined],
)
async def fulfil(ctx: "Context", order: Order) -> dict[str, int]:
    """Fulfils."""
    return {"id": order.id}


@workflow
async def nothing(ctx) -> None: ...


@workflow
async def loose(ctx, payload): ...


@workflow
async def late(ctx: "Context", when: "Later") -> "Later": ...


@dataclass
class Later:
    at: datetime


class Idle:
    """Stands for a context in bodies that do not use it."""


@pytest.mark.req("WF1")
def test_a_definition_says_what_it_is():
    assert (fulfil.name, fulfil.version, fulfil.tags) == ("orders.fulfil", 3, ("shop",))
    assert (nothing.name, nothing.version, nothing.takes_payload) == ("nothing", 1, False)
    assert fulfil.module == __name__
    assert "test_definitions.py:" in fulfil.place
    assert fulfil.__doc__ == "Fulfils."
    assert fulfil.takes_payload


async def test_the_body_gets_its_payload_if_it_takes_one():
    assert await fulfil.call(Idle(), ORDER) == {"id": 5}  # type: ignore[arg-type]
    assert await nothing.call(Idle(), None) is None  # type: ignore[arg-type, func-returns-value]


# -- payloads
@pytest.mark.req("WF3")
def test_domain_values_are_as_good_as_encoded_ones():
    text = fulfil.encode_payload(ORDER)
    encoded = {"id": "5", "placed": "2030-01-31T12:00:00Z", "address": {"street": "x"}}
    mixed = {"id": 5, "placed": NOON, "address": Address(street="x")}
    assert fulfil.encode_payload(encoded) == fulfil.encode_payload(mixed) == text
    assert fulfil.decode_payload(text) == ORDER
    assert json.loads(text)["placed"] == "2030-01-31T12:00:00Z"


@pytest.mark.req("WF5")
def test_every_entry_gets_the_original_payload():
    text = fulfil.encode_payload(ORDER)
    first = fulfil.decode_payload(text)
    first.address.street = "changed"
    assert fulfil.decode_payload(text) == ORDER


@pytest.mark.req("WF3")
def test_a_wrong_payload_is_refused_naming_workflow_missing_and_bad_fields():
    with pytest.raises(WorkflowPayloadError) as caught:
        fulfil.encode_payload({"id": "x", "address": {}, "express": "perhaps"})
    error = caught.value
    assert error.workflow_name == "orders.fulfil"
    assert error.missing_fields == ["placed", "address.street"]
    assert [fault["field"] for fault in error.errors] == [
        "id",
        "placed",
        "address.street",
        "express",
    ]
    for words in ("orders.fulfil", "id: ", "'x'", "placed: field required", "express: "):
        assert words in str(error)


@pytest.mark.req("WF3")
@pytest.mark.parametrize("given", [(), (None,)])
def test_no_payload_at_all_names_the_fields_it_would_need(given):
    with pytest.raises(WorkflowPayloadError) as caught:
        fulfil.encode_payload(*given)
    assert caught.value.missing_fields == ["id", "placed", "address"]
    with pytest.raises(WorkflowPayloadError) as caught:
        run_number.encode_payload(*given)
    assert caught.value.missing_fields == ["number"]


@workflow
async def run_number(ctx, number: int) -> int: ...


@workflow
async def with_default(ctx, number: int | None = 7) -> int: ...


def test_a_default_payload_is_stored_when_none_is_given():
    assert with_default.encode_payload() == "7"
    assert with_default.encode_payload(None) == "null"
    assert with_default.encode_payload(3) == "3"


def test_a_workflow_without_payload_takes_none():
    assert nothing.encode_payload() == nothing.encode_payload(None) == "null"
    assert nothing.decode_payload("null") is None
    with pytest.raises(WorkflowPayloadError, match=r"takes no payload.*ctx"):
        nothing.encode_payload({"a": 1})


def test_a_payload_without_annotation_is_any_json():
    assert loose.encode_payload({"a": [1]}) == '{"a":[1]}'
    assert loose.encode_payload() == "null"
    with pytest.raises(WorkflowPayloadError, match=r"a: is a datetime.datetime, which JSON"):
        loose.encode_payload({"a": NOON})


def test_annotations_may_name_what_is_defined_later():
    text = late.encode_payload({"at": NOON})
    assert late.decode_payload(text) == late.decode_result(text) == Later(NOON)


@pytest.mark.req("ST12")
def test_an_oversized_payload_is_refused_with_both_sizes():
    with pytest.raises(PayloadTooLarge, match=r"'loose' is 2,000,002 bytes .* 1,000,000") as e:
        loose.encode_payload("x" * 2_000_000, limit=1_000_000)
    assert (e.value.size, e.value.limit) == (2_000_002, 1_000_000)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"id":1}', "null"])
def test_an_unreadable_stored_payload_is_a_payload_error(text):
    with pytest.raises(WorkflowPayloadError, match=r"orders\.fulfil"):
        fulfil.decode_payload(text)


# -- results
@pytest.mark.req("WF1")
def test_a_result_that_does_not_fit_is_a_workflow_result_error():
    assert fulfil.encode_result({"a": 1}) == '{"a":1}'
    assert fulfil.decode_result('{"a":1}') == {"a": 1}
    with pytest.raises(WorkflowResultError, match=r"'orders.fulfil' a: ") as caught:
        fulfil.encode_result({"a": "x"})
    assert caught.value.workflow_name == "orders.fulfil"
    with pytest.raises(WorkflowResultError):
        nothing.encode_result(1)
    with pytest.raises(WorkflowResultTooLarge, match=r"7 bytes .* 5 bytes"):
        fulfil.encode_result({"a": 1}, limit=5)
    assert nothing.decode_result(None) is None


# -- identity
@pytest.mark.req("WF2")
def test_the_key_makes_the_run_id_from_any_form_of_the_payload():
    run_id = keyed_run_id("orders.fulfil", "order:5")
    encoded = {"id": "5", "placed": "2030-01-31T12:00:00Z", "address": {"street": "x"}}
    assert fulfil.run_id_for(ORDER) == fulfil.run_id_for(encoded) == run_id
    assert fulfil.run_id_for(ORDER, "acme") == keyed_run_id("orders.fulfil", "order:5", "acme")
    assert nothing.run_id_for() is None
    with pytest.raises(WorkflowPayloadError):
        fulfil.run_id_for({})


@pytest.mark.req("WF2")
@pytest.mark.parametrize("key", ["", None, 5, b"x", "a\x00", "\ud800"])
def test_a_key_that_is_no_usable_text_is_refused(key):
    @workflow(idempotency_key=lambda payload: key)
    async def keyed(ctx, payload: int) -> None: ...

    with pytest.raises(DefinitionError, match=r"'keyed'.*idempotency"):
        keyed.run_id_for(1)


# -- errors
def test_declared_errors_of_a_workflow_and_its_steps_come_back_as_themselves():
    assert type(fulfil.decode_error(encode_failure(Declined("no")))) is Declined
    assert type(fulfil.decode_error(encode_failure(Sunk("no")))) is Sunk
    assert type(fulfil.decode_error(encode_failure(KeyError("no")))) is KeyError

    class Hidden(Exception):
        pass

    found = fulfil.decode_error(encode_failure(Hidden("no")))
    assert isinstance(found, RecordedError)
    assert found.name.endswith("Hidden")


# -- shapes
def not_async(ctx): ...


async def no_context(): ...


async def two_payloads(ctx, a, b): ...


async def by_keyword(ctx, *, a): ...


async def any_number(ctx, *payload): ...


async def generator(ctx):
    yield 1


@pytest.mark.req("WF1")
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (not_async, "is an async def"),
        (generator, "is an async def"),
        (no_context, r"parameters are \(\)"),
        (two_payloads, r"\(ctx, a, b\).*one model"),
        (by_keyword, "one model"),
        (any_number, "one model"),
    ],
)
def test_other_shapes_are_refused_with_the_place(fn, words):
    with pytest.raises(DefinitionError, match=words) as caught:
        workflow(fn)
    assert "test_definitions.py" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": 0}, "from 1 on"),
        ({"version": "2"}, "from 1 on"),
        ({"tags": "shop"}, "give a list of texts"),
        ({"tags": [1]}, "tag 1 is int"),
        ({"idempotency_key": "id"}, "no function of the payload"),
        ({"errors": [int]}, "no subclass of Exception"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(DefinitionError, match=words):

        @workflow(**options)
        async def fine(ctx) -> None: ...


def test_a_bad_name_is_refused_with_the_place():
    with pytest.raises(InvalidName, match=r"is empty.*test_definitions.py"):

        @workflow(name="")
        async def fine(ctx) -> None: ...


def test_an_annotation_that_cannot_be_encoded_is_refused():
    @workflow
    async def bad(ctx, payload: Idle) -> None: ...

    with pytest.raises(DefinitionError, match=r"'bad'.*'payload'.*Idle.*cannot be encoded"):
        bad.prepare()


def test_all_public_names_are_typed_definitions():
    assert isinstance(fulfil, WorkflowDefinition)
    holder: Any = definitions.UNSET
    assert repr(holder) == "UNSET"
