"""Daemon threads for blocking steps: reused, never joined, so a step that hangs cannot keep the process alive."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from perdure.runtime.engine.copies import Original

Job = Callable[[], None]
IDLE_SECONDS = 30.0


class StepThreads(Protocol):
    """Where blocking steps run."""

    def submit(
        self,
        context: contextvars.Context,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run ``function`` in ``context``; ``done(value, error)`` is called once, in any thread."""
        ...


class DaemonThreads:
    """As many threads as there are blocking steps at work; idle ones end after 30 s."""

    def __init__(self, name: str = "perdure-step") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(
        self,
        context: contextvars.Context,
        function: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run ``function`` in ``context``; ``done(value, error)`` is called in that thread."""

        original = Original()

        def job() -> None:
            try:
                value = context.run(function)
            except (
                BaseException
            ) as error:  # SystemExit too: it is the step's failure, not the pod's end (R7)
                original.end_copy(error)
                done(None, error)
            else:
                original.end_copy()
                done(value, None)

        with self._lock:
            if self._idle > 0:
                self._idle -= 1
                self._jobs.put(job)
                return
        # First the thread: where the system gives no more of them, the caller is told, and the job is done by nobody.
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._idle = max(0, self._idle - 1)
                        return
                continue
            job()
            with self._lock:
                self._idle += 1
