"""Ideal bytes of one operator call: each operand read once, each result written once."""

from __future__ import annotations

from typing import Any

__all__ = ["bytes_accessed"]


def bytes_accessed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Bytes that one call must move at least; 0 for views and metadata."""
    raise NotImplementedError
