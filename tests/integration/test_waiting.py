"""A wait that is given up says for whom it waited; the run goes on."""

import pytest

from perdure import Context, workflow
from perdure.testing import running


@workflow(name="waiting.for-a-signal")
async def waits(ctx: Context) -> str:
    await ctx.wait_signal("go")
    return "gone"


async def test_a_wait_that_is_given_up_names_the_run():
    async with running([waits]) as client:
        handle = await client.start(waits)
        with pytest.raises(
            TimeoutError, match=rf"run '{handle.run_id}' has not ended within 0\.05 s; it goes on"
        ):
            await handle.wait(timeout=0.05)
        await handle.signal("go")
        assert await handle.wait(timeout=30) == "gone"
