"""A run whose end the database refuses, also as a failure: it is put on hold, where people see it (R8)."""

from __future__ import annotations

import sqlite3

import pytest

from perdure import Context, step, workflow
from perdure.storage.model import RunStatus
from tests.integration.in_process import client_on, execute, runner_on, until_status

pytestmark = pytest.mark.req("WF1")

executed: list[int] = []

REFUSALS = {
    "the end": ["perdure_runs"],
    "the end and what is said of it": ["perdure_runs", "perdure_run_events"],
}


@step
async def same(number: int) -> int:
    executed.append(number)
    return number


@workflow(name="ends")
async def ends(ctx: Context, number: int) -> int:
    return await ctx.step(same, number)


class Refusing:
    """A database whose tables take no change of the run named `kept`, as somebody's own triggers might have it."""

    POSTGRES = """
        create function refuse() returns trigger language plpgsql as
        $$ begin raise exception 'not this one' using errcode = '23514'; end $$"""

    def __init__(self, url: str, tables: list[str]) -> None:
        self.url = url
        self.server = url.startswith("postgres")
        self.tables = tables

    async def _change(self, statement: str) -> None:
        if self.server:
            await execute(self.url, statement)
            return
        file = sqlite3.connect(self.url.removeprefix("sqlite:///"))
        with file:
            file.execute(statement)
        file.close()

    async def begin(self) -> None:
        if self.server:
            await self._change(self.POSTGRES)
        for table in self.tables:
            what = "insert" if table == "perdure_run_events" else "update"
            head = f"create trigger refuse_{table} before {what} on {table} for each row when (new.run_id = 'kept')"
            then = (
                "execute function refuse()"
                if self.server
                else "begin select raise(abort, 'not this one'); end"
            )
            await self._change(f"{head} {then}")

    async def end(self) -> None:
        for table in self.tables:
            on = f" on {table}" if self.server else ""
            await self._change(f"drop trigger refuse_{table}{on}")


@pytest.mark.parametrize("tables", REFUSALS.values(), ids=REFUSALS)
async def test_a_run_that_cannot_even_fail_is_put_on_hold(
    migrated_url: str, tables: list[str]
) -> None:
    executed.clear()
    refusing = Refusing(migrated_url, tables)
    await refusing.begin()
    async with runner_on(migrated_url, [ends]), client_on(migrated_url, [ends]) as client:
        kept = await client.start(ends, 1, run_id="kept")
        other = await client.start(ends, 2, run_id="other")
        assert await other.wait(20) == 2
        await until_status(client, "kept", RunStatus.SUSPENDED)
        assert executed.count(1) == 1
        why = await client.why("kept")
        assert "on hold (failure)" in why.summary
        said = [e.detail for e in await client.events("kept") if e.type == "run-unstorable"]
        if len(tables) == 1:
            assert "not this one" in str(said)
        else:
            assert said == []
        await refusing.end()
        await client.resume("kept")
        assert await kept.wait(20) == 1
