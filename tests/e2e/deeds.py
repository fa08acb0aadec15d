"""What the pages' examples take for granted, and checks of what they did: called by ``<!-- do NAME -->``."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from perdure import Client, Settings
from perdure.testing import running
from tests.e2e.pages import Page
from tests.harness.waiting import until

LONG = 30.0
"""Seconds that a check waits at most."""


def all_deeds() -> Mapping[str, Callable[[Page], Awaitable[None]]]:
    """The functions of this module that take a page, by name."""
    found = {name: value for name, value in globals().items() if inspect.iscoroutinefunction(value)}
    return {name: value for name, value in found.items() if value.__module__ == __name__}


def dev_file(page: Page) -> Client:
    """A client on what `perdure dev` made in the page's folder."""
    return Client(f"sqlite:///{page.folder}/.perdure/dev.db")


# ---- README -----------------------------------------------------------------------------------


async def readme_names(page: Page) -> None:
    from examples.orders.app import Approval, Order, Receipt, Shipment, pack, print_label

    class Provider:
        async def charge(self, order: Order, key: str) -> Receipt:
            return Receipt(order_id=order.id, charge_id=key, cents=order.cents)

    page.names.update(
        Approval=Approval,
        Order=Order,
        Receipt=Receipt,
        Shipment=Shipment,
        pack=pack,
        print_label=print_label,
        provider=Provider(),
        order=Order(id="A-2", customer="Ada", cents=1999),
    )


async def readme_run_sleeps(page: Page) -> None:
    """The workflow comes to its two hours of sleep."""
    async with running(page.names["app"]) as client:
        handle = await client.start(page.names["fulfil"], page.names["order"])
        await handle.signal("approval", {"approved": True, "by": "a test"})

        async def sleeping() -> bool:
            info = await handle.poll()
            assert info is not None
            wake_at = info.wake_at if info.reason == "timer" else None
            return wake_at is not None and 7_190 < wake_at - info.created_at < 7_260

        await until(sleeping, what="the sleep of two hours", deadline=LONG)
        names = {entry.name for entry in await client.journal(handle.run_id)}
    assert names == {"charge#0", "signal:approval#0", "pack#0", "print_label#0"}


def executions(page: Page) -> int:
    """Steps of the orders example that were executed so far."""
    return len((page.folder / "side.log").read_text().splitlines())


async def readme_order_waits(page: Page) -> None:
    async with dev_file(page) as client:

        async def waiting() -> bool:
            (run,) = await client.list()
            return run.reason == "signal"

        await until(waiting, what="the order waits for its approval", deadline=LONG)
    page.names["executed_before"] = executions(page)


async def readme_order_ships(page: Page) -> None:
    async with dev_file(page) as client:
        (run,) = await client.list()
        assert (await client.wait(run.run_id, timeout=LONG))["status"] == "shipped"
    # pack, print_label and ship; no charge
    assert executions(page) == page.names["executed_before"] + 3


async def readme_approve(page: Page) -> None:
    """Somebody approves the order that the next example starts."""

    async def approve() -> None:
        async with Client(page.database) as client:
            (run,) = await until(client.list, what="the order", deadline=LONG)
            await client.signal(run.run_id, "approval", {"approved": True, "by": "a test"})

    page.names["approving"] = asyncio.create_task(approve())


async def readme_approved(page: Page) -> None:
    await page.names["approving"]
    assert page.names["shipment"].status == "shipped"


# ---- docs/workflows.md ------------------------------------------------------------------------


async def stands(page: Page, text: str) -> None:
    async with dev_file(page) as client:

        async def look() -> bool:
            return text in (await client.why("one")).summary

        await until(look, what=text, deadline=LONG)


async def run_waits(page: Page) -> None:
    await stands(page, "waits for signal")


async def run_is_held(page: Page) -> None:
    await stands(page, "on hold")


async def rename_a_step(page: Page) -> None:
    file = page.folder / "app.py"
    text = file.read_text()
    changed = text.replace("async def first()", "async def begin()").replace("(first)", "(begin)")
    assert changed != text
    file.write_text(changed)


async def give_it_the_old_name(page: Page) -> None:
    file = page.folder / "app.py"
    text = file.read_text()
    changed = text.replace("@step\nasync def begin()", '@step(name="first")\nasync def begin()')
    assert changed != text
    file.write_text(changed)


PACKAGE = {
    "store/__init__.py": "",
    "store/main.py": "from perdure import App\napp = App('store')\n",
    "store/workflows/__init__.py": "",
    "store/workflows/hello_workflow.py": (
        "from perdure import Context, workflow\n"
        "@workflow(name='hello')\n"
        "async def hello(ctx: Context, name: str) -> str:\n"
        "    return f'Hello {name}'\n"
    ),
}


async def package(page: Page) -> None:
    for name, text in PACKAGE.items():
        file = page.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


# ---- docs/operations.md -----------------------------------------------------------------------


def pods_settings(page: Page) -> Settings:
    return Settings(db=page.database, schema="perdure")


async def paid(page: Page) -> None:
    async with dev_file(page) as client:
        (run,) = await client.list()
        assert await client.wait(run.run_id, timeout=LONG) == "charged 1999"


async def shards_are_even(page: Page) -> None:
    async with Client(pods_settings(page)) as client:

        async def even() -> bool:
            return [runner.shards for runner in (await client.cluster()).runners] == [128, 128]

        await until(even, what="128 shards for each of the two", deadline=LONG)


async def run_waits_for_its_signal(page: Page) -> None:
    async with Client(pods_settings(page)) as client:

        async def waiting() -> bool:
            (run,) = await client.list()
            return run.reason == "signal"

        await until(waiting, what="the run waits for its signal", deadline=LONG)


async def boot_line(page: Page) -> None:
    """What was printed: the line of the pod's log that the page shows."""
    log = (page.folder / "three-1.log").read_text()
    page.printed = next(line for line in log.splitlines() if "runner.ready" in line)
    assert isinstance(json.loads(page.printed), dict)


async def shop_is_importable(page: Page) -> None:
    """As with the folder of the page on the search path, but gone with the page."""
    text = (page.folder / "shop.py").read_text()
    module = type(page.module)("shop")
    exec(compile(text, "shop.py", "exec"), vars(module))
    page.lend(module)


# ---- docs/observability.md --------------------------------------------------------------------


async def one_trace(page: Page) -> None:
    """The spans that both processes wrote hang together as the page draws them."""

    def spans() -> dict[str, Any]:
        lines = (page.folder / "spans.jsonl").read_text().splitlines()
        return {span["name"]: span for span in map(json.loads, lines)}

    await until(lambda: "run traced.parcel" in spans(), what="the run's span", deadline=LONG)
    found = spans()
    above = {"scales": "step weigh", "step weigh": "run traced.parcel"}
    above |= {"step ship": "run traced.parcel", "run traced.parcel": "start traced.parcel"}
    above |= {"start traced.parcel": "POST /orders"}
    for name, parent in above.items():
        assert found[name]["parent_id"] == found[parent]["context"]["span_id"], name
        assert found[name]["context"]["trace_id"] == found["POST /orders"]["context"]["trace_id"]


async def log_line(page: Page) -> None:
    """What was printed: the line that the page shows."""
    log = (page.folder / "one-1.log").read_text()
    page.printed = next(line for line in log.splitlines() if '"wrapping"' in line)
    assert isinstance(json.loads(page.printed), dict)
