"""What the detector remembers from window to window, in plain types for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from mfu_monitor.alerts.figures import WindowFigures
from mfu_monitor.counting.plain_types import PlainTypes

__all__ = ["BestLevel", "DetectorState", "Incident"]


@dataclass(slots=True, kw_only=True)
class Incident:
    """An alert that has not recovered yet."""

    number: int
    kind: str
    """``"drop"``, ``"sag"``, ``"recurring"``, ``"part"`` or ``"floor"``: how its level is measured."""
    step: int
    recover_above: float
    slow_below: float | None
    """For ``"recurring"``: a window below it is slow."""
    windows: int
    """How many windows together must come back above ``recover_above``."""
    healthy: list[WindowFigures]
    """After a drop: the baseline as it was, taken up again after the recovery."""
    reference: float | None = None
    """The level before; None after a floor."""
    lost_s: float = 0.0
    """Seconds lost since its first window."""
    part: str | None = None
    """The part of the step whose seconds must come back, where it was that which grew."""


@dataclass(slots=True, kw_only=True)
class BestLevel:
    """The best long level so far, and the mean of the windows that made it."""

    level: float
    figures: WindowFigures


@dataclass(slots=True, kw_only=True)
class DetectorState(PlainTypes):
    """Everything between two updates."""

    ignore: int = 0
    """Windows of the warm-up still to come."""
    quiet: int = 0
    """Windows of the cooldown still to come."""
    quiet_change: int = 0
    """The same for notices of a change."""
    fragments: int = 0
    """Windows in a row that were too short to be judged."""
    incidents: int = 0
    history: list[WindowFigures] = field(default_factory=list)
    """Trailing windows of the present level, the newest last."""
    pending: list[WindowFigures] = field(default_factory=list)
    """The present run of low windows: a dip or the start of a drop."""
    other_kind: list[WindowFigures] = field(default_factory=list)
    """The present run of windows whose steps are of another kind."""
    recent: list[WindowFigures] = field(default_factory=list)
    """Every window of the present level, for the long levels."""
    best_median: BestLevel | None = None
    best_steadiness: BestLevel | None = None
    incident: Incident | None = None
