"""A web application that starts runs and waits for them; pods elsewhere execute them. It needs the database alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel

from perdure import Client, Context, step, workflow
from perdure.runtime.errors import RunNotFound
from tests.integration.in_process import runner_on


class Order(BaseModel):
    id: int
    amount: int


class Receipt(BaseModel):
    order: int
    paid: int


@step
async def charge(order: Order) -> Receipt:
    if order.amount < 0:
        raise ValueError(f"order {order.id} has a negative amount")
    return Receipt(order=order.id, paid=order.amount)


@workflow(name="shop.fulfil", idempotency_key=lambda order: f"order:{order.id}")
async def fulfil(ctx: Context, order: Order) -> Receipt:
    receipt = await ctx.step(charge, order)
    if order.amount > 1000:
        await ctx.wait_signal("approval", bool)
    return receipt


def client_of(request: Request) -> Client:
    client: Client = request.app.state.client
    return client


Runs = Annotated[Client, Depends(client_of)]


def web_application(url: str) -> FastAPI:
    """As a user of the library writes it: one client for the application's life."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Client(url, workflows=[fulfil]) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=202)
    async def start(order: Order, client: Runs) -> dict[str, str]:
        handle = await client.start(fulfil, order)
        return {"run_id": handle.run_id, "status": handle.status}

    @app.get("/orders/{run_id}")
    async def wait(run_id: str, client: Runs, seconds: float = 20.0) -> Receipt:
        try:
            return await client.handle(run_id, fulfil).wait(seconds)
        except TimeoutError:
            raise HTTPException(504, "not yet") from None
        except RunNotFound as error:
            raise HTTPException(404, str(error)) from None
        except ValueError as error:
            raise HTTPException(409, str(error)) from None

    @app.post("/orders/{run_id}/approval", status_code=204)
    async def approve(run_id: str, client: Runs) -> None:
        await client.signal(run_id, "approval", True)

    return app


@asynccontextmanager
async def served(url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = web_application(url)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as web,
    ):
        yield web


@pytest.mark.req("WF1", "OP4")
async def test_a_web_application_starts_runs_that_a_pod_executes(migrated_postgres_url: str):
    url = migrated_postgres_url
    async with served(url) as web:
        started = await web.post("/orders", json={"id": 1, "amount": 10})
        assert (started.status_code, started.json()["status"]) == (202, "running")
        run_id = started.json()["run_id"]
        assert (await web.get(f"/orders/{run_id}", params={"seconds": 0.1})).status_code == 504
        async with runner_on(url, [fulfil], park_after=0.05):
            assert (await web.get(f"/orders/{run_id}")).json() == {"order": 1, "paid": 10}
            again = await web.post("/orders", json={"id": 1, "amount": 10})
            assert again.json() == {"run_id": run_id, "status": "replayed"}
            refused = await web.post("/orders", json={"id": 2, "amount": -1})
            answer = await web.get(f"/orders/{refused.json()['run_id']}")
            assert (answer.status_code, answer.json()["detail"]) == (
                409,
                "order 2 has a negative amount",
            )
            assert (await web.post("/orders", json={"id": 3})).status_code == 422
            assert (await web.get("/orders/nobody")).status_code == 404
            large = (await web.post("/orders", json={"id": 4, "amount": 5000})).json()["run_id"]
            assert (await web.get(f"/orders/{large}", params={"seconds": 0.2})).status_code == 504
            assert (await web.post(f"/orders/{large}/approval")).status_code == 204
            assert (await web.get(f"/orders/{large}")).json() == {"order": 4, "paid": 5000}
