"""After a write of unknown outcome: what became of it (R9).

A new connection reads the fences with a lock, skipping locked ones. A batch found committed is committed. "Not written"
is certain only when our old session is gone, since its statement may still be on its way: so that session is ended, by
pid and start, before such a verdict. What other sessions keep locked can then be read without a lock: it is not our
batch that has it. Only where that session is not known any more are locked rows waited for, one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from perdure.storage.errors import ConflictError, DatabaseUnavailable
from perdure.storage.model import RunWrite, Verdict
from perdure.storage.postgres import queries
from perdure.storage.postgres.columns import fence_of
from perdure.storage.postgres.session import Backend, Session
from perdure.storage.verdicts import judge

GHOST_POLL = 0.02


class Settlement:
    """Settles one batch on a session of its own. Every wait is bounded; what remains open is `DatabaseUnavailable`."""

    def __init__(self, session: Session, ghost: Backend | None, *, deadline: float) -> None:
        self._session = session
        self._ghost = ghost
        self._deadline = deadline
        self._ends = asyncio.get_running_loop().time() + 3 * deadline

    async def verdicts(self, batch_id: int, writes: Sequence[RunWrite]) -> dict[str, Verdict]:
        """A verdict for every write. Raises `DatabaseUnavailable`: call again."""
        found, locked = await self._read(batch_id, writes)
        unsure = {run_id for run_id, verdict in found.items() if verdict is Verdict.AGAIN}
        unsure |= locked.keys()
        if not unsure:
            return found
        await self._end_ghost()
        again = [write for write in writes if write.run_id in unsure]
        second, locked = await self._read(batch_id, again)
        found |= second
        for write in again:
            if write.run_id not in locked:
                continue
            if self._ghost is None:
                found[write.run_id] = await self._read_one(batch_id, write)
            else:
                found[write.run_id] = judge(write, batch_id, fence_of(locked[write.run_id]), None)
        return found

    async def _read(
        self, batch_id: int, writes: Sequence[RunWrite]
    ) -> tuple[dict[str, Verdict], dict[str, queries.Row]]:
        """Verdicts by a locking read; the runs whose fence somebody has locked, as a plain read finds them."""
        ids = [write.run_id for write in writes]
        rows = await self._fetch(queries.SETTLE, ids)
        fences = {row["run_id"]: fence_of(row) for row in rows}
        found, rest = {}, []
        for write in writes:
            if write.run_id in fences:
                found[write.run_id] = judge(write, batch_id, fences[write.run_id], None)
            else:
                rest.append(write)
        locked = {}
        states = {row["run_id"]: row for row in await self._rest(rest)}
        for write in rest:
            state = states.get(write.run_id)
            if state is not None and state["fenced"]:
                locked[write.run_id] = state
            else:
                found[write.run_id] = judge(write, batch_id, None, _ended_by(state))
        return found, locked

    async def _rest(self, writes: Sequence[RunWrite]) -> list[queries.Row]:
        if not writes:
            return []
        return await self._fetch(queries.SETTLE_REST, [write.run_id for write in writes])

    async def _read_one(self, batch_id: int, write: RunWrite) -> Verdict:
        if asyncio.get_running_loop().time() > self._ends:
            raise DatabaseUnavailable(
                "settle: runs of the batch are still locked by other sessions; ask again"
            )
        try:
            rows = await self._fetch(queries.SETTLE_ONE, write.run_id)
        except ConflictError as error:
            raise DatabaseUnavailable(
                f"settle: run {write.run_id!r} is locked by another session; ask again ({error})"
            ) from error
        if rows:
            return judge(write, batch_id, fence_of(rows[0]), None)
        states = await self._rest([write])
        return judge(write, batch_id, None, _ended_by(states[0] if states else None))

    async def _end_ghost(self) -> None:
        """Return when the session whose connection was cut is gone."""
        if self._ghost is not None:
            await end_session(self._session, self._ghost, deadline=self._deadline, ends=self._ends)

    async def _fetch(self, sql: str, *args: object) -> list[queries.Row]:
        return await self._session.fetch(sql, *args, writes=False, deadline=self._deadline)


async def end_session(session: Session, ghost: Backend, *, deadline: float, ends: float) -> None:
    """Return when an old session of ours, whose connection was cut, is gone. Raises `DatabaseUnavailable`: ask again.

    deadline: of one question, seconds. ends: when to give up, on the loop's clock."""
    key = (ghost.pid, ghost.started, ghost.mark)
    await session.fetch(queries.END_GHOST, *key, writes=False, deadline=deadline)
    while await session.fetch(queries.FIND_GHOST, *key, writes=False, deadline=deadline):
        if asyncio.get_running_loop().time() > ends:
            raise DatabaseUnavailable(
                f"settle: our old session ({ghost.mark or ghost.pid}) does not end; ask again"
            )
        await asyncio.sleep(GHOST_POLL)


def _ended_by(state: queries.Row | None) -> int | None:
    return None if state is None else state["run_batch"]
