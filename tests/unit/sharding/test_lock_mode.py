"""Which lock mode a pod uses, and what it says when it cannot have the one it is asked for."""

from __future__ import annotations

import pytest

from perdure.sharding.lock_mode import choose
from perdure.storage.errors import ConfigurationError
from perdure.storage.model import LockFacts

pytestmark = pytest.mark.req("CL2")

DIRECT = LockFacts(session_locks=True)
ROTATED = LockFacts(session_locks=True, rotated="two statements ran in different sessions")
FILE = LockFacts(session_locks=False)
GALERA = LockFacts(session_locks=True, several_writers="Galera (wsrep_on)")
GROUP = LockFacts(session_locks=True, several_writers="a group with several primaries")
HINDERED = [
    (ROTATED, "a pooler rotates sessions (two statements ran"),
    (FILE, "no locks of sessions"),
    (GALERA, "Galera (wsrep_on): several servers take writes"),
    (GROUP, "a group with several primaries: several servers take writes"),
]


def test_a_new_cluster_on_a_server_reached_directly_is_advisory() -> None:
    found = choose("auto", None, DIRECT)
    assert (found.mode, found.why[:5]) == ("advisory", "auto:")


@pytest.mark.parametrize(("facts", "why"), HINDERED)
@pytest.mark.parametrize("agreed", [None, "row"])
def test_where_a_lock_tells_nothing_auto_is_row_and_says_why(
    facts: LockFacts, why: str, agreed: str | None
) -> None:
    found = choose("auto", agreed, facts)
    assert found.mode == "row"
    assert found.why.startswith("auto: ")
    assert why in found.why


@pytest.mark.parametrize(("facts", "why"), HINDERED)
@pytest.mark.parametrize("agreed", [None, "row", "advisory"])
def test_advisory_where_it_is_not_possible_is_refused_and_says_why(
    facts: LockFacts, why: str, agreed: str | None
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        choose("advisory", agreed, facts)
    assert why in str(refused.value)
    assert "PERDURE_SHARD_LOCK=row" in str(refused.value)
    assert ("session mode" in str(refused.value)) == (facts is ROTATED)


@pytest.mark.parametrize(("facts", "why"), HINDERED)
def test_auto_cannot_join_a_cluster_whose_mode_it_cannot_have(facts: LockFacts, why: str) -> None:
    with pytest.raises(
        ConfigurationError, match="advisory locks, which this pod cannot"
    ) as refused:
        choose("auto", "advisory", facts)
    assert why in str(refused.value)


def test_auto_does_what_the_cluster_does() -> None:
    assert choose("auto", "advisory", DIRECT).mode == "advisory"
    row = choose("auto", "row", DIRECT)
    assert row.mode == "row"
    assert "stop all pods" in row.why, "it says how to change it"


@pytest.mark.parametrize("agreed", [None, "row", "advisory"])
@pytest.mark.parametrize("mode", ["row", "advisory"])
def test_what_was_set_by_hand_is_what_is_asked_for(mode: str, agreed: str | None) -> None:
    found = choose(mode, agreed, DIRECT)
    assert (found.mode, found.why) == (mode, "set by shard_lock")
