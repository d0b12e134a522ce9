"""What the detector remembers from window to window, in plain types for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.alerts.figures import WindowFigures

__all__ = ["BestLevel", "DetectorState", "Incident"]


@dataclass(slots=True, kw_only=True)
class Incident:
    """An alert that has not recovered yet."""

    number: int
    kind: str
    """``"drop"``, ``"sag"``, ``"recurring"`` or ``"floor"``: how its level is measured."""
    step: int
    recover_above: float
    slow_below: float | None
    """For ``"recurring"``: a window below it is slow."""
    windows: int
    """How many windows together must come back above ``recover_above``."""
    healthy: list[WindowFigures]
    """After a drop: the baseline as it was, taken up again after the recovery."""


@dataclass(slots=True, kw_only=True)
class BestLevel:
    """The best long level so far, and the mean of the windows that made it."""

    level: float
    figures: WindowFigures


@dataclass(slots=True, kw_only=True)
class DetectorState:
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

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists, dicts and None only."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DetectorState:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        restored = {name: _restored(value) for name, value in values.items() if name in names}
        for name, record in (("best_median", BestLevel), ("best_steadiness", BestLevel), ("incident", Incident)):
            if restored.get(name) is not None:
                restored[name] = record(**{key: _restored(value) for key, value in restored[name].items()})
        return cls(**restored)


def _plain(value: Any) -> Any:
    if isinstance(value, WindowFigures):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, BestLevel | Incident):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, Mapping) and "signal" in value:
        return WindowFigures.from_dict(value)
    return value
