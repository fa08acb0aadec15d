"""What a claimed run needs before its body goes on: its journal, page by page, and its mailbox.

A page is small enough to be made into entries without keeping the loop from anything else. Whose journal goes on after
a page has to wait for the others' next one, so that a long journal delays neither them nor the rest of the runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from perdure.runtime.engine.activation import Activation
from perdure.runtime.engine.pacing import Backoff, Portion
from perdure.storage.clock import Randomness
from perdure.storage.errors import PerdureError
from perdure.storage.interface import RunStore
from perdure.storage.model import Entry, Mailbox

log = structlog.get_logger("perdure.load")

Enter = Callable[[Activation, Sequence[Entry], Mailbox | None], None]


class Loader:
    """Reads until the database answers: the claims are ours.

    enter: gets each activation with all of its journal and, unless the claim proved it empty, its mailbox.
    unreadable: gets a run whose rows this code cannot read, alone, with the error (R8, R16).
    """

    def __init__(
        self,
        store: RunStore,
        randomness: Randomness,
        *,
        enter: Enter,
        unreadable: Callable[[Activation, Exception], None],
    ) -> None:
        self._store = store
        self._randomness = randomness
        self._enter = enter
        self._unreadable = unreadable

    async def load(self, activations: Sequence[Activation]) -> None:
        """Enter them all, whose journal is complete first. Whose body is in memory needs its mail only."""
        waiting = list(activations)
        journals: dict[str, list[Entry]] = {a.run.run_id: [] for a in waiting}
        mailboxes: dict[str, Mailbox] = {}
        backoff, portion = Backoff(self._randomness), Portion(len(waiting))
        while waiting := [a for a in waiting if not a.gone]:
            part, waiting = waiting[: portion.size], waiting[portion.size :]
            try:
                more = await self._read(part, journals, mailboxes)
            except PerdureError as error:  # also that a table, or the right to it, is not there now
                log.warning("load.unavailable", runs=len(part), error=str(error))
                waiting += part
                portion.failed()
                await backoff.wait()
            except Exception as error:
                await self._load_apart(part, error)
            else:
                portion.worked()
                backoff = Backoff(self._randomness)
                for activation in part:
                    if activation.run.run_id in more:
                        waiting.append(activation)
                    elif not activation.gone:
                        run_id = activation.run.run_id
                        self._enter(activation, journals.pop(run_id), mailboxes.pop(run_id, None))

    async def _read(
        self,
        part: Sequence[Activation],
        journals: dict[str, list[Entry]],
        mailboxes: dict[str, Mailbox],
    ) -> frozenset[str]:
        """The next page, and the mailboxes not read yet. Returns the runs whose journal goes on."""
        recorded = [a.run.run_id for a in part if a.body is None and a.run.next_seq > 1]
        after = {run_id: read[-1].seq if (read := journals[run_id]) else 0 for run_id in recorded}
        page, mail = await asyncio.gather(
            self._store.read_journal_page(after),
            self._mail([a for a in part if a.run.run_id not in mailboxes]),
        )
        mailboxes.update(mail)
        for run_id, entries in page.entries.items():
            journals[run_id] += entries
        return page.more

    async def _mail(self, activations: Sequence[Activation]) -> dict[str, Mailbox]:
        """wake_seq 0 proves an empty mailbox, which is not read."""
        run_ids = [a.run.run_id for a in activations if a.run.wake_seq > 0]
        return dict(await self._store.read_mailboxes(run_ids)) if run_ids else {}

    async def _load_apart(self, activations: Sequence[Activation], error: Exception) -> None:
        """One of these has rows that this code cannot read: halve until it is alone."""
        if len(activations) > 1:
            middle = len(activations) // 2
            await self.load(activations[:middle])
            await self.load(activations[middle:])
        elif not activations[0].gone:
            self._unreadable(activations[0], error)
