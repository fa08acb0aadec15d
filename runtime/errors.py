"""What a client is told when it asks for something a run cannot do."""

from __future__ import annotations

from perdure.storage.errors import InputError, PerdureError


class ClientClosed(PerdureError, RuntimeError):
    """A client was used where it is not open, or closed while something waited for it."""


def _short(run_id: str) -> str:
    return repr(run_id) if len(run_id) <= 200 else f"{run_id[:80]!r}… ({len(run_id):,} characters)"


class RunError(PerdureError):
    """Something about one run. ``run_id``: which."""

    def __init__(self, run_id: str, message: str) -> None:
        self.run_id = run_id
        super().__init__(message)


class RunNotFound(RunError):
    """Nobody has this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            run_id,
            f"there is no run {_short(run_id)} in this database: check the id (perdure workflows list) "
            "and the database URL",
        )


class RunIdConflict(RunError, InputError):
    """The id belongs to a run of another workflow. ``workflow``: asked for; ``holder``: whose it is."""

    def __init__(self, run_id: str, workflow: str, holder: str) -> None:
        self.workflow = workflow
        self.holder = holder
        super().__init__(
            run_id,
            f"run id {run_id!r} belongs to a run of {holder!r} and cannot be one of {workflow!r}: use another id",
        )


class RunEnded(RunError):
    """The run has ended and takes no messages any more."""

    def __init__(self, run_id: str, what: str) -> None:
        super().__init__(run_id, f"run {run_id!r} has already ended: {what} was not delivered")


class MailboxFull(RunError):
    """Too many unread messages, or too large ones. ``limit``: how many, or how many bytes, a mailbox may hold."""

    def __init__(self, run_id: str, what: str, limit: int, setting: str = "mailbox_limit") -> None:
        self.limit = limit
        holds = f"holds {limit} unread messages, its limit"
        if setting == "mailbox_bytes":
            holds = f"would hold more than {limit:,} bytes of unread messages, its limit"
        super().__init__(
            run_id,
            f"the mailbox of run {run_id!r} {holds}: {what} was not delivered; "
            f"the run has to wait for them, or raise the setting {setting}",
        )


class WrongStatus(RunError):
    """The run's status does not allow this. ``action``, ``status``."""

    def __init__(self, run_id: str, action: str, status: str, rule: str) -> None:
        self.action = action
        self.status = status
        super().__init__(run_id, f"cannot {action} run {run_id!r}: it is {status}; {rule}")
