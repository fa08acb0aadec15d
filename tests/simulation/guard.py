"""While a simulation runs, the product may not touch real time, chance, threads, sockets or files."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FORBIDDEN_EVENTS = frozenset(
    {
        "_thread.start_new_thread",
        "socket.__new__",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostname",
        "subprocess.Popen",
        "time.sleep",
    }
)
FORBIDDEN_CALLS = (
    (time, "time"),
    (time, "time_ns"),
    (time, "monotonic"),
    (time, "monotonic_ns"),
    (time, "clock_gettime"),
    (os, "urandom"),
    (random, "random"),
    (random, "randrange"),
    (random, "choice"),
    (random, "shuffle"),
    (random, "uniform"),
)


class Touched(BaseException):
    """Product code touched what a simulation has to own. Not an Exception, so that no handler swallows it."""


class Guard:
    """active: whether a simulation runs in this thread. touched: what it must not have done."""

    def __init__(self) -> None:
        self.active = False
        self.thread = 0
        self.touched: list[str] = []

    def refuse(self, what: str) -> None:
        self.touched.append(what)
        raise Touched(what)

    def watches(self) -> bool:
        """Other threads of this process, which earlier tests may have left behind, do as they like."""
        return self.active and threading.get_ident() == self.thread

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN_EVENTS and self.watches():
            self.refuse(f"{event}{args[:2]!r}")


GUARD = Guard()
_hooked = False


def _watched(module: Any, name: str) -> tuple[Any, Callable[..., Any]]:
    real = getattr(module, name)

    def call(*args: Any, **named: Any) -> Any:
        if GUARD.watches() and sys._getframe(1).f_globals.get("__name__", "").startswith("perdure"):
            GUARD.refuse(f"{module.__name__}.{name}")
        return real(*args, **named)

    return real, call


@contextmanager
def guarded(processor_time: Callable[[], float]) -> Iterator[Guard]:
    """Forbids what is listed above; ``time.perf_counter`` is ``processor_time`` in this thread meanwhile."""
    global _hooked
    if not _hooked:
        sys.addaudithook(lambda event, args: GUARD.audit(event, args))
        _hooked = True
    real_time = time.perf_counter
    kept: list[tuple[Any, str, Any]] = [(time, "perf_counter", real_time)]
    for module, name in FORBIDDEN_CALLS:
        real, call = _watched(module, name)
        kept.append((module, name, real))
        setattr(module, name, call)
    time.perf_counter = lambda: processor_time() if GUARD.watches() else real_time()
    GUARD.touched = []
    GUARD.thread = threading.get_ident()
    collecting = gc.isenabled()
    gc.disable()  # what is collected when would depend on what else this process has done
    GUARD.active = True
    try:
        yield GUARD
    finally:
        GUARD.active = False
        for module, name, real in kept:
            setattr(module, name, real)
        if collecting:
            gc.enable()


@contextmanager
def quiet_endings() -> Iterator[None]:
    """What a lost process left pending is thrown away here; what its finalisers say about that is of no interest."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # "coroutine … was never awaited"
            yield
    finally:
        sys.unraisablehook = before
