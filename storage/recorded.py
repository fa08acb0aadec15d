"""What the tables show of a recorded error beside its full text."""

from __future__ import annotations

import json

MESSAGE_LIMIT = 500
"""Characters of a message in lists; the recorded error itself is kept whole."""


def error_summary(error: str | None) -> tuple[str | None, str | None]:
    """Type and message of a recorded error (JSON), for the columns `error_type` and `error_message`.

    A text that is no JSON object has no type and is its own message.
    """
    if error is None:
        return None, None
    try:
        found = json.loads(error)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return None, error[:MESSAGE_LIMIT]
    kind, message = found.get("type"), found.get("message")
    return (
        kind if isinstance(kind, str) else None,
        message[:MESSAGE_LIMIT] if isinstance(message, str) else None,
    )
