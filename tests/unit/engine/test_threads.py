"""Threads for blocking steps."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest

from perdure.runtime.engine.threads import DaemonThreads
from tests.harness.waiting import until_blocking


@pytest.mark.req("WF12", "ST13")
def test_a_step_for_which_there_is_no_thread_is_done_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever submitted it is told; done later it would be a second, unrecorded execution."""
    threads, done, told = DaemonThreads(), [], []

    def submit(name: str) -> None:
        def work() -> None:
            done.append(name)

        threads.submit(contextvars.copy_context(), work, lambda *answer: told.append(answer))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start"):
            submit("first")
    for name in ("second", "third", "fourth"):
        submit(name)
    until_blocking(lambda: len(told) == 3, what="three answers")
    submit("fifth")
    until_blocking(lambda: len(told) == 4, what="four answers")
    assert sorted(done) == ["fifth", "fourth", "second", "third"]


def test_idle_threads_are_used_again() -> None:
    threads, names = DaemonThreads("used-again"), set[str]()
    told: list[Any] = []

    def work() -> None:
        names.add(threading.current_thread().name)

    for turn in range(20):
        threads.submit(contextvars.copy_context(), work, lambda *answer: told.append(answer))
        until_blocking(lambda: len(told) > turn, what=f"answer {turn}")  # noqa: B023
        until_blocking(lambda: threads._idle == 1, what="an idle thread")
    alive = [t for t in threading.enumerate() if t.name == "used-again"]
    assert len(alive) == 1
