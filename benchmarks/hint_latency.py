"""`python -m benchmarks.hint_latency [--signals N]`: from a signal in one process to the woken body in another.

Two processes, each way of hints in turn, the run parked each time. JSON lines: database, transport, milliseconds by
the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perdure import Client
from perdure.runtime.logs import configure_logs
from perdure.runtime.settings import Settings
from perdure.storage.connect import migrate
from tests.harness.pods import Pods
from tests.harness.postgres import PrivatePostgres
from tests.harness.sidelog import SideLog
from tests.harness.waiting import until
from tests.integration.apps.ears import Listening, ear


async def measure(url: str, transport: str, signals: int, folder: Path) -> list[float]:
    """Seconds from the moment before ``signal`` is called to the body's next line."""
    side = SideLog(folder / "side.log")
    env = {
        "PERDURE_RUNNER_STORAGE": "sql",
        "PERDURE_HINT_TRANSPORT": transport,
        "PERDURE_PARK_AFTER": "0",
    }
    app = "tests.integration.apps.ears:app"
    with Pods(app, url, folder, env=env, side_log=side.path) as pods:
        await pods.ready()
        settings = Settings(db=url, hint_transport=transport)
        async with Client(settings, workflows=[ear]) as client:
            await client.start(ear, Listening(signals=signals), run_id="ear")
            late = []
            for number in range(signals):

                async def parked() -> bool:
                    info = await client.get("ear")
                    return info is not None and info.status == "suspended"

                def heard(word: str = f"{number}") -> float | None:
                    return next((e.started for e in side.executions() if e.key == word), None)

                await until(parked, what="parked", deadline=30)
                sent = asyncio.get_running_loop().time()
                await client.signal("ear", "go", f"{number}")
                at = await until(heard, what="heard", deadline=30)
                assert at is not None
                late.append(at - sent)
    return late


async def main(signals: int) -> None:
    configure_logs(level="error")
    with PrivatePostgres(durable=True) as server:
        for kind in ("sqlite", "postgresql"):
            for transport in ("database", "http"):
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    url = f"sqlite:///{folder / 'hints.db'}"
                    if kind == "postgresql":
                        url = server.url(server.create_database())
                    await asyncio.to_thread(migrate, Settings(db=url).database())
                    late = sorted(await measure(url, transport, signals, folder))
                    line = {
                        "bench": "signal to woken body",
                        "database": kind,
                        "transport": transport,
                        "median_ms": round(statistics.median(late) * 1e3, 1),
                        "p90_ms": round(late[int(len(late) * 0.9)] * 1e3, 1),
                        "signals": len(late),
                    }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=40)
    asyncio.run(main(parser.parse_args().signals))
