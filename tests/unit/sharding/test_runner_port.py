"""The runner port over a real socket, and the watch over another loop."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest

from perdure.sharding import runner_port
from perdure.sharding.runner_port import LoopWatch, RunnerPort
from perdure.sharding.slots import slot_of
from perdure.storage.clock import SystemClock
from perdure.storage.errors import ConfigurationError, InUseError
from tests.harness.waiting import until

pytestmark = pytest.mark.req("CL7", "CL11")


async def get(port: RunnerPort, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://{port.address}{path}")


async def test_probes_and_status():
    unready: list[str] = []
    port = RunnerPort(host="127.0.0.1", port=0, status=lambda: {"slot": slot_of("a"), "odd": {1}})
    assert port.bind() == port.bind() == port.address
    assert not port.address.endswith(":0")
    await port.serve(lambda: unready[0] if unready else None)
    try:
        assert (await get(port, "/livez")).status_code == 200
        assert (await get(port, "/readyz")).status_code == 200
        unready.append("the database is away")
        answer = await get(port, "/readyz")
        assert (answer.status_code, answer.text) == (503, "the database is away\n")
        assert (await get(port, "/livez")).status_code == 200
        status = (await get(port, "/status")).json()
        assert status == {"slot": slot_of("a"), "odd": "{1}"}
        assert (await get(port, "/else")).status_code == 404
        assert (await get(port, "/metrics")).status_code == 404
    finally:
        await port.close()
    with pytest.raises(httpx.ConnectError):
        await get(port, "/livez")
    await port.close()


async def test_metrics_are_served_as_prometheus_reads_them():
    port = RunnerPort(host="127.0.0.1", port=0, status=dict, metrics=lambda: "runs_total 3\n")
    await port.serve(lambda: None)
    try:
        answer = await get(port, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert answer.text == "runs_total 3\n"
    finally:
        await port.close()


async def test_a_status_that_fails_is_an_answer_too():
    def broken() -> Mapping[str, object]:
        raise ValueError("no figures")

    port = RunnerPort(host="127.0.0.1", port=0, status=broken)
    await port.serve(lambda: None)
    try:
        answer = await get(port, "/status")
        assert answer.status_code == 500
        assert "no figures" in answer.text
    finally:
        await port.close()


async def test_a_taken_port_is_refused_and_a_freed_one_is_not():
    first = RunnerPort(host="127.0.0.1", port=0, status=dict)
    number = int(first.bind().rpartition(":")[2])
    second = RunnerPort(host="127.0.0.1", port=number, status=dict)
    with pytest.raises(InUseError, match=rf"port {number} on 127\.0\.0\.1.*PERDURE_RUNNER_PORT"):
        second.bind()
    await first.serve(lambda: None)
    assert (await get(first, "/livez")).status_code == 200
    await first.close()
    assert second.bind() == f"127.0.0.1:{number}"
    await second.close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_this_machine_is_refused(host: str):
    with pytest.raises(ConfigurationError, match=rf"{host}.*PERDURE_RUNNER_HOST"):
        RunnerPort(host=host, port=0, status=dict).bind()


async def test_what_others_use_may_differ_from_where_it_listens():
    port = RunnerPort(host="127.0.0.1", port=0, advertise="fd00::7", status=dict)
    host, _, number = port.bind().rpartition(":")
    assert host == "[fd00::7]"
    assert int(number) > 0
    await port.close()


class HandClock(SystemClock):
    def __init__(self) -> None:
        self.time = 100.0

    def monotonic(self) -> float:
        return self.time


async def test_a_loop_that_owes_an_answer_lags():
    clock = HandClock()
    watch = LoopWatch(asyncio.get_running_loop(), clock)
    assert watch.lag() == 0.0
    watch.ping()
    clock.time += 3.0
    watch.ping()  # still the first question
    assert watch.lag() == 3.0
    await asyncio.sleep(0)
    assert watch.lag() == 0.0


async def test_a_closed_loop_lags_for_ever():
    clock, loop = HandClock(), asyncio.new_event_loop()
    loop.close()
    watch = LoopWatch(loop, clock)
    watch.ping()
    clock.time += 60.0
    assert watch.lag() == 60.0


@pytest.mark.parametrize(
    "host", ["pod..example", "x" * 70, "\u2603", "192.0.2.7", "no.such.host.invalid"]
)
def test_an_address_that_cannot_be_listened_on_is_named(host):
    with pytest.raises(ConfigurationError, match=r"cannot listen on .*PERDURE_RUNNER_HOST"):
        RunnerPort(host=host, port=0, status=dict).bind()


async def test_requests_that_do_not_come_to_an_end_are_cut_off(monkeypatch, caplog):
    """Half a request, half a body, or nothing at all: none keeps its connection, and who is in time is answered."""
    monkeypatch.setattr(runner_port, "REQUEST_WITHIN", 1.0)
    port = RunnerPort(host="127.0.0.1", port=0, status=dict, hints=lambda headers, body: 204)
    await port.serve(lambda: None)
    assert port._server is not None
    connections = port._server.server_state.connections
    host, _, number = port.address.rpartition(":")
    post = b"POST /hints HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"

    async def send(*parts: bytes) -> bytes:
        """The answers, until the other side closes."""
        reader, writer = await asyncio.open_connection(host, int(number))
        for part in parts:
            writer.write(part)
            await writer.drain()
            if part.endswith(b"\n\r\n") and part.startswith(b"GET"):
                assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 OK")
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()

    try:
        patient = httpx.AsyncClient(trust_env=False)
        async with patient, asyncio.timeout(10):
            assert (await patient.get(f"http://{port.address}/livez")).status_code == 200
            slow = await asyncio.gather(
                *(send(*parts) for parts in ((), (b"GET /li",), (post,), (post, b"1234")))
            )
            assert slow == [b""] * 4
            assert await send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /livez HT") == b""
            # A connection that rests between two requests stays.
            assert len(connections) == 1
            assert (await patient.get(f"http://{port.address}/livez")).status_code == 200
            assert len(connections) == 1
            held = asyncio.create_task(send(post, b"1"))
            await until(lambda: len(connections) == 2, what="the last one's connection")
    finally:
        await port.close()
    assert await asyncio.wait_for(held, 5) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
