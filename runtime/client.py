"""The client: start runs, wait for them, talk to them. Needs the database and nothing else; no runner.

One file because it is one class and all an application calls; what it does is done in other modules.

async with Client("postgresql://…") as client:
    handle = await client.start(fulfil, order)
    shipment = await handle.wait()
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import structlog

from perdure.runtime.arguments import (
    StartOptions,
    check_number,
    check_options,
    check_timeout,
    joined,
    status_of,
)
from perdure.runtime.authoring.codec import ValueFault, encode_message
from perdure.runtime.authoring.definitions import UNSET, Unset, WorkflowDefinition
from perdure.runtime.authoring.errors import (
    SignalPayloadError,
    WorkflowCancelled,
)
from perdure.runtime.authoring.failures import decode_failure
from perdure.runtime.authoring.names import (
    check_known_id,
    check_label,
    check_message_id,
    check_run_id,
    check_signal_name,
    new_run_id,
)
from perdure.runtime.authoring.registry import Registry
from perdure.runtime.authoring.weight import HEAVY, is_heavy
from perdure.runtime.bulk import Bulk, Progress, Started
from perdure.runtime.errors import (
    ClientClosed,
    RunIdConflict,
    RunNotFound,
    WrongStatus,
)
from perdure.runtime.handle import Handle
from perdure.runtime.inspection import (
    NOTHING_OPEN,
    cluster_status,
    explain,
    info_of,
    json_value,
    step_views,
)
from perdure.runtime.mail import Mail
from perdure.runtime.parts import Parts
from perdure.runtime.results import ResultWatcher, RunEnd
from perdure.runtime.settings import Settings
from perdure.runtime.starting import StartBatcher, said, waits
from perdure.runtime.telemetry import Telemetry
from perdure.runtime.transports import Listeners
from perdure.runtime.views import ClusterStatus, RunInfo, StepView, Why
from perdure.sharding.slots import shard_of, slot_of
from perdure.storage.clock import Clock, Randomness
from perdure.storage.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    InputError,
    SchemaError,
)
from perdure.storage.interface import RunStore
from perdure.storage.model import (
    FORMAT,
    Hint,
    HintKind,
    Message,
    MessageKind,
    Meta,
    NewRun,
    RunEvent,
    RunFilter,
    RunRecord,
    RunStatus,
    StartOutcome,
    Topology,
)

In = TypeVar("In")
Out = TypeVar("Out")

log = structlog.get_logger("perdure.client")

KEEP: Any = object()
"""Default of `Client.retry`'s payload: the original one."""


