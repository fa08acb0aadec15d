"""`ctx.log`: what a body has to say, silent while it replays and while it is taken out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from perdure.runtime.authoring.context import RunBody, RunFacts

LOGGER = "perdure.workflow"


class RunLog:
    """Writes lines with ``run_id`` and ``workflow``; ``facts`` are further keys, as in structlog.

    A line is written again only if the process died before what preceded the line was recorded.
    """

    __slots__ = ("_body", "_logger")

    def __init__(self, body: RunBody, facts: RunFacts) -> None:
        self._body = body
        self._logger = structlog.stdlib.get_logger(
            LOGGER, run_id=facts.run_id, workflow=facts.workflow
        )

    def debug(self, event: str, **facts: object) -> None:
        if not self._body.silent:
            self._logger.debug(event, **facts)

    def info(self, event: str, **facts: object) -> None:
        if not self._body.silent:
            self._logger.info(event, **facts)

    def warning(self, event: str, **facts: object) -> None:
        if not self._body.silent:
            self._logger.warning(event, **facts)

    def error(self, event: str, **facts: object) -> None:
        if not self._body.silent:
            self._logger.error(event, **facts)

    def exception(self, event: str, **facts: object) -> None:
        """An error line with the exception that is being handled."""
        if not self._body.silent:
            self._logger.exception(event, **facts)
