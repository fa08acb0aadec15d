"""What the keeper knows, as one immutable value that is swapped by reference between threads."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.sharding.lock_mode import LockMode
from perdure.storage.errors import ConfigurationError, PerdureError
from perdure.storage.model import Topology


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Times of the lease protocol, in seconds; the same in all processes of a cluster.

    lease: how long a runner is believed alive after a renewal. renewal: the period of renewals, also the deadline of
    each of the keeper's database calls. look: the period of looks at runners and shards. advisory: beside its lease
    each runner holds a lock of its session, and who loses it need not be waited for.
    Raises `ConfigurationError` when a lease does not outlast two renewals.
    """

    lease: float = 10.0
    renewal: float = 2.5
    look: float = 0.5
    advisory: bool = False

    def __post_init__(self) -> None:
        for name, value in (("lease", self.lease), ("renewal", self.renewal), ("look", self.look)):
            if not value > 0:
                raise ConfigurationError(
                    f"{name} must be a positive number of seconds, not {value!r}"
                )
        if self.lease < 2 * self.renewal:
            raise ConfigurationError(
                f"a lease of {self.lease:g} s is too short for a renewal each {self.renewal:g} s: "
                "make the lease at least twice the renewal (four times is usual)"
            )

    @property
    def mode(self) -> LockMode:
        return "advisory" if self.advisory else "row"

    @property
    def trust(self) -> float:
        """How long a runner trusts its lease, from the moment it sent its last good renewal."""
        return self.lease - self.renewal - min(1.0, self.lease / 10)


@dataclass(frozen=True, slots=True)
class KeeperState:
    """alive: nobody has declared this runner dead, as far as was read. False is for ever.

    trusted_until: on the monotonic clock; later than that this runner starts nothing.
    topology: the last look at runners and shards; those declared dead since are marked in it.
    looked_at: when that look was sent, on the monotonic clock.
    db_offset: the database's clock − the monotonic clock, as of the last call.
    dead: runners whose shards are free to take. ready: the database answered the last call.
    reason: why it is not ready. failure: why this process has to end (its replica id is in use).
    """

    alive: bool
    trusted_until: float
    topology: Topology | None
    db_offset: float
    dead: frozenset[int]
    ready: bool
    looked_at: float = float("-inf")
    reason: str | None = None
    failure: PerdureError | None = None

    def trusted(self, now: float) -> bool:
        """Whether this runner may still start things, at a time of the monotonic clock."""
        return self.alive and now < self.trusted_until
