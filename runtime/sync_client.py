"""The client for code that blocks: scripts, and web frameworks of threads. A façade over `Client`, at the edge only.

with SyncClient("postgresql://…", workflows=[fulfil]) as client:
    shipment = client.run(fulfil, order)

An event loop on a daemon thread does the work; each call waits for its answer. It may be used by many threads at once.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from perdure.runtime.arguments import StartOptions, check_timeout
from perdure.runtime.authoring.definitions import UNSET, Unset, WorkflowDefinition
from perdure.runtime.bulk import Progress
from perdure.runtime.client import KEEP, Client
from perdure.runtime.errors import ClientClosed
from perdure.runtime.handle import Handle
from perdure.runtime.settings import Settings
from perdure.runtime.views import ClusterStatus, RunInfo, StepView, Why
from perdure.storage.model import RunEvent, RunStatus

In = TypeVar("In")
Out = TypeVar("Out")
T = TypeVar("T")


class SyncHandle(Generic[Out]):
    """A run somebody started; see `Handle`."""

    def __init__(self, client: SyncClient, handle: Handle[Out]) -> None:
        self._client = client
        self._handle = handle
        self.run_id = handle.run_id
        self.status = handle.status

    def wait(self, timeout: float | None = None) -> Out:
        """The result. Raises the recorded error, `WorkflowCancelled`, or TimeoutError after ``timeout`` seconds."""
        return self._client._call(lambda client: self._handle.wait(timeout))

    def poll(self) -> RunInfo | None:
        """How it stands now; None for an id nobody has."""
        return self._client.get(self.run_id)

    def signal(self, name: str, payload: Any = None, *, id: str | None = None) -> None:
        self._client.signal(self.run_id, name, payload, id=id)

    def cancel(self, reason: str | None = None) -> None:
        self._client.cancel(self.run_id, reason)

    def suspend(self, reason: str | None = None) -> None:
        self._client.suspend(self.run_id, reason)

    def resume(self) -> None:
        self._client.resume(self.run_id)

    def __repr__(self) -> str:
        return f"SyncHandle(run_id={self.run_id!r}, status={self.status!r})"


@dataclass(frozen=True, slots=True)
class SyncStarted(Generic[Out]):
    """What became of one payload of `SyncClient.start_many`; see `Started`."""

    handle: SyncHandle[Out] | None
    created: bool = False
    error: Exception | None = None


class SyncClient:
    """`open` and `close` it, or use it as a context manager. One per process is enough.

    database: a URL, or `Settings`. workflows: definitions that may be started and typed by name.
    Every method raises what the one of the same name of `Client` does; and `ClientClosed` before `open` and after
    `close`, in a process that was forked off, and below a running event loop, where it would block it.
    """

    def __init__(
        self,
        database: str | Settings,
        *,
        workflows: Sequence[WorkflowDefinition[Any, Any]] = (),
    ) -> None:
        self._settings = database if isinstance(database, Settings) else Settings(db=database)
        self._workflows = tuple(workflows)
        self._new_locks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None
        self._pid = 0

    def _new_locks(self) -> None:
        self._lock = threading.Lock()
        """Of `open` and `close`."""
        self._gate = threading.Lock()
        """Between giving work to the loop and ending it: what came through before is told of the end."""

    # -- life
    def open(self) -> Self:
        """Connect. Raises `ConfigurationError` when the database cannot be reached or its schema does not fit."""
        self._refuse_in_loop()
        if self._pid not in (0, os.getpid()):
            self._new_locks()  # another thread may have had them when this process was forked off
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                raise ClientClosed(
                    "this client is open already: open it once, and use it from any thread"
                )
            self._pid = os.getpid()
            self._client = None  # of the process that this one was forked off from
            loop = self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(
                target=self._turn, args=(loop,), name="perdure-sync-client", daemon=True
            )
            self._thread.start()
            try:
                self._client = self._in_loop(self._connect())
            except BaseException:
                self._end_loop()
                raise
        return self

    async def _connect(self) -> Client:
        return await Client(self._settings, workflows=self._workflows).__aenter__()

    def close(self) -> None:
        """Safe to call twice. Calls under way in other threads raise `ClientClosed`."""
        if self._pid != os.getpid():
            return
        with self._lock:
            client, self._client = self._client, None
            if client is None:
                return
            try:
                self._in_loop(client.__aexit__(None, None, None))
            finally:
                self._end_loop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)  # of calls that `close` overtook
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            loop.close()

    def _end_loop(self) -> None:
        with self._gate:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            with self._gate:
                if self._loop is None:
                    raise RuntimeError
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # closed between two looks
            work.close()
            raise ClientClosed("the client was closed meanwhile") from None
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed("the client was closed meanwhile") from None
        except BaseException:  # Ctrl-C while waiting: nobody wants the answer any more
            future.cancel()
            raise

    def _call(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        self._refuse_in_loop()
        client = self._client
        if client is None:
            raise ClientClosed(
                "this client is not open: use it inside `with SyncClient(…) as client:`, or between open() and close()"
            )
        if self._pid != os.getpid():
            raise ClientClosed(
                f"this client was opened by process {self._pid}, and this is process {os.getpid()}, forked off from "
                "it: open one in each process (with gunicorn: in post_fork, or without preload_app)"
            )
        return self._in_loop(work(client))

    @staticmethod
    def _refuse_in_loop() -> None:
        if asyncio._get_running_loop() is not None:
            raise ClientClosed(
                "SyncClient would block the event loop that runs here: use `async with Client(…) as client:` and await "
                "its methods; in a step or view that blocks, call it from a plain function in a thread"
            )

    # -- starting
    @overload
    def start(
        self,
        workflow: WorkflowDefinition[In, Out],
        payload: In | Unset = ...,
        **options: Unpack[StartOptions],
    ) -> SyncHandle[Out]: ...
    @overload
    def start(
        self, workflow: str, payload: Any = ..., **options: Unpack[StartOptions]
    ) -> SyncHandle[Any]: ...
    def start(
        self,
        workflow: WorkflowDefinition[Any, Any] | str,
        payload: Any = UNSET,
        **options: Unpack[StartOptions],
    ) -> SyncHandle[Any]:
        """Store a run; some pod executes it. Returns once it is durable; see `Client.start`."""
        made = self._call(lambda client: client.start(workflow, payload, **options))
        return SyncHandle(self, made)

    def run(
        self,
        workflow: WorkflowDefinition[In, Out],
        payload: In | Unset = UNSET,
        *,
        timeout: float | None = None,
        **options: Unpack[StartOptions],
    ) -> Out:
        """Start and wait: the result, or the recorded error with its type."""
        check_timeout(timeout)
        return self.start(workflow, payload, **options).wait(timeout)

    @overload
    def start_many(
        self,
        workflow: WorkflowDefinition[In, Out],
        payloads: Iterable[In],
        *,
        run_ids: Sequence[str] | None = ...,
        progress: Progress | None = ...,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncStarted[Out]]: ...
    @overload
    def start_many(
        self,
        workflow: str,
        payloads: Iterable[Any],
        *,
        run_ids: Sequence[str] | None = ...,
        progress: Progress | None = ...,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncStarted[Any]]: ...
    def start_many(
        self,
        workflow: WorkflowDefinition[Any, Any] | str,
        payloads: Iterable[Any],
        *,
        run_ids: Sequence[str] | None = None,
        progress: Progress | None = None,
        **options: Unpack[StartOptions],
    ) -> builtins.list[SyncStarted[Any]]:
        """A run for each payload, in chunks; see `Client.start_many`. progress: called in the client's own thread."""
        given = builtins.list(payloads)  # in this thread: they may come from a database cursor
        made = self._call(
            lambda client: client.start_many(
                workflow, given, run_ids=run_ids, progress=progress, **options
            )
        )
        return [
            SyncStarted(
                None if each.handle is None else SyncHandle(self, each.handle),
                each.created,
                each.error,
            )
            for each in made
        ]

    def retry(self, run_id: str, payload: Any = KEEP) -> SyncHandle[Any]:
        """A fresh run of a failed or cancelled one; see `Client.retry`."""
        return SyncHandle(self, self._call(lambda client: client.retry(run_id, payload)))

    def handle(
        self, run_id: str, workflow: WorkflowDefinition[Any, Out] | None = None
    ) -> SyncHandle[Out]:
        """A handle on a run by its id; nothing is looked up."""

        async def make(client: Client) -> Handle[Out]:
            return client.handle(run_id, workflow)

        return SyncHandle(self, self._call(make))

    # -- waiting and reading
    def wait(self, run_id: str, timeout: float | None = None) -> Any:
        """The result of a run, as JSON values unless its workflow is known here."""
        return self._call(lambda client: client.wait(run_id, timeout))

    def get(self, run_id: str) -> RunInfo | None:
        """A run as it stands; None for an id nobody has."""
        return self._call(lambda client: client.get(run_id))

    def list(
        self,
        *,
        workflow: str | None = None,
        status: RunStatus | str | None = None,
        statuses: Sequence[RunStatus | str] = (),
        reason: str | None = None,
        source: str | None = None,
        id_prefix: str | None = None,
        since: float | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> Sequence[RunInfo]:
        """Runs, newest first; see `Client.list`."""
        return self._call(
            lambda client: client.list(
                workflow=workflow,
                status=status,
                statuses=statuses,
                reason=reason,
                source=source,
                id_prefix=id_prefix,
                since=since,
                limit=limit,
                offset=offset,
            )
        )

    def journal(self, run_id: str) -> Sequence[StepView]:
        """The entries of a run, by seq."""
        return self._call(lambda client: client.journal(run_id))

    def events(self, run_id: str) -> Sequence[RunEvent]:
        """The timeline of a run."""
        return self._call(lambda client: client.events(run_id))

    def why(self, run_id: str) -> Why:
        """What a run waits for, who holds it, and what would move it."""
        return self._call(lambda client: client.why(run_id))

    def cluster(self) -> ClusterStatus:
        """Runners, shards and runs in flight, from the database alone."""
        return self._call(lambda client: client.cluster())

    # -- acting on runs
    def signal(self, run_id: str, name: str, payload: Any = None, *, id: str | None = None) -> None:
        """Leave a signal in the run's mailbox; see `Client.signal`."""
        self._call(lambda client: client.signal(run_id, name, payload, id=id))

    def cancel(self, run_id: str, reason: str | None = None) -> None:
        """Ask a run to end; see `Client.cancel`."""
        self._call(lambda client: client.cancel(run_id, reason))

    def suspend(self, run_id: str, reason: str | None = None) -> None:
        """Put a run on hold; see `Client.suspend`."""
        self._call(lambda client: client.suspend(run_id, reason))

    def resume(self, run_id: str) -> None:
        """Let a run on hold go on; see `Client.resume`."""
        self._call(lambda client: client.resume(run_id))
