"""What a runner does about its shards, alone and among others with other snapshots."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.sharding.judgement import MOST_SETTLING, SETTLING, Judgement, judge
from perdure.storage.model import ShardHold, Topology

from .rows import runner, topology

pytestmark = pytest.mark.req("CL1")

ME, PEER = 1, 2


def judged(
    rows: Topology, *, dead=(), holds=None, leaving=None, fresh=True, draining=False
) -> Judgement:
    return judge(
        ME,
        rows,
        dead,
        holds=holds or {},
        leaving=leaving or {},
        fresh=fresh,
        draining=draining,
    )


def test_a_runner_alone_takes_everything():
    assert judged(topology([runner(ME)], {0: (None, 0), 1: (None, 5)})).take == (0, 1)


def test_shards_of_the_dead_are_taken_at_once_and_those_of_the_living_are_not():
    rows = [runner(ME), runner(PEER), runner(3, dead=True)]
    owners = {0: (3, 1), 1: (4, 1), 2: (PEER, 1), 3: (PEER, 1)}
    assert judged(topology(rows, owners)).take == (0, 1)
    assert set(judged(topology(rows, owners), dead={PEER}).take) == {0, 1, 2, 3}


def test_what_is_too_much_is_vacated_once():
    rows = topology([runner(ME), runner(PEER)], dict.fromkeys(range(4), (ME, 1)))
    holds = {shard: ShardHold(shard, 1) for shard in range(4)}
    going = judged(rows, holds=holds).vacate
    assert len(going) == 2
    kept = {shard: hold for shard, hold in holds.items() if shard not in going}
    left = {shard: holds[shard] for shard in going}
    assert judged(rows, holds=kept, leaving=left) == Judgement()


@pytest.mark.req("OP2")
def test_a_share_is_given_up_once_those_who_start_together_have_joined():
    """One after the other they would cost 1/2 + 1/3 + 1/4 of the shards, together it is 3/4 of them."""
    holds = {shard: ShardHold(shard, 1) for shard in range(12)}
    owners = dict.fromkeys(holds, (ME, 1))
    joined = [runner(PEER, started_at=10.0), runner(3, started_at=10.5)]

    def vacated(rows, at: float, **other) -> int:
        rows = topology([runner(ME), *rows], owners, db_now=at)
        return len(judged(rows, holds=holds, **other).vacate)

    assert vacated(joined[:1], 10.5) == 0
    assert vacated(joined, 10.5 + SETTLING - 0.01) == 0
    assert vacated(joined, 10.5 + SETTLING) == 8
    assert (
        vacated(joined, 9.9) == 8
    )  # the database's clock was set back: nobody waits for it to catch up
    assert vacated(joined, 10.6, draining=True) == 12
    crowd = [*joined, *(runner(n, started_at=10.0 + n / 4) for n in range(4, 40))]
    assert vacated(crowd, 10.0 + MOST_SETTLING - 0.01) == 0
    assert vacated(crowd, 10.0 + MOST_SETTLING) == 11


@pytest.mark.req("OP2")
def test_who_joins_takes_what_is_free_at_once_and_what_is_lost_is_given_up_at_once():
    holds = {0: ShardHold(0, 1), 1: ShardHold(1, 1)}
    owners = {0: (ME, 1), 1: (None, 1), 2: (None, 1)}
    rows = topology([runner(ME), runner(PEER, started_at=9.9)], owners, db_now=10.0)
    assert judged(rows, holds=holds).vacate == (1,)
    newcomer = topology([runner(ME, started_at=9.9), runner(PEER)], owners, db_now=10.0)
    assert len(judged(newcomer).take) >= 1


def test_a_draining_peer_gets_nothing_and_its_shards_wait_until_it_lets_go():
    rows = [runner(ME), runner(PEER, draining=True)]
    assert judged(topology(rows, {0: (PEER, 1), 1: (None, 0)})).take == (1,)


def test_draining_i_take_nothing_and_vacate_everything():
    rows = topology([runner(ME), runner(PEER)], {0: (ME, 1), 1: (None, 0), 2: (ME, 3)})
    verdict = judged(rows, holds={0: ShardHold(0, 1)}, draining=True)
    assert verdict == Judgement(vacate=(0,), release=(ShardHold(2, 3),))


def test_a_row_that_names_me_is_adopted_when_the_look_is_newer_than_my_last_statement():
    rows = topology([runner(ME)], {0: (ME, 7)})
    assert judged(rows).adopt == (ShardHold(0, 7),)
    assert judged(rows, fresh=False) == Judgement()


def test_a_hold_that_its_row_contradicts_is_given_up():
    """As after a fail-over to a copy of the database that had not seen my take."""
    holds = {0: ShardHold(0, 5), 1: ShardHold(1, 5)}
    rows = topology([runner(ME)], {0: (None, 4), 1: (ME, 5)})
    assert judged(rows, holds=holds).vacate == (0,)
    assert judged(rows, holds=holds, fresh=False) == Judgement()


def test_who_is_not_in_the_snapshot_does_nothing():
    holds = {0: ShardHold(0, 1)}
    assert judged(topology([runner(PEER)], {0: (ME, 1)}), holds=holds) == Judgement()
    assert judged(topology([runner(ME, dead=True)], {0: (None, 1)})) == Judgement()


class Cluster:
    """Shard rows, and runners that judge from snapshots as old as they happen to be."""

    def __init__(self, shards: int) -> None:
        self.owners: dict[int, tuple[int | None, int]] = dict.fromkeys(range(shards), (None, 0))
        self.alive: dict[int, dict[int, ShardHold]] = {}
        self.snapshots: dict[int, tuple[Topology, bool]] = {}
        self.moves = 0

    def look(self, me: int) -> None:
        rows = [runner(number) for number in self.alive]
        self.snapshots[me] = (topology(rows, dict(self.owners)), True)

    def act(self, me: int) -> bool:
        """Carry out one judgement; whether anything changed."""
        rows, fresh = self.snapshots[me]
        holds = self.alive[me]
        verdict = judge(me, rows, (), holds=holds, leaving={}, fresh=fresh, draining=False)
        assert not verdict.adopt
        assert not verdict.release
        known = {row.runner_id for row in rows.runners}
        changed = False
        for shard in verdict.vacate:
            self.owners[shard] = (None, holds.pop(shard).epoch)
            changed = True
        for shard in verdict.take:
            owner, epoch = self.owners[shard]
            if owner is None or (owner not in known and owner not in self.alive):
                self.owners[shard] = (me, epoch + 1)
                holds[shard] = ShardHold(shard, epoch + 1)
                changed = True
                self.moves += 1
        self.snapshots[me] = (rows, False)
        return changed

    def settle(self, rnd: random.Random) -> int:
        """Everybody looks and acts in turn until nothing changes; the number of turns."""
        for turn in range(20):
            order = list(self.alive)
            rnd.shuffle(order)
            changed = False
            for me in order:
                self.look(me)
                changed |= self.act(me)
            if not changed:
                return turn
        raise AssertionError("runners that see the truth do not come to rest")

    def check(self) -> None:
        for shard, (owner, epoch) in self.owners.items():
            holders = [me for me, holds in self.alive.items() if shard in holds]
            assert holders == ([owner] if owner in self.alive else [])
            assert not holders or self.alive[holders[0]][shard].epoch == epoch


@settings(max_examples=60, deadline=None)
@given(
    shards=st.integers(1, 64),
    steps=st.lists(st.tuples(st.sampled_from("jkllaaaa"), st.integers(0, 99)), max_size=80),
    rnd=st.randoms(use_true_random=False),
)
def test_runners_with_old_snapshots_come_to_the_same_even_rest(shards, steps, rnd):
    """j: somebody joins. k: somebody is gone. l: somebody looks. a: somebody acts on their last look."""
    cluster = Cluster(shards)
    for number, (what, pick) in enumerate(steps, start=1):
        alive = sorted(cluster.alive)
        if what == "j" and len(alive) < 6:
            cluster.alive[number] = {}
            cluster.look(number)
        elif not alive:
            continue
        elif what == "k" and len(alive) > 1:
            del cluster.alive[alive[pick % len(alive)]]
        elif what == "l":
            cluster.look(alive[pick % len(alive)])
        elif what == "a":
            cluster.act(alive[pick % len(alive)])
        cluster.check()
    if cluster.alive:
        assert cluster.settle(rnd) <= 4
        cluster.check()
        sizes = Counter(owner for owner, _ in cluster.owners.values())
        assert set(sizes) <= set(cluster.alive)
        counts = [sizes[me] for me in cluster.alive]
        assert max(counts) - min(counts) <= 1


def test_a_newcomer_takes_its_share_and_nobody_else_moves():
    cluster, rnd = Cluster(256), random.Random(1)
    for number in (1, 2, 3):
        cluster.alive[number] = {}
        cluster.settle(rnd)
    before = cluster.moves
    cluster.alive[4] = {}
    cluster.settle(rnd)
    assert cluster.moves - before == 64
