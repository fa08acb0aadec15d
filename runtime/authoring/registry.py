"""The workflows one application knows, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.errors import (
    DefinitionError,
    DuplicateDefinitionError,
    UnknownWorkflowError,
)


class Registry:
    """Definitions by name; names are unique."""

    def __init__(self) -> None:
        self._definitions: dict[str, WorkflowDefinition[Any, Any]] = {}

    def add(self, definition: WorkflowDefinition[Any, Any]) -> None:
        """Register a definition; adding the same one again changes nothing.

        Raises DuplicateDefinitionError naming both places, DefinitionError if its annotations cannot be used.
        """
        if not isinstance(definition, WorkflowDefinition):
            raise DefinitionError(f"{definition!r} is no workflow: decorate it with @workflow")
        known = self._definitions.get(definition.name)
        if known is definition:
            return
        if known is not None:
            raise DuplicateDefinitionError(
                f"two workflows are named {definition.name!r}: {known.place} ({known.module}) and "
                f"{definition.place} ({definition.module}); give one of them another name"
            )
        definition.prepare()
        self._definitions[definition.name] = definition

    def get(self, name: str) -> WorkflowDefinition[Any, Any]:
        """The workflow of that name. Raises UnknownWorkflowError listing the names there are."""
        try:
            return self._definitions[name]
        except KeyError:
            raise UnknownWorkflowError(name, self._definitions) from None

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._definitions)

    def __contains__(self, name: object) -> bool:
        return name in self._definitions

    def __iter__(self) -> Iterator[WorkflowDefinition[Any, Any]]:
        return iter(self._definitions.values())

    def __len__(self) -> int:
        return len(self._definitions)
