"""An order from payment to parcel. The thing to copy.

Try it (the first command in one terminal, the others in a second one):

    perdure dev examples.orders.app:app
    perdure workflows start orders.fulfil --payload '{"id": "A-1", "customer": "Ada", "cents": 1999}'
    perdure workflows why RUN
    perdure workflows signal RUN --name approval --payload '{"approved": true, "by": "me"}'
    perdure workflows show RUN
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

from pydantic import BaseModel

from examples.orders.sidelog import note_execution
from perdure import App, Context, Retry, SignalTimeoutError, current_step, step, workflow


class Order(BaseModel):
    id: str
    customer: str
    cents: int


class Receipt(BaseModel):
    order_id: str
    charge_id: str
    cents: int


class Approval(BaseModel):
    approved: bool
    by: str


class Shipment(BaseModel):
    order_id: str
    tracking: str | None
    status: str


class ProviderDown(Exception):
    """The payment provider did not answer; another try may help."""


@step(retry=Retry(max_attempts=10, base_delay=0.1, max_delay=0.5, retryable=(ProviderDown,)))
async def charge(order: Order) -> Receipt:
    """Ask a provider that fails one time in four; which times is fixed by the order and the attempt.

    A real provider gets the idempotency key: it is the same in every attempt, so the customer pays once."""
    note_execution()
    me = current_step()
    await asyncio.sleep(0.15)
    if random.Random(f"{order.id}/{me.attempt}").random() < 0.25:
        raise ProviderDown(f"no answer for order {order.id}")
    charge_id = hashlib.sha256(me.idempotency_key.encode()).hexdigest()[:12]
    return Receipt(order_id=order.id, charge_id=charge_id, cents=order.cents)


@step
async def pack(order: Order) -> str:
    note_execution()
    await asyncio.sleep(0.4)
    return f"parcel of {order.customer}"


@step
def print_label(order: Order) -> str:
    """A plain function may block: it runs in a thread of its own."""
    note_execution()
    time.sleep(0.3)
    return f"PD{sum(order.id.encode()):08d}"


@step
async def ship(parcel: str, label: str) -> str:
    note_execution()
    await asyncio.sleep(0.2)
    return label


@step
async def refund(receipt: Receipt) -> None:
    note_execution()
    await asyncio.sleep(0.1)


@workflow(name="orders.fulfil", idempotency_key=lambda order: f"order:{order.id}")
async def fulfil(ctx: Context, order: Order) -> Shipment:
    """Charge, wait for an approval, pack and label side by side, let the courier come, ship."""
    receipt = await ctx.step(charge, order)
    try:
        approval = await ctx.wait_signal("approval", Approval, timeout="3 days")
        approved = approval.approved
    except SignalTimeoutError:
        approved = False
    if not approved:
        await ctx.step(refund, receipt)
        return Shipment(order_id=order.id, tracking=None, status="refunded")
    parcel, label = await asyncio.gather(ctx.step(pack, order), ctx.step(print_label, order))
    await ctx.sleep("2 seconds")
    tracking = await ctx.step(ship, parcel, label)
    return Shipment(order_id=order.id, tracking=tracking, status="shipped")


app = App("orders", workflows=[fulfil])
