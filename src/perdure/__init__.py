"""perdure: durable workflows in Python that outlive their pods.

    from perdure import App, Context, step, workflow

The names below are the public API; everything else may change without notice.
"""

from perdure.runtime.app import App
from perdure.runtime.authoring.context import Context
from perdure.runtime.authoring.current import StepInfo, current_step
from perdure.runtime.authoring.definitions import WorkflowDefinition, workflow
from perdure.runtime.authoring.errors import (
    DefinitionError,
    DuplicateDefinitionError,
    InvalidDuration,
    InvalidName,
    NondeterminismError,
    NonRetryableError,
    OutsideBodyError,
    OutsideStepError,
    PayloadTooLarge,
    RecordedError,
    SignalPayloadError,
    SignalTimeoutError,
    StepInputError,
    StepResultError,
    StepResultTooLarge,
    StepTimeoutError,
    UnknownWorkflowError,
    WorkflowCancelled,
    WorkflowCrashLooped,
    WorkflowPayloadError,
    WorkflowResultError,
    WorkflowResultTooLarge,
)
from perdure.runtime.authoring.retry import Retry
from perdure.runtime.authoring.step import StepDefinition, step
from perdure.runtime.bulk import Started
from perdure.runtime.client import Client
from perdure.runtime.errors import (
    ClientClosed,
    MailboxFull,
    RunEnded,
    RunIdConflict,
    RunNotFound,
    WrongStatus,
)
from perdure.runtime.handle import Handle
from perdure.runtime.runner import Runner
from perdure.runtime.settings import Settings
from perdure.runtime.sync_client import SyncClient, SyncHandle, SyncStarted
from perdure.runtime.views import ClusterStatus, RunInfo, RunnerView, StepView, Why
from perdure.storage.errors import (
    CannotConnect,
    ConfigurationError,
    DatabaseUnavailable,
    DisagreementError,
    InputError,
    InUseError,
    PerdureError,
    PortTaken,
    SchemaError,
    UnknownOutcome,
)
from perdure.storage.model import RunStatus

__version__ = "0.1.0"

__all__ = [
    "App",
    "CannotConnect",
    "Client",
    "ClientClosed",
    "ClusterStatus",
    "ConfigurationError",
    "Context",
    "DatabaseUnavailable",
    "DefinitionError",
    "DisagreementError",
    "DuplicateDefinitionError",
    "Handle",
    "InUseError",
    "InputError",
    "InvalidDuration",
    "InvalidName",
    "MailboxFull",
    "NonRetryableError",
    "NondeterminismError",
    "OutsideBodyError",
    "OutsideStepError",
    "PayloadTooLarge",
    "PerdureError",
    "PortTaken",
    "RecordedError",
    "Retry",
    "RunEnded",
    "RunIdConflict",
    "RunInfo",
    "RunNotFound",
    "RunStatus",
    "Runner",
    "RunnerView",
    "SchemaError",
    "Settings",
    "SignalPayloadError",
    "SignalTimeoutError",
    "Started",
    "StepDefinition",
    "StepInfo",
    "StepInputError",
    "StepResultError",
    "StepResultTooLarge",
    "StepTimeoutError",
    "StepView",
    "SyncClient",
    "SyncHandle",
    "SyncStarted",
    "UnknownOutcome",
    "UnknownWorkflowError",
    "Why",
    "WorkflowCancelled",
    "WorkflowCrashLooped",
    "WorkflowDefinition",
    "WorkflowPayloadError",
    "WorkflowResultError",
    "WorkflowResultTooLarge",
    "WrongStatus",
    "current_step",
    "step",
    "workflow",
]
