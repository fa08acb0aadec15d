"""Clocks that are set while pods run: the database's, and that of single pods. Nobody is robbed, no timer is lost.

By libfaketime, which leaves the clocks alone that count since boot: neither patience nor trust goes by any other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.harness.fixtures import audited_database
from tests.harness.pods import Pod
from tests.harness.postgres import PrivatePostgres
from tests.harness.waiting import until
from tests.integration.apps.beats import Beats
from tests.integration.fault_world import World, of_runs, taken_from

LIBRARIES = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.req("CL3"),
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed"),
]

LEASE = 8.0
PLAN = Beats(work=0.05, rest=0.3)
SLEEPERS = Beats(work=0.01, rest=6.0)
SEEN_WITHIN = 1.0 + 0.5 + 1.0
"""Seconds from setting a clock to all pods' knowing: those for which the library goes by what it read last, the time
between two looks, and two more such as room."""


async def slowest_take_over(w: World, victim: Pod, runner: int, run_ids: Collection[str]) -> float:
    """Seconds from the kill to the moment at which the last of these that was taken over has begun its next step."""
    killed = victim.faults[-1].at
    taken = taken_from(await w.history(), runner) & set(run_ids)
    assert taken
    executions = of_runs(w.executions)
    return max(
        next(e.started for e in executions[run_id] if e.started > killed and e.pid != victim.pid)
        - killed
        for run_id in taken
    )


def bound_of(shard_lock: str) -> float:
    """A second for the take-over (with row leases after theirs), and half a second for a run that rests just now."""
    return (0.0 if shard_lock == "advisory" else LEASE) + 1.0 + 0.5


class FakeTime:
    """How far the wall clock of some processes is off. In a file, so that it can be set while they run."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.set(0)

    def set(self, seconds: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.chmod(0o644)
        new.rename(self._file)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Its work-around for an old C library makes threads of Python stand still for seconds.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "FAKETIME_DISABLE_SHM": "1",
        }


@pytest.fixture
def fake_time() -> Iterator[FakeTime]:
    # Where the server's account can read it.
    folder = Path(f"/tmp/perdure-clock-{time.monotonic_ns()}")
    folder.mkdir(mode=0o755)
    yield FakeTime(folder)
    shutil.rmtree(folder)


def test_the_clock_that_trust_goes_by_is_left_alone(fake_time: FakeTime) -> None:
    def clocks() -> list[float]:
        text = subprocess.run(
            [
                sys.executable,
                "-c",
                "import time; print(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())",
            ],
            env=fake_time.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [float(word) for word in text.split()]

    for off in (0, 3_600, -3_600):
        fake_time.set(off)
        wall, boot, monotonic = clocks()
        assert wall - time.time() == pytest.approx(off, abs=5)
        assert boot == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5)
        assert monotonic == pytest.approx(time.monotonic(), abs=5)


@pytest.mark.timeout(300)
@pytest.mark.req("CL5", "SL1")
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_the_databases_clock_jumps_and_nobody_is_robbed(
    tmp_path: Path, fake_time: FakeTime, shard_lock: str
) -> None:
    """To and fro by 30 s under load, with sleepers in memory and parked; then a pod is really killed."""
    with (
        PrivatePostgres(environment=fake_time.environment) as server,
        audited_database(server) as url,
    ):
        async with World(url, tmp_path, lease=LEASE, shard_lock=shard_lock) as w:
            pods = await w.three()
            run_ids = await w.start_runs(20, PLAN)
            sleepers = await w.start_runs(20, SLEEPERS)
            await w.beating([*run_ids, *sleepers], steps=1)
            before = {pod.name: (await w.runner_of(pod)).runner_id for pod in pods}
            for off in (30, 0, -30):
                noticed = [pod.log.count("clock.jumped") for pod in pods]
                fake_time.set(off)
                set_at = time.monotonic()

                def seen_by_all(noticed: list[int] = noticed) -> bool:
                    now = [pod.log.count("clock.jumped") for pod in pods]
                    return all(new > old for new, old in zip(now, noticed, strict=True))

                await until(seen_by_all, what=f"all see that it is {off} s off", deadline=20)
                seen = time.monotonic()
                print(f"all see that the clock is {off} s off after {seen - set_at:.3f} s")
                assert seen - set_at <= SEEN_WITHIN
                if off == 30:
                    # What slept is awake: the instants it waits for are over, by the clock that counts.
                    await w.beating([*run_ids, *sleepers], since=seen - 2, steps=1)
                    assert time.monotonic() - seen < SLEEPERS.rest
                else:
                    # Sleeps set before last 30 s longer, and end then.
                    await w.beating([*run_ids, *sleepers], since=seen + 1, steps=1)
                    assert 20 < time.monotonic() - seen < 30 + SLEEPERS.rest + 4
                assert not [row for row in (await w.topology()).runners if row.dead]
            now = {pod.name: (await w.runner_of(pod)).runner_id for pod in pods}
            assert now == before

            runner = (await w.runner_of(pods[0])).runner_id
            killed = pods[0].kill().at
            await w.beating(run_ids, since=killed + 0.5, steps=2)
            took = await slowest_take_over(w, pods[0], runner, run_ids)
            print(f"all go on {took:.3f} s after a kill, with the clock 30 s behind")
            assert took <= bound_of(shard_lock)
            await w.finish()
            await w.check(w.pods.faults)


@pytest.mark.timeout(240)
@pytest.mark.req("CL5", "SL1")
@pytest.mark.parametrize("shard_lock", ["advisory", "row"])
async def test_the_clock_of_one_pod_is_wrong_and_jumps(
    audited_postgres_url: str, tmp_path: Path, fake_time: FakeTime, shard_lock: str
) -> None:
    async with World(audited_postgres_url, tmp_path, lease=LEASE, shard_lock=shard_lock) as w:
        wrong = w.pods.start("wrong", env={"PERDURE_DB": w.url, **fake_time.environment})
        fake_time.set(3_600)
        await wrong.wait_http("/readyz", deadline=30)
        right = await w.start_pods_beside(wrong, w.url, w.url)
        run_ids = await w.start_runs(20, PLAN)
        before = {pod.name: (await w.runner_of(pod)).runner_id for pod in (wrong, *right)}
        for off in (-3_600, 30, -30, 0):
            fake_time.set(off)
            await w.beating(run_ids, since=time.monotonic(), steps=3)
        now = {pod.name: (await w.runner_of(pod)).runner_id for pod in (wrong, *right)}
        assert now == before
        assert "clock.jumped" not in wrong.log, "it does not go by its own"
        since = time.monotonic()
        await until(lambda: time.monotonic() > since + LEASE, what="sessions that lasted")
        runner = (await w.runner_of(right[0])).runner_id
        killed = right[0].kill().at
        await w.beating(run_ids, since=killed + 0.5, steps=2)
        took = await slowest_take_over(w, right[0], runner, run_ids)
        print(f"all go on {took:.3f} s after a kill")
        assert took <= bound_of(shard_lock)
        await w.finish()
        await w.check(w.pods.faults)
