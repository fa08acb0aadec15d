"""The product's log lines, in the story of a simulated world."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from .loop import LANE, WORLD

if TYPE_CHECKING:
    from .world import World


class Logs:
    """Where log lines go: into the story of a world, or nowhere."""

    def __init__(self) -> None:
        self._world: World | None = None

    @contextmanager
    def of(self, world: World) -> Iterator[None]:
        self._world = world
        try:
            yield
        finally:
            self._world = None

    def note(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        """The end of structlog's chain: nothing is printed."""
        world = self._world
        if world is not None:
            name = event.pop("event", "")
            world.seen[f"log {name}"] += 1
            if name == "run.crash-looped":
                world.seen["crash-looped"] += 1
            if name == "runner.void":  # it gives up what it has in memory, and lives on
                world.fault("void", LANE.get(WORLD).owner.number)
                if not world.server.lost:
                    world.wrong("a runner took the database for another one, and it never was")
            if name == "run.displaced":
                world.seen["displaced"] += 1
            if world.story is not None:
                trace = event.pop("exc_info", None)
                facts = " ".join(f"{key}={value}" for key, value in event.items())
                who = LANE.get(WORLD).name
                world.say(f"{who}: [{method}] {name} {facts}{f' {trace!r}' if trace else ''}")
            if method in ("exception", "critical"):
                world.wrong(f"the product logged {name!r}: {event}")
        raise structlog.DropEvent


LAZY = type(structlog.get_logger())


@contextmanager
def _uncached() -> Iterator[None]:
    """A logger that was first used while a configuration that caches was in force keeps it for ever; here none does."""
    cached = {
        id(each): each
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "perdure"
        for each in vars(module).values()
        if isinstance(each, LAZY) and "bind" in vars(each)
    }
    kept = [(each, vars(each).pop("bind")) for each in cached.values()]
    try:
        yield
    finally:
        for each, bind in kept:
            each.bind = bind


@contextmanager
def silent_logs() -> Iterator[Logs]:
    """Nothing is printed meanwhile, and every line of the product is heard."""
    logs, kept = Logs(), structlog.get_config()
    quiet = logging.getLogger("perdure")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    structlog.configure(
        processors=[logs.note],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        with _uncached():
            yield logs
    finally:
        quiet.setLevel(level)
        structlog.configure(**kept)
