"""`perdure.testing` where pytest is not installed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["pytest"] = None  # as if it were not installed
import asyncio
from perdure import workflow
from perdure.testing import running

@workflow(name="alone")
async def alone(ctx, number: int) -> int:
    return number + 1

async def main():
    async with running([alone]) as client:
        print(await client.run(alone, 1))

asyncio.run(main())
"""


def test_workflows_run_in_process_without_pytest(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
