"""An application: the workflows one code base offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.runtime.authoring.definitions import WorkflowDefinition
from perdure.runtime.authoring.registry import Registry


class App:
    """What `perdure dev` and `perdure serve` are pointed at.

    workflows: definitions, or none with ``discover``: a package whose modules are imported and searched at boot.
    Raises `ConfigurationError` when two workflows share a name, naming both places.
    """

    def __init__(
        self,
        name: str = "app",
        *,
        workflows: Sequence[WorkflowDefinition[Any, Any]] = (),
        discover: str | None = None,
    ) -> None:
        self.name = name
        self.registry = Registry()
        for definition in workflows:
            self.registry.add(definition)
        if discover is not None:
            from perdure.runtime.discovery import discover as search

            search(discover, self.registry)

    def add(self, definition: WorkflowDefinition[Any, Any]) -> None:
        """One more workflow, before the app is served."""
        self.registry.add(definition)

    def __repr__(self) -> str:
        return f"App({self.name!r}, workflows={list(self.registry.names())})"