class Client:
    """Use as an async context manager. One per process is enough; it may be shared by tasks of one event loop.

    database: a URL, or `Settings`. workflows: definitions that may be started and typed by name.
    Entering raises `ConfigurationError` when the database cannot be reached or its schema does not fit.
    """

    def __init__(
        self,
        database: str | Settings,
        *,
        workflows: Sequence[WorkflowDefinition[Any, Any]] = (),
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        settings = database if isinstance(database, Settings) else Settings(db=database)
        registry = Registry()
        for definition in workflows:
            registry.add(definition)
        self._parts = Parts.own(settings, registry, clock, randomness)
        self._owned = True
        self._services: asyncio.Task[None] | None = None
        self._shards = settings.shards
        self._prepare()

    @classmethod
    def sharing(cls, parts: Parts) -> Client:
        """A client over a runner's own connections and hints; the runner opens and closes them."""
        client = cls.__new__(cls)
        client._parts = parts
        client._owned = False
        client._services = None
        client._shards = parts.settings.shards
        client._prepare()
        return client

    def _prepare(self) -> None:
        parts = self._parts
        self._starts = StartBatcher(
            parts.store,
            parts.randomness,
            parts.clock,
            patience=2 * parts.settings.storage_deadline,
            local=parts.local,
        )
        if parts.local is None:
            self._watcher = ResultWatcher(parts.store, parts.bus, parts.randomness)
        else:
            self._watcher = ResultWatcher(
                parts.store, parts.bus, parts.randomness, in_memory=parts.local.has
            )
            parts.local.listen(self._watcher.tell)
        self._looking = asyncio.Lock()
        self._mail = Mail(
            parts.settings,
            parts.bus,
            parts.clock,
            parts.randomness,
            opened=lambda: self._store,
            existing=self._existing,
        )

    async def __aenter__(self) -> Self:
        if self._services is not None and not self._services.done():
            raise ClientClosed(
                "this client is open already: enter it once, and use it from any task"
            )
        if self._used and self._owned:
            self._parts = self._parts.renewed()
            self._prepare()
        self._used = True
        parts = self._parts
        self._telemetry = parts.telemetry or Telemetry.detect(parts.clock)
        if self._owned:
            self._shards, self._listeners = await parts.connect(self._telemetry.tally)
        self._failure = None
        self._loop = asyncio.get_running_loop()
        self._services = asyncio.create_task(self._serve(), name="perdure client")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._services is not None:
            self._services.cancel()
            await asyncio.gather(self._services, return_exceptions=True)
        self._end(
            ClientClosed(
                "the client was closed meanwhile; what was under way may or may not be stored: ask again with the "
                "same id"
            )
        )
        if self._owned:
            await self._parts.disconnect()

    def _end(self, error: ClientClosed) -> None:
        self._starts.end(error)
        self._watcher.end(error)

    @property
    def _store(self) -> RunStore:
        """Raises `ClientClosed` where nobody would answer."""
        if self._failure is not None:
            raise self._failure
        if self._services is None or self._services.done():
            raise ClientClosed(
                "this client is not open: use it inside `async with Client(…) as client:`, or the runner's own client "
                "while the runner runs"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise ClientClosed(
                "this client belongs to another event loop: make one for each loop, inside `async with Client(…)`"
            )
        return self._parts.store

    _used = False
    _failure: ClientClosed | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _listeners: Listeners | None = None

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as services:
                services.create_task(self._starts.run(), name="starts")
                services.create_task(self._watcher.run(), name="results")
                if self._listeners is not None:
                    services.create_task(self._listeners.run(), name="who listens")
        except Exception as error:  # nobody may wait for an answer that nobody will give
            log.exception("client.failed")
            self._failure = ClientClosed(f"the client has failed ({error!r}): open another")
            self._end(self._failure)

    # -- starting
    @overload
    async def start(
        self,
        workflow: WorkflowDefinition[In, Out],
        payload: In | Unset = ...,
        **options: Unpack[StartOptions],
    ) -> Handle[Out]: ...
    @overload
    async def start(
        self, workflow: str, payload: Any = ..., **options: Unpack[StartOptions]
    ) -> Handle[Any]: ...
    async def start(
        self,
        workflow: WorkflowDefinition[Any, Any] | str,
        payload: Any = UNSET,
        **options: Unpack[StartOptions],
    ) -> Handle[Any]:
        """Store a run; some runner executes it. Returns once it is durable.

        The id: ``run_id``, else what the workflow's idempotency key makes of the payload, else a new one. The same id
        again joins the run that has it, whatever its payload.
        Raises `WorkflowPayloadError`, `InvalidName` (ids), `PayloadTooLarge` before anything is stored;
        `UnknownWorkflowError` for a name this client does not know; `RunIdConflict` when the id belongs to another
        workflow; `DatabaseUnavailable`; `UnknownOutcome` when the database went away and did not come back in time:
        start again with the same id to find out.
        """
        check_options(options)
        definition = self.definition(workflow)
        make = partial(self._new_run, definition, payload, options.get("run_id"), options)
        run = await asyncio.to_thread(make) if is_heavy(payload) else make()
        return await self._submit(definition, run)

    def _new_run(
        self,
        definition: WorkflowDefinition[Any, Any],
        payload: Any,
        run_id: str | None,
        options: StartOptions,
    ) -> NewRun:
        text = definition.encode_payload(payload, limit=self._parts.settings.payload_limit)
        tenant = options.get("tenant")
        if run_id is not None:
            check_run_id(run_id)
        else:
            run_id = definition.run_id_for(payload, tenant)
        fresh = run_id is None
        if run_id is None:
            run_id = self._new_id()
        return NewRun(
            run_id=run_id,
            slot=slot_of(run_id),
            workflow=definition.name,
            start_token=self._parts.randomness.bits63(),
            payload=text,
            seed=self._parts.randomness.bits63(),
            version=definition.version,
            source=options.get("source", "app"),
            tenant=tenant,
            subject=options.get("subject"),
            trace=options.get("trace"),
            tags=joined([*definition.tags, *options.get("tags", ())]),
            fresh=fresh,
        )

    @overload
    async def start_many(
        self,
        workflow: WorkflowDefinition[In, Out],
        payloads: Iterable[In],
        *,
        run_ids: Sequence[str] | None = ...,
        progress: Progress | None = ...,
        **options: Unpack[StartOptions],
    ) -> list[Started[Out]]: ...
    @overload
    async def start_many(
        self,
        workflow: str,
        payloads: Iterable[Any],
        *,
        run_ids: Sequence[str] | None = ...,
        progress: Progress | None = ...,
        **options: Unpack[StartOptions],
    ) -> list[Started[Any]]: ...
    async def start_many(
        self,
        workflow: WorkflowDefinition[Any, Any] | str,
        payloads: Iterable[Any],
        *,
        run_ids: Sequence[str] | None = None,
        progress: Progress | None = None,
        **options: Unpack[StartOptions],
    ) -> list[Started[Any]]:
        """Start a run for each payload, in chunks of 500 (4 MiB at most), each one commit; their outcomes, in order.

        A payload that cannot be stored, or whose id belongs to another workflow, is an outcome with an ``error`` and
        keeps no other from being started. Payloads of one key, here or before, are one run. Of chunks whose answer
        was lost the error is `UnknownOutcome`: the same call again with the same ids finds out; what comes after them
        is not sent. run_ids: ids of your own, one for each payload. progress: called with (done, total) as chunks end.
        options: for all alike, as in `start` but run_id. Raises what `start` raises of them.
        """
        check_options(options)
        definition = self.definition(workflow)
        _ = self._store  # it is open
        given = list(payloads)
        if "run_id" in options:
            raise InputError("start_many() takes no run_id: use run_ids, one for each payload")
        if run_ids is not None and len(run_ids) != len(given):
            raise InputError(f"{len(run_ids)} run_ids for {len(given)} payloads: give one for each")

        def make(number: int) -> NewRun:
            run_id = None if run_ids is None else run_ids[number]
            return self._new_run(definition, given[number], run_id, options)

        answers = await Bulk(len(given), make, self._start_chunk, progress).run()
        return [self._started(definition, answer) for answer in answers]

    async def _start_chunk(self, runs: Sequence[NewRun]) -> Sequence[StartOutcome | Exception]:
        try:
            _ = self._store
        except ClientClosed:
            return [ClientClosed("the client was closed meanwhile; it was not sent")] * len(runs)
        with self._telemetry.starting(runs) as traced:
            answers = await self._starts.start_all(traced)
        waiting = {
            shard_of(run.slot, self._shards): run
            for run, answer in zip(runs, answers, strict=True)
            if isinstance(answer, StartOutcome) and waits(answer)
        }
        hints = [Hint(HintKind.START, run.run_id, run.slot) for run in waiting.values()]
        self._parts.bus.publish(hints)
        return answers

    def _started(
        self, definition: WorkflowDefinition[Any, Any], answer: StartOutcome | Exception
    ) -> Started[Any]:
        if isinstance(answer, Exception):
            return Started(None, error=answer)
        if answer.workflow != definition.name:
            error = RunIdConflict(answer.run_id, definition.name, answer.workflow)
            return Started(None, error=error)
        if answer.created:
            self._telemetry.tally.started[definition.name] += 1
        handle = Handle(self, answer.run_id, said(answer), definition)
        return Started(handle, created=answer.created)

    def _new_id(self) -> str:
        return new_run_id(self._parts.clock, self._parts.randomness)

    async def _submit(self, definition: WorkflowDefinition[Any, Any], run: NewRun) -> Handle[Any]:
        _ = self._store  # it is open
        if self._telemetry.tracing is None:
            outcome = await self._starts.start(run)
        else:
            with self._telemetry.starting([run]) as [traced]:
                outcome = await self._starts.start(traced)
        if outcome.workflow != run.workflow:
            raise RunIdConflict(run.run_id, run.workflow, outcome.workflow)
        if outcome.created:
            self._telemetry.tally.started[run.workflow] += 1
        self._tell_start(run, outcome)
        return Handle(self, run.run_id, said(outcome), definition)

    def _tell_start(self, run: NewRun, outcome: StartOutcome) -> None:
        if waits(outcome):
            self._parts.bus.publish([Hint(HintKind.START, run.run_id, run.slot)])

    async def run(
        self,
        workflow: WorkflowDefinition[In, Out],
        payload: In | Unset = UNSET,
        *,
        timeout: float | None = None,
        **options: Unpack[StartOptions],
    ) -> Out:
        """Start and wait: the result, or the recorded error with its type."""
        check_timeout(timeout)
        handle = await self.start(workflow, payload, **options)
        return await handle.wait(timeout)

    def handle(
        self, run_id: str, workflow: WorkflowDefinition[Any, Out] | None = None
    ) -> Handle[Out]:
        """A handle on a run by its id; nothing is looked up."""
        return Handle(self, run_id, "running", workflow, known=False)

    def definition(
        self, workflow: WorkflowDefinition[Any, Any] | str
    ) -> WorkflowDefinition[Any, Any]:
        if isinstance(workflow, str):
            return self._parts.registry.get(workflow)
        if not isinstance(workflow, WorkflowDefinition):
            raise InputError(
                f"{workflow!r} is not a workflow: pass a function decorated with @workflow, or its name"
            )
        return workflow

    # -- waiting and reading
    async def wait(self, run_id: str, timeout: float | None = None) -> Any:
        """The result of a run, as JSON values unless its workflow is known here. Errors as in `Handle.wait`."""
        return await self.outcome(await self.ended(run_id, timeout), None)

    async def ended(
        self, run_id: str, timeout: float | None = None, *, known: bool = False
    ) -> RunEnd:
        """How a run ended, once it has. Raises `RunNotFound` for an id nobody has, TimeoutError,
        `InputError` for a timeout that is no number of seconds.

        known: the run certainly exists, so that is not looked up.
        """
        seconds = check_timeout(timeout)
        _ = self._store  # it is open
        if not known:
            await self._existing(run_id)
        if seconds is None:
            return await self._watcher.wait(run_id)
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._watcher.wait(run_id)
        except TimeoutError:
            if not limit.expired():
                raise
            said = f"run {run_id!r} has not ended within {seconds:g} s; it goes on (`why` says what it waits for)"
            raise TimeoutError(said) from None

    async def outcome(self, record: RunEnd, workflow: WorkflowDefinition[Any, Any] | None) -> Any:
        """The result of an ended run, or its error raised; a large one is decoded in a thread."""
        if len(record.result or "") > HEAVY:
            return await asyncio.to_thread(self.outcome_of, record, workflow)
        return self.outcome_of(record, workflow)

    def outcome_of(self, record: RunEnd, workflow: WorkflowDefinition[Any, Any] | None) -> Any:
        """The result of an ended run, or its error raised."""
        if workflow is None:
            workflow = self._known(record.workflow)
        if record.status is RunStatus.SUCCEEDED:
            if workflow is None:
                return json_value(record.result)
            return workflow.decode_result(record.result)
        if record.status is RunStatus.CANCELLED:
            raise WorkflowCancelled(record.run_id, record.reason)
        error = record.error or "{}"
        raise workflow.decode_error(error) if workflow is not None else decode_failure(error)

    async def get(self, run_id: str) -> RunInfo | None:
        """A run as it stands; None for an id nobody has."""
        record = await self._store.read_run(check_known_id(run_id))
        return None if record is None else info_of(record)

    async def list(
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
        """Runs, newest first. since: Unix seconds. Raises `InputError`, listing the valid statuses for another."""
        for what, text in (("workflow", workflow), ("reason", reason), ("source", source)):
            check_label(what, text)
        if id_prefix is not None:
            check_known_id(id_prefix)
        check_number("limit", limit, int)
        check_number("offset", offset, int)
        if since is not None:
            check_number("since", since, int, float)
        wanted = [*statuses, *([status] if status is not None else [])]
        records = await self._store.list_runs(
            RunFilter(
                workflow=workflow,
                statuses=[status_of(s) for s in wanted],
                reason=reason,
                source=source,
                id_prefix=id_prefix,
                since=since,
                limit=limit,
                offset=offset,
            )
        )
        return [info_of(r) for r in records]

    async def journal(self, run_id: str) -> Sequence[StepView]:
        """The entries of a run, by seq. Raises `RunNotFound`."""
        await self._existing(run_id)
        journals = await self._store.read_journals([run_id])
        return step_views(journals[run_id])

    async def events(self, run_id: str) -> Sequence[RunEvent]:
        """The timeline of a run. Raises `RunNotFound`."""
        await self._existing(run_id)
        return await self._store.read_events(run_id)

    async def why(self, run_id: str) -> Why:
        """What a run waits for, who holds it, and what would move it. Raises `RunNotFound`."""
        record = await self._existing(run_id)
        topology, _ = await self._topology()
        events = await self._store.read_events(run_id) if record.hold is not None else ()
        items = NOTHING_OPEN if record.status.final else await self._store.read_open(run_id)
        return explain(record, topology, self._parts.settings.shards, events, items)

    async def cluster(self) -> ClusterStatus:
        """Runners, shards and runs in flight, from the database alone."""
        topology, meta = await self._topology()
        runs = await self._store.count_runs()
        return cluster_status(topology, meta, runs)

    async def _topology(self) -> tuple[Topology, Meta]:
        async with self._looking:  # each look has a connection of its own, and one is enough
            return await self._read_topology()

    async def _read_topology(self) -> tuple[Topology, Meta]:
        cluster = self._parts.database.cluster()
        try:  # a caller that is cancelled while this opens has it closed, too
            meta = await cluster.open()
            return await cluster.read_topology(), meta
        except SchemaError:
            raise
        except ConfigurationError as error:  # it was right when this client was opened
            raise DatabaseUnavailable(f"cluster: {error}") from error
        finally:
            await cluster.close()

    # -- acting on runs
    async def signal(
        self, run_id: str, name: str, payload: Any = None, *, id: str | None = None
    ) -> None:
        """Leave a signal in the run's mailbox; it is kept until waited for.

        id: the same id delivered twice is one signal. Raises `RunNotFound`, `RunEnded`, `MailboxFull`, `InputError`.
        """
        check_known_id(run_id)
        check_signal_name(name)
        if id is not None:
            check_message_id(id)
        what = f"the payload of signal {name!r}"
        try:
            text = encode_message(payload, what, limit=self._parts.settings.payload_limit)
        except ValueFault as fault:
            raise SignalPayloadError(name, fault.errors, fault.missing) from fault
        message_id = (
            f"signal:{id if id is not None else format(self._parts.randomness.bits63(), 'x')}"
        )
        message = Message(run_id, message_id, MessageKind.SIGNAL, name=name, body=text)
        outcome = await self._mail.send(message)
        self._mail.check_sent(outcome, run_id, f"signal {name!r}")

    async def cancel(self, run_id: str, reason: str | None = None) -> None:
        """Ask a run to end. One nobody entered ends at once; a running body gets CancelledError and may clean up.

        A second cancel, or one of a cancelled run, changes nothing. Raises `RunNotFound`; `RunEnded` when it
        succeeded or failed before.
        """
        await self._mail.cancel(run_id, reason)

    async def suspend(self, run_id: str, reason: str | None = None) -> None:
        """Put a run on hold: it runs no code until `resume`, and its mailbox goes on collecting. ``reason`` is for
        people (`why`, the timeline).

        A run nobody has in memory is on hold at once. One that is being executed starts no more steps, and is on hold
        as soon as those that run have ended. One that is on hold already stays as it is. Raises `RunNotFound`,
        `RunEnded`.
        """
        await self._mail.suspend(run_id, reason)

    async def resume(self, run_id: str) -> None:
        """Let a run on hold (crash loop, nondeterminism, operator) go on, with a new crash budget, due now; or take a
        suspend back that has not come about yet.

        Raises `RunNotFound`; `WrongStatus` when it is not on hold.
        """
        await self._mail.resume(run_id)

    async def retry(self, run_id: str, payload: Any = KEEP) -> Handle[Any]:
        """A fresh run, with a new id, of a failed or cancelled one; ``payload`` replaces the original.

        Raises `RunNotFound`, `WrongStatus` for other statuses; for a new payload `UnknownWorkflowError` and
        `WorkflowPayloadError`.
        """
        record = await self._existing(run_id)
        if record.status not in (RunStatus.FAILED, RunStatus.CANCELLED):
            raise WrongStatus(
                run_id, "retry", record.status, "only failed and cancelled runs can be retried"
            )
        definition = self._known(record.workflow)
        text = record.payload
        if payload is not KEEP:
            definition = self._parts.registry.get(record.workflow)
            text = definition.encode_payload(payload, limit=self._parts.settings.payload_limit)
        fresh = self._new_id()
        run = NewRun(
            run_id=fresh,
            slot=slot_of(fresh),
            workflow=record.workflow,
            start_token=self._parts.randomness.bits63(),
            payload=text,
            seed=self._parts.randomness.bits63(),
            version=record.version,
            source=record.source,
            tenant=record.tenant,
            subject=record.subject,
            trace=record.trace,
            tags=record.tags,
            format=FORMAT if payload is not KEEP else record.payload_format,
        )
        _ = self._store  # it is open
        self._tell_start(run, await self._starts.start(run))
        return Handle(self, fresh, "running", definition)

    def _known(self, workflow: str) -> WorkflowDefinition[Any, Any] | None:
        registry = self._parts.registry
        return registry.get(workflow) if workflow in registry else None

    async def _existing(self, run_id: str) -> RunRecord:
        record = await self._store.read_run(check_known_id(run_id))
        if record is None:
            raise RunNotFound(run_id)
        return record
