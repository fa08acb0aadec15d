"""Patience: who may be declared dead, as one observer sees it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.sharding.patience import Patience

from .rows import runner, topology

pytestmark = pytest.mark.req("CL3")

LEASE, RENEWAL, LOOK = 10.0, 2.5, 0.5


def patience() -> Patience:
    return Patience(renewal=RENEWAL, look=LOOK)


def looks(observer: Patience, row, start: float, seconds: float) -> None:
    """Look each half second, from start to start + seconds, both included."""
    for step in range(round(seconds / LOOK) + 1):
        now = start + step * LOOK
        observer.observe([row], sent=now, answered=now)


def expired(observer: Patience, row, db_now: float) -> bool:
    return bool(observer.expired(topology([row], db_now=db_now)))


def test_a_fresh_observer_waits_one_and_a_half_renewals():
    observer, row = patience(), runner(1, expires_at=0.0)
    looks(observer, row, 100.0, 3.5)
    assert not expired(observer, row, 1000.0)
    looks(observer, row, 104.0, 0.0)
    assert expired(observer, row, 1000.0)


def test_the_lease_must_have_run_out_by_the_clock_of_the_database():
    observer, row = patience(), runner(1, expires_at=50.0)
    looks(observer, row, 0.0, 60.0)
    assert not expired(observer, row, 50.0)
    assert expired(observer, row, 50.001)


def test_a_renewal_begins_the_wait_anew():
    observer, row = patience(), runner(1, expires_at=0.0)
    looks(observer, row, 0.0, 3.5)
    row = replace(row, renew_count=1)
    looks(observer, row, 4.0, 3.5)
    assert not expired(observer, row, 1000.0)
    looks(observer, row, 8.0, 0.0)
    assert expired(observer, row, 1000.0)


def test_a_jump_of_the_clock_robs_nobody_who_renews():
    """The database is 30 s ahead all at once: each lease looks expired at each look, but renewals go on."""
    observer = patience()
    for step in range(200):
        now = step * LOOK
        row = runner(1, expires_at=now + LEASE, renew_count=int(now / RENEWAL))
        observer.observe([row], sent=now, answered=now)
        assert not expired(observer, row, now + 30.0)


def test_silence_while_the_database_was_away_does_not_count():
    observer, row = patience(), runner(1, expires_at=0.0)
    looks(observer, row, 0.0, 3.5)
    observer.restart()
    looks(observer, row, 60.0, 3.5)
    assert not expired(observer, row, 1000.0)
    looks(observer, row, 64.0, 0.0)
    assert expired(observer, row, 1000.0)


def test_silence_while_this_machine_slept_does_not_count():
    observer, row = patience(), runner(1, expires_at=0.0)
    looks(observer, row, 0.0, 1.0)
    looks(observer, row, 3600.0, 0.0)
    assert not expired(observer, row, 10_000.0)


def test_slow_answers_make_more_patient():
    observer, row = patience(), runner(1, expires_at=0.0)
    for now in (0.0, 1.0, 2.0, 3.0):
        observer.observe([row], sent=now, answered=now + 0.9)
    assert observer.remaining(row) == pytest.approx(1.5 * RENEWAL - 3 * 0.1)


def test_the_dead_are_not_declared_dead_again():
    observer, row = patience(), runner(1, expires_at=0.0, dead=True)
    looks(observer, row, 0.0, 60.0)
    assert not expired(observer, row, 1000.0)


def test_the_next_judgement_is_when_lease_and_patience_are_both_over():
    observer, silent, me = patience(), runner(1, expires_at=103.0), runner(2, expires_at=101.0)
    observer.observe([silent, me], sent=0.0, answered=0.0)
    assert observer.next_judgement(topology([silent, me], db_now=100.0), me=2) == 3.75
    observer.observe([silent, me], sent=1.0, answered=1.0)
    observer.observe([silent, me], sent=2.0, answered=2.0)
    assert observer.next_judgement(topology([silent, me], db_now=100.0), me=2) == 3.0
    assert observer.next_judgement(topology([me], db_now=100.0), me=2) is None


def test_only_a_runner_that_renews_after_a_whole_lease_is_a_live_namesake():
    observer, row = patience(), runner(1)
    observer.observe([row], sent=0.0, answered=0.0)
    row = replace(
        row, renew_count=1
    )  # the last renewal of a predecessor, committed while it was killed
    observer.observe([row], sent=0.5, answered=0.5)
    looks(observer, row, 1.0, 60.0)
    assert not observer.renewing_after(row, LEASE)
    row = replace(row, renew_count=2)
    observer.observe([row], sent=62.0, answered=62.0)
    assert observer.renewing_after(row, LEASE)


@given(
    reads=st.lists(
        st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 2.0), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_nobody_who_renewed_within_one_and_a_half_renewals_is_given_up(reads):
    """Whatever the reads' timing, giving up takes 1.5 renewals between the first read that showed the count and now."""
    observer, now, count, shown_at = patience(), 0.0, 0, None
    for pause, took, renewed in reads:
        sent = now + pause
        now = sent + took
        if renewed or shown_at is None:
            count, shown_at = count + 1, now
        row = runner(1, expires_at=-1.0, renew_count=count)
        observer.observe([row], sent=sent, answered=now)
        if expired(observer, row, 0.0):
            assert sent - shown_at >= 1.5 * RENEWAL - 1e-9
