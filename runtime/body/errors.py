"""What a workflow body may not do, said where it is done."""

from __future__ import annotations

from perdure.storage.errors import PerdureError


class RefusedInBody(PerdureError, RuntimeError):
    """Something that cannot be replayed was used in a workflow body, or the body's context outside of it.

    The message names the construct and says where it belongs. It is raised where the construct is used, so a
    body could catch it; nothing has been started or recorded.
    """


class JournalMismatch(PerdureError):
    """The body did not do what its journal says it did (R14). Never raised inside the body."""
