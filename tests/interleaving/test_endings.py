"""Finishes, cancels and holds."""

from __future__ import annotations

import pytest

from tests.interleaving.arena import Arena
from tests.interleaving.grounds import family, on_hold, pending, running
from tests.interleaving.scripts import (
    cancelling,
    child_finishing,
    claiming,
    finish,
    park,
    reading,
    releasing_hold,
    sending,
    writing,
)

PARENT_PARKS = writing("park", outcome=park())


@pytest.mark.req("CL4")
async def test_finish_child_and_finish_parent(arena: Arena) -> None:
    await arena.race(
        child_finishing(),
        writing("finish", outcome=finish()),
        prepare=family,
        outcomes={
            "c1: committed; finish: committed → succeeded",
        },
        overlapping={
            "c1: again, committed; finish: committed → succeeded",
            "c1: committed; finish: again, committed → succeeded",
        },
    )


@pytest.mark.req("CL4")
async def test_finish_child_and_park_parent(arena: Arena) -> None:
    await arena.race(
        child_finishing(),
        PARENT_PARKS,
        prepare=family,
        outcomes={
            "c1: committed; park: park-refused → running due",
            "c1: committed; park: parked → suspended due",
        },
        overlapping={
            "c1: again, committed; park: parked → suspended due",
        },
    )


@pytest.mark.req("CL4")
async def test_two_children_finish_while_the_parent_reads_and_parks(arena: Arena) -> None:
    parent = reading().then(PARENT_PARKS.as_mode("fused"))
    trio = [child_finishing("c1").as_mode("fused"), child_finishing("c2").as_mode("fused"), parent]
    await arena.race(
        *trio,
        prepare=family,
        outcomes={
            "c1: committed; c2: committed; park: park-refused → running due",
            "c1: committed; c2: committed; park: park-refused; read: child:c1 → running due",
            "c1: committed; c2: committed; park: park-refused; read: child:c2 → running due",
            "c1: committed; c2: committed; park: parked → suspended due",
            "c1: committed; c2: committed; park: parked; read: child:c1 child:c2 → suspended",
            "c1: committed; c2: committed; park: parked; read: child:c1 → suspended due",
            "c1: committed; c2: committed; park: parked; read: child:c2 child:c1 → suspended",
            "c1: committed; c2: committed; park: parked; read: child:c2 → suspended due",
        },
        overlapping={
            "c1: again, committed; c2: again, committed; park: parked → suspended due",
            "c1: again, committed; c2: committed; park: park-refused → running due",
            "c1: again, committed; c2: committed; park: parked → suspended due",
            "c1: again, committed; c2: committed; park: parked; read: child:c2 → suspended due",
            "c1: committed; c2: again, committed; park: park-refused → running due",
            "c1: committed; c2: again, committed; park: parked → suspended due",
            "c1: committed; c2: again, committed; park: parked; read: child:c1 → suspended due",
        },
    )


@pytest.mark.req("SL2")
async def test_finish_and_signal(arena: Arena) -> None:
    script = writing("finish", outcome=finish())
    await arena.race(
        script,
        sending(),
        prepare=running,
        waiters={"signal"},
        outcomes={
            "finish: committed; signal: delivered → succeeded",
            "finish: committed; signal: ended → succeeded",
        },
        overlapping={
            "finish: again, committed; signal: delivered → succeeded",
        },
    )


@pytest.mark.req("SL5")
async def test_cancel_and_finish(arena: Arena) -> None:
    script = writing("finish", outcome=finish())
    await arena.race(
        cancelling(),
        script,
        prepare=running,
        waiters={"cancel"},
        outcomes={
            "cancel message: delivered; cancel: no; finish: committed → succeeded",
            "cancel message: ended; cancel: no; finish: committed → succeeded",
        },
    )


@pytest.mark.req("SL5")
async def test_cancel_never_entered_and_claim(arena: Arena) -> None:
    await arena.race(
        cancelling(),
        claiming(),
        prepare=pending,
        waiters={"cancel"},
        outcomes={
            "cancel message: delivered; cancel: no; claim: after 0 → running due",
            "cancel: yes; claim: nothing → cancelled",
        },
    )


@pytest.mark.req("SL5")
async def test_cancel_never_entered_and_signal(arena: Arena) -> None:
    pair = [cancelling(), sending()]
    await arena.race(
        *pair,
        prepare=pending,
        waiters={"cancel", "signal"},
        outcomes={
            "cancel: yes; signal: delivered → cancelled",
            "cancel: yes; signal: ended → cancelled",
        },
    )


@pytest.mark.slow
@pytest.mark.req("SL5")
async def test_cancel_and_cancel(arena: Arena) -> None:
    pair = [cancelling("cancel"), cancelling("cancel too")]
    await arena.race(
        *pair,
        prepare=pending,
        waiters={"cancel", "cancel too"},
        outcomes={
            "cancel message: ended; cancel too: yes; cancel: no → cancelled",
            "cancel too message: ended; cancel too: no; cancel: yes → cancelled",
        },
    )


@pytest.mark.req("SL5", "SL7")
async def test_release_hold_and_cancel(arena: Arena) -> None:
    pair = [releasing_hold(), cancelling()]
    await arena.race(
        *pair,
        prepare=on_hold,
        waiters={"resume", "cancel"},
        outcomes={
            "cancel message: delivered; cancel: no; resume: yes → suspended due",
            "cancel: yes; resume: no → cancelled",
        },
    )


@pytest.mark.req("SL7")
async def test_release_hold_and_signal(arena: Arena) -> None:
    pair = [releasing_hold(), sending()]
    await arena.race(
        *pair,
        prepare=on_hold,
        waiters={"resume", "signal"},
        outcomes={
            "resume: yes; signal: delivered → suspended due",
        },
    )


@pytest.mark.req("SL7")
async def test_release_hold_twice(arena: Arena) -> None:
    pair = [releasing_hold("one"), releasing_hold("two")]
    await arena.race(
        *pair,
        prepare=on_hold,
        waiters={"one", "two"},
        outcomes={
            "one: no; two: yes → suspended due",
            "one: yes; two: no → suspended due",
        },
    )


@pytest.mark.req("SL7")
async def test_release_hold_and_claim(arena: Arena) -> None:
    pair = [releasing_hold(), claiming()]
    await arena.race(
        *pair,
        prepare=on_hold,
        waiters={"resume"},
        outcomes={
            "claim: after 0; resume: yes → running",
            "claim: nothing; resume: yes → suspended due",
        },
    )
