"""One seed, from beginning to end."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from .checks import check_world
from .guard import Touched, guarded, quiet_endings
from .limits import small_limits
from .logs import silent_logs
from .plants import PLANTS
from .witness import watching
from .world import World

COLLECT_EVERY = 25
"""Simulations between two collections of what lost processes left behind."""

_since_collection = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed. digest: of everything that was written, executed and told."""

    seed: int
    violations: Sequence[str]
    seen: Counter[str]
    digest: str
    story: Sequence[str]
    lasted: float

    def command(self, plant: str | None = None) -> str:
        planted = f" --plant {plant}" if plant else ""
        return f"python -m tests.simulation {self.seed}{planted}"

    def finding(self, plant: str) -> str | None:
        """The violation by which that planted mistake must be found, and was."""
        mistake = PLANTS[plant]
        if mistake.needs is not None and not self.seen[mistake.needs]:
            return None
        found = (each for each in self.violations if any(word in each for word in mistake.finds))
        return next(found, None)


def simulate(seed: int, *, plant: str | None = None, tell: bool = False) -> Outcome:
    """The same seed gives the same outcome, on every machine and in every process."""
    global _since_collection
    planted = PLANTS[plant].planted() if plant else nullcontext()
    with quiet_endings(), silent_logs() as logs:
        world = World(seed, tell=tell)
        limits = small_limits(world.random("limits"))
        watch = watching(world.seen)
        with planted, limits, watch, guarded(world.processor_time) as guard, logs.of(world):
            try:
                world.run()
            except (RuntimeError, Touched) as error:
                world.wrong(f"the simulation broke off: {error}")
            rows = world.server.history()
            violations = [*check_world(world, rows), *guard.touched]
        outcome = Outcome(
            seed,
            violations,
            world.seen + Counter({f"call {k}": n for k, n in world.server.calls.items()}),
            _digest(world, rows),
            world.story or (),
            world.loop.now - 1000.0,
        )
        world.close()
        del world
        _since_collection += 1
        if _since_collection >= COLLECT_EVERY:
            bury()
    return outcome


def bury() -> None:
    """Throw away what the lost processes of past worlds left pending."""
    global _since_collection
    _since_collection = 0
    with quiet_endings(), silent_logs():
        gc.collect()


def _digest(world: World, rows: Sequence[object]) -> str:
    summary = hashlib.blake2b(digest_size=12)
    for part in (rows, world.executions, world.accounts.told, sorted(world.seen.items())):
        summary.update(repr(part).encode())
    return summary.hexdigest()
