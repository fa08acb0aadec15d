"""Which names and ids are allowed, and how run ids come about."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.runtime.authoring.errors import InvalidName
from perdure.runtime.authoring.names import (
    check_message_id,
    check_run_id,
    check_signal_name,
    check_step_name,
    check_workflow_name,
    keyed_run_id,
    new_run_id,
)
from perdure.storage.clock import SeededRandomness
from perdure.storage.errors import InputError

ALL = (
    check_step_name,
    check_signal_name,
    check_workflow_name,
    check_run_id,
    check_message_id,
)


class FixedClock:
    def now(self) -> float:
        return 1_700_000_000.123456

    def monotonic(self) -> float:
        return 0.0


@pytest.mark.req("WF7")
@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is empty"),
        (" charge", "begins or ends with a blank"),
        ("charge\n", "begins or ends with a blank"),
        ("char\x00ge", "NUL character at position 4"),
        ("char\udc80ge", r"lone surrogate \(U\+DC80\) at position 4"),
        (b"charge", "bytes, not str"),
        (None, "NoneType, not str"),
        (7, "int, not str"),
    ],
)
def test_no_kind_of_name_takes_what_an_engine_might_change(check, name, words):
    with pytest.raises(InvalidName, match=words):
        check(name)


@pytest.mark.req("WF7")
@pytest.mark.parametrize("check", [check_step_name, check_signal_name])
@pytest.mark.parametrize("mark", list(">#/"))
def test_names_in_journal_keys_hold_no_mark_of_the_key(check, mark):
    with pytest.raises(InvalidName, match=re.escape(repr(mark))):
        check(f"charge{mark}2")


@pytest.mark.req("WF7")
def test_names_end_at_200_characters_and_ids_at_200_bytes():
    assert check_step_name("ä" * 200) == "ä" * 200
    with pytest.raises(InvalidName, match="201 characters; at most 200"):
        check_step_name("a" * 201)
    assert check_run_id("ä" * 100) == "ä" * 100
    with pytest.raises(InvalidName, match="202 bytes; at most 200"):
        check_run_id("ä" * 101)


def test_an_unprintable_character_in_a_name_is_refused_and_shown():
    with pytest.raises(InvalidName, match=r"unprintable character '\\x1b'"):
        check_workflow_name("orders\x1b[31m")
    assert check_workflow_name("orders/fulfil v2 – größer") == "orders/fulfil v2 – größer"


def test_a_refused_name_is_an_input_error_and_stays_printable():
    with pytest.raises(InputError) as caught:
        check_run_id("\udfff" * 500)
    str(caught.value).encode()
    assert len(str(caught.value)) < 300


@pytest.mark.req("WF2")
def test_a_keyed_run_id_is_the_same_for_ever():
    assert keyed_run_id("orders.fulfil", "order:17") == "b0d92608f4e9e1d01c4ebe3356f3d8b1"
    assert keyed_run_id("orders.fulfil", "order:17", "acme") == "dad638190e13c74166494bef6676ff00"


parts = st.text(alphabet="ab:\x1f", max_size=6)
triples = st.tuples(parts, parts, st.none() | parts)


@pytest.mark.req("WF2")
@given(triples, triples)
def test_keyed_run_ids_meet_only_where_all_parts_do(one, other):
    assert (keyed_run_id(*one) == keyed_run_id(*other)) == (one == other)


def test_new_run_ids_begin_with_their_time_and_differ():
    randomness = SeededRandomness(1)
    ids = {new_run_id(FixedClock(), randomness) for _ in range(2000)}
    assert len(ids) == 2000
    assert {run_id[:12] for run_id in ids} == {f"{1_700_000_000_123:012x}"}
    assert all(re.fullmatch("[0-9a-f]{32}", check_run_id(run_id)) for run_id in ids)
    # All 80 bits are in use.
    tails = [int(run_id[12:], 16) for run_id in ids]
    assert all(any(tail >> bit & 1 for tail in tails) for bit in range(80))
    assert all(any(not tail >> bit & 1 for tail in tails) for bit in range(80))
