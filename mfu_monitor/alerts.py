"""Readings in, alerts out: pure and replayable."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Alert", "CauseShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """One factor of a drop: its value before and after, and its share of the loss (0..1)."""

    name: str
    before: float | None
    after: float | None
    unit: str
    share_of_loss: float | None
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One notice: ``kind`` is ``"drop"``, ``"floor"``, ``"sag"``, ``"recovery"`` or ``"change"``."""

    kind: str
    step: int
    mfu: float | None
    baseline: float | None
    message: str
    causes: tuple[CauseShare, ...] = ()
