"""Logging of a pod: structlog over the standard library's handlers, as console lines or as JSON.

Only the command line configures logging; a library never does it to its host. Code logs with
``structlog.get_logger("perdure.…")``; records of other libraries (uvicorn, asyncio) get the same form. No line ever
holds a password: every text in an event is searched for URLs with one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import structlog

from perdure.runtime.authoring.current import where_now
from perdure.runtime.settings import Settings
from perdure.runtime.settings_rules import hide_credentials
from perdure.runtime.transports import transport_words
from perdure.sharding.lock_mode import LockChoice
from perdure.storage.interface import Capabilities

NONE_YET = "none in this release"
_DEPTH = 4  # of containers inside an event value that are searched for passwords


def configure_logs(
    *,
    format: str = "console",
    level: str = "info",
    stream: TextIO | None = None,
    application: str | None = None,
) -> None:
    """Send all logging of this process to ``stream`` (standard error if left out).

    format: console (coloured only where the stream is a terminal) or json (one object a line).
    level: debug, info, warning or error; libraries are shown from warning on. application: ``module:attribute``, whose
    top package is shown from ``level`` on like perdure itself.

    What a step or a body logs, through structlog or the standard library, carries the facts of its run.
    """
    out = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_place,
        add_trace,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *(each for each in shared if not isinstance(each, structlog.stdlib.ExtraAdder)),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(format, colours=out.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("perdure").setLevel(level.upper())
    if application:
        logging.getLogger(application.partition(":")[0].partition(".")[0]).setLevel(level.upper())


def _rendering(format: str, *, colours: bool) -> list[structlog.typing.Processor]:
    if format == "json":
        last: structlog.typing.Processor = structlog.processors.JSONRenderer(
            default=str, ensure_ascii=False
        )
    else:
        last = structlog.dev.ConsoleRenderer(
            colors=colours, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    # A traceback becomes text first, so that it is searched for passwords like everything else; local variables,
    # which may be anybody's data, are never part of it.
    return [structlog.processors.format_exc_info, redact_event, last]


def add_place(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: run_id, workflow, step and attempt of the body or step the line was written in."""
    # Read here and not bound to each step beforehand: most steps log nothing.
    for name, value in where_now().items():
        event.setdefault(name, value)
    return event


def add_trace(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: trace_id and span_id of the OpenTelemetry span the line was written in, if any."""
    # A span can only be current where somebody has imported the API.
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        span = api.get_current_span().get_span_context()
        if span.is_valid:
            event["trace_id"] = f"{span.trace_id:032x}"
            event["span_id"] = f"{span.span_id:016x}"
    return event


def redact_event(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A structlog processor: no password of any URL leaves with a log line."""
    return {key: _redact(value, _DEPTH) for key, value in event.items()}


def _redact(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return hide_credentials(value)
    if isinstance(value, bytes):
        return hide_credentials(value.decode("utf-8", "backslashreplace"))
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth and isinstance(value, Mapping):
        return {_redact(k, 0): _redact(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, Sequence | set | frozenset):
        return [_redact(each, depth - 1) for each in value]
    return hide_credentials(str(value))


@dataclass(frozen=True, slots=True)
class BootFacts:
    """What a pod says of itself once, in its log and in its runner row."""

    engine: str
    """memory or sql: the runner storage."""
    dialect: str
    tier: str
    """full: pods share the work. single-process: nobody takes over."""
    shard_lock: str
    shard_lock_why: str
    cdc: str
    returning: bool
    cron: str
    recording: str
    """full or coarse: of steps, unless their workflow says otherwise."""
    hints: str
    """How other processes are told of what happened: pushed by the database, http, polling the file, off."""
    replica_id: str
    address: str
    localhost: bool
    lease: str
    """Seconds; "none" with runner storage memory."""
    app: str
    """``module:attribute`` as served, "" where the application was built in code."""

    def info(self) -> dict[str, str]:
        """As texts, for the runner row."""
        return {key: _word(value) for key, value in asdict(self).items()}


def boot_facts(
    settings: Settings,
    capabilities: Capabilities,
    *,
    lock: LockChoice,
    replica_id: str,
    address: str,
) -> BootFacts:
    """Put together what the boot line and `cluster status` say of this pod."""
    shared = settings.runner_storage == "sql"
    if shared:
        mode, why = str(lock.mode), lock.why
    else:
        mode, why = "none", "runner storage memory: this process owns every shard"
    return BootFacts(
        engine=settings.runner_storage,
        dialect=f"{capabilities.dialect} {capabilities.server_version}".strip(),
        tier="full" if shared else "single-process",
        shard_lock=mode,
        shard_lock_why=why,
        cdc=NONE_YET,
        returning=capabilities.returning,
        cron=NONE_YET,
        recording=settings.recording,
        hints=transport_words(settings, capabilities),
        replica_id=replica_id,
        address=address,
        localhost=settings.localhost,
        lease=f"{settings.lease:g}" if shared else "none",
        app=settings.app or "",
    )


def log_boot(facts: BootFacts) -> None:
    """Write the boot line, and the warning about an address that only this machine can reach."""
    log = structlog.get_logger("perdure.runtime")
    log.info("runner.ready", **facts.info())
    if facts.localhost and facts.engine == "sql":
        log.warning(
            "runner.address-local",
            what="the runner's address can only be reached from this machine; "
            "set PERDURE_RUNNER_HOST (POD_IP in Kubernetes) to one that its peers can reach",
            address=facts.address,
            replica_id=facts.replica_id,
        )


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
