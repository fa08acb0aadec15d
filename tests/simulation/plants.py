"""Mistakes that the simulation must find, each planted in the product while a seed runs.

Some conditions stand beside others that catch the same; taken away alone, nothing breaks here:

- *The revision catches what the claim would*, since every write raises it; but for a fail-over that lost commits, after
  which another history comes to the same revision. So `claim-id` is found beside that fault only.
- *Who holds the shard is asked beside its epoch*, in the transaction that claims, and runner ids are never used twice.
  The epoch alone stops a claim whose snapshot is older than the fence it meets, which one writer at a time never has:
  tests/interleaving/test_plants.py takes it away (`epoch of the newest fence`). An epoch goes down only if a claim
  brings the one that its runner remembers and looks at neither: that is `epoch-down`. What it brings is mostly one that
  the old copy of the database has not reached yet; that it is lower takes a shard that has moved meanwhile as well.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from perdure.runtime.body.body import Body
from perdure.runtime.body.steps import Steps
from perdure.runtime.engine.claiming import Claimer
from perdure.runtime.engine.committer import Committer
from perdure.sharding.patience import Patience
from perdure.storage.model import Park, Verdict
from perdure.storage.sqlite import commits
from perdure.storage.sqlite.statements import statements

from . import world
from .pods import factories


@dataclass(frozen=True, slots=True)
class Plant:
    """what: the mistake. finds: words of a violation, one of which it must be found by; that it breaks the simulation
    or something else does not count. changes: each replaces something until it is left. needs: what must have been
    counted in the world that finds it."""

    what: str
    finds: tuple[str, ...]
    changes: tuple[Callable[[], AbstractContextManager[None]], ...]
    needs: str | None = None

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change())
            yield


def statement(name: str, *pairs: tuple[str, str]) -> Callable[[], AbstractContextManager[None]]:
    """A statement of the store with parts of its text replaced."""

    @contextmanager
    def change() -> Iterator[None]:
        texts = cast(MutableMapping[str, str], statements())
        kept = texts[name]
        texts[name] = _replaced(kept, name, pairs)
        try:
            yield
        finally:
            texts[name] = kept

    return change


def function(
    owner: Any, name: str, *pairs: tuple[str, str]
) -> Callable[[], AbstractContextManager[None]]:
    """A function or method with parts of its source replaced."""

    def change() -> AbstractContextManager[None]:
        real = getattr(owner, name)
        source = _replaced(textwrap.dedent(inspect.getsource(real)), name, pairs)
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        exec(compile(source, f"<planted {name}>", "exec", flags), real.__globals__, made)
        return instead(owner, name, made[name])()

    return change


def instead(owner: Any, name: str, other: Any) -> Callable[[], AbstractContextManager[None]]:
    """Another function in its place."""

    @contextmanager
    def change() -> Iterator[None]:
        kept = inspect.getattr_static(owner, name)
        setattr(owner, name, other)
        try:
            yield
        finally:
            setattr(owner, name, kept)

    return change


def _replaced(text: str, where: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        if old not in text:
            raise LookupError(f"{where}: {old!r} is not there any more; plant the mistake anew")
        text = text.replace(old, new)
    return text


async def _guess(self: Any, batch_id: int, writes: Any) -> dict[str, Verdict]:
    return {
        write.run_id: Verdict.PARKED if isinstance(write.outcome, Park) else Verdict.COMMITTED
        for write in writes
    }


def _look_once(self: Any, shards: Any) -> None:
    looked = self.__dict__.setdefault("_planted_looked", set())
    fresh = [shard for shard in shards if shard not in looked]
    looked.update(fresh)
    self._orphaned.update(dict.fromkeys(fresh))
    self._wanted.set()


UNRECORDED = """    if wanted.by is None:
        self._last_seq -= 1
        self._apply(entry)
    else:
        self._record(entry, message.message_id)"""

PLANTS = {
    "claim-id": Plant(
        "a commit does not compare the claim",
        ("was not written by a fence write of that claim", ") under claim"),
        (statement("commit.fence", ("f.claim_id = b.claim_id and ", "")),),
        needs="commits lost",
    ),
    "shard": Plant(
        "a claim does not ask whether the shard is still the claimer's",
        ("its shard was held by",),
        (statement("claim.shards", (" and s.epoch = h.epoch and s.runner_id = :runner_id", "")),),
    ),
    "epoch-down": Plant(
        "a claim lowers the epoch: it brings the one its runner remembers",
        ("epoch went down", "its shard's was"),
        (
            statement(
                "claim.shards",
                (" and s.epoch = h.epoch and s.runner_id = :runner_id", ""),
                ("s.shard_id, s.epoch, s.slot_lo", "s.shard_id, h.epoch, s.slot_lo"),
            ),
            statement("claim.due", ("and f.epoch <= b.epoch", "")),
            statement("claim.orphans", ("f.epoch <= b.epoch and ", "")),
            statement("claim.fence", (" and f.epoch <= c.epoch", "")),
        ),
        needs="commits lost",
    ),
    "epoch-kept": Plant(
        "taking a shard does not raise its epoch",
        ("while the holder went from",),
        (statement("take_shards", ("epoch = s.epoch + 1", "epoch = s.epoch")),),
    ),
    "wake-seq": Plant(
        "a park does not compare the wake_seq",
        ("suspended without wake_at or hold, with unread messages",),
        (
            function(
                commits,
                "_outcomes",
                ("unseen = wake_seqs.get(run_id) != park.seen or run_id in told", "unseen = False"),
            ),
        ),
    ),
    "barrier": Plant(
        "a step starts before what led to it is durable",
        ("entries were durable and its body had seen",),
        (function(Steps, "release", ("if wait.barrier > self.durable:", "if False:")),),
    ),
    "guess": Plant(
        "an unknown outcome is taken for a commit",
        ("too many", "entries were durable"),
        (instead(Committer, "_settle", _guess),),
    ),
    "orphans-once": Plant(
        "orphans of a shard are looked for once only",
        ("is running (",),
        (
            instead(Claimer, "look_for_orphans", _look_once),
            function(Claimer, "_ask", ("orphans=True", "orphans=False")),
        ),
    ),
    "cancel": Plant(
        "a cancel is delivered and not recorded",
        ("hold nondeterminism",),
        (
            function(
                Body,
                "_take",
                (
                    "    self._record(entry, message.message_id)",
                    UNRECORDED,
                ),
            ),
        ),
    ),
    "batch": Plant(
        "one member that the database refuses fails its whole batch",
        ("ended failed with",),
        (
            function(
                Committer,
                "_isolate",
                ("if len(batch) > 1:", "if isinstance(error, ConflictError) and len(batch) > 1:"),
                (
                    "batch[0].done(error, batch_id)",
                    "[each.done(error, batch_id) for each in batch]",
                ),
            ),
        ),
    ),
    "lent": Plant(
        "a run that is lent is also claimed by the holder of its shard",
        ("and was lent to runner",),
        (
            # A claim of a stray leaves the workflow's name on its wake row: those and no others are robbed.
            statement("claim.wake", ("stray = null, stray_revision", "stray_revision")),
            statement(
                "claim.orphans",
                (
                    "(f.runner_id = :runner_id or",
                    "(f.runner_id = :runner_id or w.stray is not null or",
                ),
            ),
        ),
    ),
    "one-clock": Plant(
        "a lease has expired when the database's clock alone says so",
        ("for no reason",),
        (instead(Patience, "remaining", lambda self, row: 0.0),),
    ),
    "main-loop": Plant(
        "the lease is renewed by the main loop",
        ("for no reason",),
        (instead(world, "factories", lambda lane: factories(lane.owner.main)),),
    ),
    "revived": Plant(
        "a renewal revives a runner that was declared dead",
        ("though it was already dead",),
        (
            statement(
                "renew", ("set expires_at", "set dead = 0, expires_at"), (" and not dead", "")
            ),
        ),
    ),
    "dead-holder": Plant(
        "nobody takes the shards of the dead",
        ("of no living process",),
        (
            statement(
                "take_shards", ("s.runner_id in (select value from json_each(:dead))", "false")
            ),
        ),
    ),
}
