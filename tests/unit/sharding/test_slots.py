"""Slots and shards."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.sharding.slots import shard_of, shard_ranges, slot_of
from perdure.storage.errors import ConfigurationError
from perdure.storage.model import SLOTS

pytestmark = pytest.mark.req("CL1")


@pytest.mark.parametrize(
    ("run_id", "slot"),
    # The first is the published XXH3_64 of no bytes, 2D06800538D394C2, modulo 65,536. Stored runs depend on these.
    [("", 0x94C2), ("order:1", 64_538), ("Größe", 47_345)],
)
def test_the_slot_of_an_id_never_changes(run_id: str, slot: int):
    assert slot_of(run_id) == slot


@given(count=st.integers(1, SLOTS), slot=st.integers(0, SLOTS - 1))
def test_each_slot_is_in_the_shard_that_is_computed_for_it(count: int, slot: int):
    low, high = shard_ranges(count)[shard_of(slot, count)]
    assert low <= slot <= high


@given(count=st.integers(1, SLOTS))
def test_the_ranges_cover_every_slot_once_and_are_even(count: int):
    ranges = shard_ranges(count)
    assert len(ranges) == count
    assert ranges[0][0] == 0
    assert ranges[-1][1] == SLOTS - 1
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))
    sizes = {high - low + 1 for low, high in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, -1, SLOTS + 1])
def test_another_number_of_shards_is_refused(count: int):
    with pytest.raises(ConfigurationError, match=f"not {count}.*PERDURE_SHARDS"):
        shard_ranges(count)
