"""How the model's values are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(**_: Any) -> Any:
        """For type checkers a frozen dataclass, and nobody assigns to its fields. Running, one that equals and hashes
        the same and is not frozen: a frozen one sets each field by a call, which takes 3.4 µs for an entry instead of
        0.9."""
        return dataclass(slots=True, unsafe_hash=True)


__all__ = ["value"]
