"""Readings that physics forbids, and why: one pure function a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Diagnosis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One violated check or one cause that the evidence supports."""

    code: str
    severity: str
    """``"note"``, ``"warning"`` or ``"error"``; an error withholds the reading."""
    message: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The figures that support it, by name with their unit."""
    likely_cause: str = ""
    fix: str = ""
