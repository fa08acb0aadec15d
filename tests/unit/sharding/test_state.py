"""Figures of the lease protocol."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.sharding.lease import backoff, dead_runners
from perdure.sharding.patience import PERIODS
from perdure.sharding.state import KeeperState, LeaseConfig
from perdure.storage.errors import ConfigurationError

from .rows import runner, topology

pytestmark = pytest.mark.req("CL3")


def test_trust_ends_well_before_the_lease():
    assert LeaseConfig().trust == 10.0 - 2.5 - 1.0
    assert LeaseConfig(lease=2.0, renewal=0.5).trust == pytest.approx(2.0 - 0.5 - 0.2)


@given(lease=st.floats(0.5, 60.0), share=st.floats(0.05, 0.5))
def test_a_trusted_lease_outlasts_one_missed_renewal_of_four(lease: float, share: float):
    config = LeaseConfig(lease=lease, renewal=lease * share)
    assert config.renewal * 0.7 < config.trust < config.lease


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"lease": 0.0}, "lease must be a positive"),
        ({"renewal": -1.0}, "renewal must be a positive"),
        ({"look": float("nan")}, "look must be a positive"),
        ({"lease": 4.0, "renewal": 2.5}, "too short for a renewal each 2.5 s"),
    ],
)
def test_figures_that_cannot_work_are_refused(figures: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        LeaseConfig(**figures)


def test_trust_is_lost_with_time_or_at_once():
    state = KeeperState(True, 10.0, None, 0.0, frozenset(), True)
    assert state.trusted(9.9)
    assert not state.trusted(10.0)
    assert not KeeperState(False, 10.0, None, 0.0, frozenset(), True).trusted(9.9)


@given(failures=st.integers(1, 10_000), renewal=st.floats(0.1, 10), fraction=st.floats(0, 0.999))
def test_all_are_back_before_the_most_patient_could_take_them_for_silent(
    failures: int, renewal: float, fraction: float
):
    assert 0 < backoff(failures, renewal, fraction) < PERIODS * renewal / 2


def test_runners_that_can_never_write_again():
    rows = [runner(1), runner(2, dead=True), runner(3)]
    owners = {0: (1, 1), 1: (2, 1), 2: (4, 1), 3: (None, 0)}
    assert dead_runners(topology(rows, owners)) == {2, 4}
