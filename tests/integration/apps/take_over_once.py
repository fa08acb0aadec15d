"""A pod with a mistake in it: it looks for runs of dead runners only once, after its start.

python -m tests.integration.apps.take_over_once serve APP …
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from perdure.runtime.cli import main
from perdure.storage.model import ClaimRequest, Claims
from perdure.storage.postgres.runs import PostgresRunStore

Claim = Callable[[PostgresRunStore, ClaimRequest], Coroutine[Any, Any, Claims]]


def take_over_once(claim_runs: Claim) -> Claim:
    """The same without the orphans, but for the first time that somebody asks for them."""
    asked: list[ClaimRequest] = []

    async def once(store: PostgresRunStore, request: ClaimRequest) -> Claims:
        if request.orphans:
            asked.append(request)
        return await claim_runs(
            store, replace(request, orphans=request.orphans and len(asked) == 1)
        )

    return once


if __name__ == "__main__":
    PostgresRunStore.claim_runs = take_over_once(PostgresRunStore.claim_runs)  # type: ignore[assignment, method-assign]
    main()
