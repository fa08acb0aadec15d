"""A signal wakes its run: without hints within two safety scans, with them at once (R5, R6)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from perdure import Client, Context, workflow
from perdure.runtime.handle import Handle
from perdure.storage.model import RunStatus, Verdict
from tests.harness.pods import Pods
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.ears import Listening, ear
from tests.integration.fault_world import both_modes
from tests.integration.in_process import (
    Watched,
    client_on,
    milliseconds,
    runner_on,
    until_all,
    within,
)

pytestmark = pytest.mark.alone

PARK_AFTER = 0.05
JITTER = 1.2  # a scan may be a fifth later than its setting says

# ---- without hints ----------------------------------------------------------------------------


class Heard:
    """When a run has begun to wait for its n-th signal: also when it has consumed the one before."""

    def __init__(self) -> None:
        self.moments: dict[tuple[str, int], asyncio.Future[float]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    def note(self, run_id: str, number: int) -> None:
        moment = self.moments[run_id, number]
        if not moment.done():  # a replay comes here again
            moment.set_result(time.monotonic())


_heard: list[Heard] = []


@workflow(name="hears")
async def hears(ctx: Context, signals: int) -> list[int]:
    words: list[int] = []
    _heard[-1].note(ctx.run_id, 0)
    while len(words) < signals:
        words.append(await ctx.wait_signal("go", int))
        _heard[-1].note(ctx.run_id, len(words))
    return words


async def talk(
    client: Client, handle: Handle[list[int]], heard: Heard, chance: random.Random, signals: int
) -> list[float]:
    """Send one signal after the other, each at a random moment around the park; how long each took to be heard."""
    took = []
    for number in range(signals):
        await heard.moments[handle.run_id, number]
        await asyncio.sleep(chance.uniform(0.0, 2 * PARK_AFTER))
        sent = time.monotonic()
        await client.signal(handle.run_id, "go", number)
        took.append(await heard.moments[handle.run_id, number + 1] - sent)
    return took


@pytest.mark.req("SL2", "SL1")
@pytest.mark.parametrize(
    "scan",
    [
        pytest.param(1.0, id="scan-1s"),
        pytest.param(5.0, id="scan-5s", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
@both_modes
async def test_signals_around_the_park_are_heard_within_two_scans_without_hints(
    migrated_postgres_url: str, scan: float, shard_lock: str
):
    runs, signals = 200, 5
    url = migrated_postgres_url
    heard = Heard()
    _heard.append(heard)
    chance = random.Random(20)
    watched = Watched(url)
    settings = {
        "hints": False,
        "scan": scan,
        "park_after": PARK_AFTER,
        "slots": runs,
        "shard_lock": shard_lock,
    }
    async with (
        runner_on(url, [hears], database=watched, **settings),
        client_on(url, [hears], hints=False) as client,
    ):
        handles = [await client.start(hears, signals, run_id=f"run-{n:03}") for n in range(runs)]
        took = await asyncio.gather(*(talk(client, h, heard, chance, signals) for h in handles))
        results = await asyncio.gather(*(h.wait(20) for h in handles))
    assert results == [list(range(signals))] * runs
    all_took = [seconds for each in took for seconds in each]
    parked, refused = watched.verdicts(Verdict.PARKED), watched.verdicts(Verdict.PARK_REFUSED)
    print(f"{milliseconds(all_took)}; parked {parked}, refused {refused}")
    assert len(all_took) == runs * signals
    assert max(all_took) <= 2 * scan * JITTER
    assert parked > runs
    assert parked < runs * signals, "no signal came before its park"
    assert refused > 0, "no signal came during its park"


# ---- with hints -------------------------------------------------------------------------------

RUNS = 15
LISTENS = "listens"


class Ears:
    """Two pods with runs that wait, and a client in this process."""

    def __init__(self, url: str, folder: Path, client: Client, shard_lock: str) -> None:
        self.client = client
        self.side_log = SideLog(folder / "side.log")
        settings = {
            "PERDURE_RUNNER_STORAGE": "sql",
            "PERDURE_SHARD_LOCK": shard_lock,
            "PERDURE_PARK_AFTER": "0.75",
            "PERDURE_SCAN": "60",
        }
        app = "tests.integration.apps.ears:app"
        self.pods = Pods(app, url, folder, env=settings, side_log=self.side_log.path)

    async def begin(self) -> None:
        for pod in [self.pods.start(), self.pods.start()]:
            await pod.wait_http("/readyz", deadline=30)
        await until(self._even, what="both pods holding half of the shards", deadline=30)
        handle = await self.client.start(ear, Listening(signals=1))
        await self._line(handle.run_id, LISTENS)
        await self.wake(handle.run_id, "a warm-up")

    async def _even(self) -> bool:
        status = await self.client.cluster()
        return sorted(r.shards for r in status.runners if r.alive) == [128, 128]

    async def _line(self, run_id: str, key: str) -> float:
        """When that line of the run was first written."""

        def look() -> list[float]:
            lines = self.side_log.executions()
            return [e.started for e in lines if e.run == run_id and e.key == key]

        what = f"{run_id} writing {key}"
        return min(await until(look, what=what, deadline=20, interval=0.005))

    async def wake(self, run_id: str, word: str) -> float:
        """Seconds from the call of `signal` to the line in the body after it."""
        sent = time.monotonic()
        await self.client.signal(run_id, "go", word)
        return await self._line(run_id, word) - sent

    async def wake_waiting(self) -> list[float]:
        """Runs that have just begun to wait, so that they are in memory."""
        took = []
        for _ in range(RUNS):
            handle = await self.client.start(ear, Listening(signals=1))
            await self._line(handle.run_id, LISTENS)
            took.append(await self.wake(handle.run_id, "first"))
        return took

    async def wake_parked(self) -> list[float]:
        plan = Listening(signals=1)
        handles = [await self.client.start(ear, plan) for _ in range(RUNS)]
        await until_all(self.client, RunStatus.SUSPENDED, RUNS)
        return [await self.wake(handle.run_id, "first") for handle in handles]


@pytest.mark.req("SL2", "CL6")
@pytest.mark.parametrize(
    ("fixture", "limit", "shard_lock"),
    [
        pytest.param("migrated_postgres_url", 0.015, "advisory", id="postgres"),
        pytest.param("migrated_postgres_url", 0.015, "row", id="row", marks=pytest.mark.slow),
        pytest.param("migrated_sqlite_url", 0.150, "row", id="sqlite"),
    ],
)
async def test_a_signal_wakes_a_run_in_another_process_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, fixture: str, limit: float, shard_lock: str
):
    url: str = request.getfixturevalue(fixture)
    async with client_on(url, [ear]) as client:
        ears = Ears(url, tmp_path, client, shard_lock)
        with ears.pods:
            await ears.begin()
            await within(ears.wake_waiting, "signal to a body in memory", p50=limit)
            await within(ears.wake_parked, "signal to a parked body", p50=limit)
