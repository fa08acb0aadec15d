"""What the application's own tasks and callbacks cannot do to a pod's event loop."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest
import structlog
import uvloop

from perdure.runtime.cli.main_loop import drive, host_loop


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop])
def loop(request):
    loop = request.param()
    yield loop
    loop.close()


@pytest.fixture(autouse=True)
def signals_are_handled():
    """As in a pod, which takes SIGINT as a wish to stop."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


async def leaving() -> None:
    sys.exit(3)


async def interrupting() -> None:
    raise KeyboardInterrupt


def test_tasks_and_callbacks_that_exit_stop_nothing(loop):
    seen: list[object] = []

    async def main() -> None:
        forgotten = asyncio.ensure_future(leaving())
        await asyncio.wait([forgotten])
        seen.append(forgotten.exception())
        with pytest.raises(KeyboardInterrupt):
            await asyncio.gather(interrupting(), asyncio.Event().wait())
        called = asyncio.Event()
        asyncio.get_running_loop().call_soon(sys.exit, 4)
        asyncio.get_running_loop().call_soon(loop.stop)
        asyncio.get_running_loop().call_soon(called.set)
        await called.wait()
        seen.append("end")

    drive(loop, loop.create_task(main()))
    assert [getattr(each, "code", each) for each in seen] == [3, "end"]


def test_what_the_pod_itself_raises_ends_it(loop):
    with pytest.raises(SystemExit):
        drive(loop, loop.create_task(leaving()))

    async def failing() -> None:
        raise LookupError("why")

    with pytest.raises(LookupError, match="why"):
        drive(loop, loop.create_task(failing()))


def test_control_c_before_the_pod_listens_ends_it(loop):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = asyncio.Event()

    async def main() -> None:
        loop.call_soon(signal.raise_signal, signal.SIGINT)
        await done.wait()

    task = loop.create_task(main())
    with pytest.raises(KeyboardInterrupt):
        drive(loop, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        drive(loop, task)


def test_a_pod_runs_on_uvloop():
    found = host_loop()
    assert isinstance(found, uvloop.Loop)
    found.close()


def test_without_uvloop_a_pod_runs_on_the_plain_loop_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with structlog.testing.capture_logs() as lines:
        found = host_loop()
    try:
        assert isinstance(found, asyncio.SelectorEventLoop)
        assert drive(found, found.create_task(asyncio.sleep(0, "done"))) == "done"
    finally:
        found.close()
    assert [line["event"] for line in lines] == ["loop.plain"]


def test_a_task_that_holds_the_loop_at_the_end_hides_no_error():
    """What ended the pod is said, with its code, though the loop never comes to an end."""
    script = """
        import asyncio
        import threading
        from perdure.runtime.cli.main_loop import run_to_end
        from perdure.storage.errors import SchemaError

        async def stubborn():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                threading.Event().wait()

        async def main():
            task = asyncio.create_task(stubborn())
            await asyncio.sleep(0)
            raise SchemaError("run this command")

        run_to_end(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (3, "error: run this command\n")
