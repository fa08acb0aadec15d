"""Placement: even, deterministic, and sparing with moves."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.sharding import placement
from perdure.sharding.placement import place
from perdure.storage.errors import ConfigurationError

pytestmark = pytest.mark.req("CL1")

RUNNERS = st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=12, unique=True)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], list[int], dict[int, int]]:
    """Shards, runners, and holders of any kind: known, gone, or none; even or not."""
    shards = list(range(draw(st.integers(1, 300))))
    runners = draw(RUNNERS)
    seed = draw(st.integers(0, 2**32))
    crowd = [*runners, 7, 8][: draw(st.integers(1, len(runners) + 2))]
    rnd = random.Random(seed)
    holders = {shard: rnd.choice(crowd) for shard in shards if rnd.random() < 0.8}
    return shards, runners, holders


def sizes(placed: dict[int, int], runners: list[int]) -> list[int]:
    counts = Counter(placed.values())
    return [counts[runner] for runner in runners]


def moves(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(before[shard] != after[shard] for shard in before)


@given(clusters())
def test_every_shard_has_a_runner_and_sizes_differ_by_one_at_most(cluster):
    shards, runners, holders = cluster
    placed = place(shards, runners, holders)
    assert sorted(placed) == shards
    assert set(placed.values()) <= set(runners)
    assert max(sizes(placed, runners)) - min(sizes(placed, runners)) <= 1


@given(clusters(), st.randoms(use_true_random=False))
def test_the_order_of_the_inputs_means_nothing(cluster, rnd):
    shards, runners, holders = cluster
    items = list(holders.items())
    shuffled = [list(shards), list(runners), items]
    for part in shuffled:
        rnd.shuffle(part)
    again = place(shuffled[0] + shards[:3], shuffled[1] + runners[:1], dict(items))
    assert again == place(shards, runners, holders)


@given(clusters())
def test_what_is_placed_stays_where_it_is(cluster):
    shards, runners, holders = cluster
    placed = place(shards, runners, holders)
    assert place(shards, runners, placed) == placed


@given(clusters())
def test_nothing_moves_that_need_not(cluster):
    """The least number of moves that leads to sizes which differ by one at most."""
    shards, runners, holders = cluster
    held = Counter(runner for runner in holders.values() if runner in runners)
    least, odd = divmod(len(shards), len(runners))
    by_load = sorted((held[runner] for runner in runners), reverse=True)
    kept = sum(min(size, least + (rank < odd)) for rank, size in enumerate(by_load))
    placed = place(shards, runners, holders)
    assert sum(placed[shard] == holders.get(shard) for shard in shards) == kept


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 10, 16, 31, 50])
def test_a_runner_that_comes_or_goes_moves_at_most_its_share(count: int):
    rnd = random.Random(count)
    shards = list(range(256))
    runners = [rnd.getrandbits(63) for _ in range(count)]
    placed = place(shards, runners)
    for _ in range(5):  # the cluster has a history, not only a first placement
        newcomer = rnd.getrandbits(63)
        grown = place(shards, [*runners, newcomer], placed)
        ideal = len(shards) / (count + 1)
        assert moves(placed, grown) <= 1.3 * ideal
        assert all(grown[shard] == newcomer for shard in shards if grown[shard] != placed[shard])
        leaver = rnd.choice(runners)
        runners = [runner for runner in [*runners, newcomer] if runner != leaver]
        placed = place(shards, runners, grown)
        assert moves(grown, placed) <= 1.3 * ideal
        assert all(grown[shard] == leaver for shard in shards if grown[shard] != placed[shard])


@given(RUNNERS)
def test_shards_of_one_runner_spread_over_the_others_when_it_goes(runners):
    shards = list(range(256))
    placed = place(shards, runners)
    if len(runners) > 2:
        after = place(shards, runners[1:], placed)
        heirs = {after[shard] for shard in shards if placed[shard] == runners[0]}
        assert len(heirs) == min(len(runners) - 1, 256 // len(runners))


def test_placements_of_different_clusters_are_not_alike():
    """Scores depend on both shard and runner: no runner gets the same shards whoever is beside it."""
    mine = {
        frozenset(shard for shard, runner in place(range(64), [1, other]).items() if runner == 1)
        for other in range(2, 22)
    }
    assert len(mine) > 15


def test_without_runners_nothing_is_placed():
    assert place(range(4), [], {0: 1}) == {}


def test_an_unknown_version_is_refused():
    with pytest.raises(ConfigurationError, match="placement version 99"):
        place(range(4), [1], version=99)


def test_placing_scores_each_pair_once_at_most(monkeypatch):
    """What placing costs is the scores: one for each shard with each runner, and one for each runner's size."""
    scored = []
    score = placement._score

    def counted(*pair):
        scored.append(pair)
        return score(*pair)

    monkeypatch.setattr(placement, "_score", counted)
    runners = [random.Random(5).getrandbits(63) + number for number in range(50)]
    place(range(256), runners)
    assert len(scored) <= 256 * 50 + 50
