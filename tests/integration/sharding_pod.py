"""One member as a process of its own: ``python -m tests.integration.sharding_pod URL NUMBER``.

Writes a JSON line, {"held": shards, "alive": true or false}, whenever one of them changes; ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys

from perdure.storage.clock import SystemClock
from perdure.storage.connect import DatabaseSettings, connect
from tests.integration.sharding_members import Member


async def main(url: str, number: int) -> None:
    clock = SystemClock()
    member = await Member(number, connect(DatabaseSettings(url), clock=clock), clock=clock).start()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    told = ""
    while not ended.done():
        line = json.dumps({"held": member.held, "alive": member.alive})
        if line != told:
            print(line, flush=True)
            told = line
        await asyncio.wait([ended], timeout=0.01)
    await member.kill()


if __name__ == "__main__":
    # Logs would mix with the lines.
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
