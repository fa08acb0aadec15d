"""The workflows one application knows."""

import pytest

from perdure.runtime.authoring.definitions import workflow
from perdure.runtime.authoring.errors import (
    DefinitionError,
    DuplicateDefinitionError,
    UnknownWorkflowError,
)
from perdure.runtime.authoring.registry import Registry
from perdure.storage.errors import ConfigurationError, InputError


@workflow(name="a")
async def first(ctx) -> None: ...


@workflow(name="a")
async def second(ctx) -> None: ...


@workflow
async def other(ctx) -> None: ...


@pytest.mark.req("WF3")
def test_definitions_are_found_by_name():
    registry = Registry()
    registry.add(other)
    registry.add(first)
    registry.add(first)
    assert registry.names() == ["a", "other"]
    assert registry.get("a") is first
    assert "a" in registry
    assert "b" not in registry
    assert list(registry) == [other, first]
    assert len(registry) == 2


@pytest.mark.req("WF4")
def test_two_definitions_with_one_name_are_refused_with_both_places():
    registry = Registry()
    registry.add(first)
    with pytest.raises(DuplicateDefinitionError) as caught:
        registry.add(second)
    assert first.place in str(caught.value)
    assert second.place in str(caught.value)
    assert first.place != second.place
    assert isinstance(caught.value, ConfigurationError)
    assert registry.get("a") is first


@pytest.mark.req("WF3")
def test_an_unknown_name_lists_the_known_ones():
    registry = Registry()
    with pytest.raises(UnknownWorkflowError, match=r"'x'.*none at all"):
        registry.get("x")
    registry.add(other)
    registry.add(first)
    with pytest.raises(UnknownWorkflowError, match=r"'x'; registered here: a, other$") as caught:
        registry.get("x")
    assert (caught.value.workflow_name, caught.value.known) == ("x", ["a", "other"])
    assert isinstance(caught.value, InputError)


def test_a_long_list_of_names_is_cut():
    assert "and 30 more" in str(UnknownWorkflowError("x", [f"w{n}" for n in range(80)]))


def test_what_is_no_workflow_or_cannot_work_is_refused():
    class Opaque: ...

    @workflow
    async def bad(ctx, payload: Opaque) -> None: ...

    registry = Registry()
    with pytest.raises(DefinitionError, match="cannot be encoded"):
        registry.add(bad)
    with pytest.raises(DefinitionError, match="decorate it with @workflow"):
        registry.add(registry.get)  # type: ignore[arg-type]
    assert registry.names() == []
